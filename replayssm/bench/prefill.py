"""Time prefill of one sequence by a layer's scan beside direct calls of flash-linear-attention's kernels."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.bench import report
from replayssm.bench.cases import CASES, Case
from replayssm.bench.machine import about, slug
from replayssm.bench.options import writable
from replayssm.bench.progress import Progress
from replayssm.ops import chunked
from replayssm.ops.records import Records
from replayssm.ops.scan import expect_fla, scan

TOKENS = (512, 2048, 8192, 32768)
DTYPE = torch.bfloat16
REPEATS = 20
SLOW_REPEATS = 3  # of plain PyTorch, hundreds of times slower
WARM_CALLS = 3
BUDGET = 2.0**-7  # RMS error against plain PyTorch, which is exact beside it: two roundings of bf16
WHERE = "bench prefill"

Results = tuple[Tensor, Tensor]  # outputs, final state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench prefill``."""
    layers = [case.layer for case in CASES]
    parser.add_argument("--layer", nargs="+", choices=layers, default=layers, help="default: all")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=list(TOKENS), help=f"default: {' '.join(map(str, TOKENS))}"
    )
    parser.add_argument(
        "--out", type=writable, help="the JSON file; default: one named after the GPU, in bench/results/"
    )
    parser.add_argument("--commit", help="what was measured, where the source is not a git checkout")


def run(options: argparse.Namespace) -> int:
    """Check, time, print a table and write the JSON.

    Returns:
        The exit status: 0, or 1 if a case failed its correctness gate; such a case is neither timed nor written.

    Raises:
        ImportError: flash-linear-attention is not installed.
    """
    if min(options.tokens) < 1:
        raise ValueError(f"--tokens must be at least 1; got {min(options.tokens)}. Give other lengths.")
    if not torch.cuda.is_available():
        print("Nothing was timed: torch finds no GPU here, and a scan on a CPU is plain PyTorch.")
        return 0
    expect_fla(WHERE)
    cases = [case for case in CASES if case.layer in options.layer]
    device = torch.device("cuda", torch.cuda.current_device())
    progress = Progress(len(cases) * len(options.tokens), 2)
    lengths = sorted(options.tokens, reverse=True)  # fla tunes a kernel at the first length that it meets, for all
    entries = [measure_case(case, tokens, device, progress) for case in cases for tokens in lengths]
    runs = [entry for entry in reversed(entries) if entry is not None]
    named = f"--layer {' '.join(options.layer)} --tokens {' '.join(map(str, options.tokens))}"
    document = about(f"replayssm bench prefill {named}", options.commit, device) | {"runs": runs}
    path = options.out or report.RESULTS / f"prefill_{slug(str(document['gpu']))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{table(runs)}\n\nOn one {document['gpu']}, batch 1, {DTYPE}. Written: {path}")
    failed = len(entries) - len(runs)
    if failed:
        print(f"{failed} of {len(entries)} cases gave wrong results and are left out.", file=sys.stderr)
    return 1 if failed else 0


@torch.no_grad()
def measure_case(case: Case, tokens: int, device: torch.device, progress: Progress) -> dict[str, Any] | None:
    """Check and time one case: an entry of "runs", or None if the gate did not pass."""
    label = f"{case.layer}, {tokens} tokens"
    progress.stage(f"{label}: checking")
    q, records = case.draw(1, tokens, dtype=DTYPE, device=device, seed=1)
    state = torch.randn(1, case.nheads, case.headdim, case.d_state, device=device)
    as_left = [time_innermost(x) for x in (q, records.k, records.v)]
    left = records._replace(k=as_left[1], v=as_left[2])
    arms: dict[str, Callable[[], Results]] = {
        "scan_ms": lambda: scan(WHERE, q, records, state, case.recurrence, "fla"),
        "scan_transposed_ms": lambda: scan(WHERE, as_left[0], left, state, case.recurrence, "fla"),
        "direct_ms": direct_call(case, q, records, state),
        "torch_ms": lambda: chunked.scan(q, records, state, case.recurrence),
    }
    exact = arms["torch_ms"]()
    errors = [relative_error(arms[name](), exact) for name in ("scan_ms", "scan_transposed_ms", "direct_ms")]
    if not all(error <= BUDGET for error in errors):  # NaN is not within a budget
        progress.part(f"{label}: NOT TIMED, results are wrong: errors {errors}, budget {BUDGET}")
        return None
    progress.stage(f"{label}: timing")
    times = wall_times(arms)
    ratio = times["scan_ms"] / times["direct_ms"]
    progress.part(f"{label}: {times['scan_ms']:.3f} ms, {ratio:.2f} of a direct call")
    sizes = {name: getattr(case, name) for name in ("layer", "geometry", "nheads", "headdim", "d_state", "ngroups")}
    return sizes | {"tokens": tokens, **times, "ratio": ratio, "error": errors[0], "budget": BUDGET}


def direct_call(case: Case, q: Tensor, records: Records, state: Tensor) -> Callable[[], Results]:
    """A call of fla's own function for this recurrence, with every argument as it takes them made beforehand."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    k, v, g, beta = records
    shared = dict(scale=1.0, initial_state=state, output_final_state=True, state_v_first=True)
    if case.recurrence.decay == "channel":
        return lambda: chunk_kda(q, k, v, g, beta, **shared)
    g = g.squeeze(-1)
    if case.recurrence.delta:
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta, **shared)
    heads = case.nheads // case.ngroups
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    v = (v * beta.unsqueeze(-1)).to(v.dtype)
    return lambda: chunk_simple_gla(q, k, v, g, **shared)


def time_innermost(x: Tensor) -> Tensor:
    """``x`` (batch, t, heads, features) with time innermost in memory, as the layers' convolution leaves it."""
    return x.flatten(2).mT.contiguous().mT.unflatten(2, x.shape[2:])


def relative_error(got: Results, exact: Results) -> float:
    """The larger RMS error of outputs and final state, as a fraction of the RMS of what is exact."""
    pairs = [(x.float(), y.float()) for x, y in zip(got, exact, strict=True)]
    return max(((x - y).square().mean() / y.square().mean()).sqrt().item() for x, y in pairs)


def wall_times(arms: dict[str, Callable[[], Results]]) -> dict[str, float]:
    """Milliseconds of each arm, its launches included: medians of calls in turn, each waited for."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_CALLS + REPEATS):
        for name, arm in arms.items():
            if name == "torch_ms" and number >= WARM_CALLS + SLOW_REPEATS:
                continue
            torch.cuda.synchronize()
            begin = time.perf_counter()
            arm()
            torch.cuda.synchronize()
            if number >= WARM_CALLS:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in taken.items()}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of a scan of one layer, a row for each case."""
    names = ("direct_ms", "scan_ms", "scan_transposed_ms", "torch_ms")
    rows = [
        [run["layer"], str(run["tokens"]), *(f"{run[name]:.3f}" for name in names), f"{run['ratio']:.2f}"]
        for run in runs
    ]
    header = ["layer", "tokens", "fla called directly (ms)", "scan (ms)", "scan, time innermost (ms)"]
    return report.markdown([*header, "plain PyTorch (ms)", "scan / direct"], rows)
