"""Time steps of several tokens (a token and its drafts) beside states kept for rollback; without a GPU, count bytes."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from replayssm.bench import report, timing, verify_report
from replayssm.bench.cases import Case
from replayssm.bench.gate import half
from replayssm.bench.machine import about
from replayssm.bench.options import DTYPES, add_cases, add_output, chosen_cases, named
from replayssm.bench.progress import Progress
from replayssm.bench.sequences import Kernels
from replayssm.plan import Traffic, conventional_step, replay_step

BATCHES = (256,)
TOKENS = (1, 2, 4, 8, 16)
# tokens a step, up to -> window: the more come at once, the longer a window must be to hold several steps
AUTO = {2: 16, 8: 32, 16: 64}
LONGEST = 256  # tokens of a window
STAGES = ("tuning the native step", "checking", "timing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench verify``."""
    add_cases(parser, BATCHES)
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=list(TOKENS), help=f"of a step; default: {' '.join(map(str, TOKENS))}"
    )
    auto = ", ".join(f"{window} up to {tokens}" for tokens, window in AUTO.items())
    parser.add_argument(
        "--window",
        nargs="+",
        default=["auto"],
        help=f'tokens: one number, or one for each of --tokens; "auto" (default) follows the tokens: {auto}, then 4 '
        "times as many",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Check, time, print a table and write the JSON.

    Returns:
        The exit status: 0, or 1 if a case failed its correctness gate; such a case is neither timed nor written.
    """
    cases = chosen_cases(options)
    windows = chosen_windows(options.tokens, options.window)
    if not torch.cuda.is_available():
        print(traffic_table(cases, options.batch, windows, DTYPES[options.dtype]))
        print("\nThis is the traffic model (replayssm/plan.py). Nothing was timed: torch finds no GPU here.")
        return 0
    return _measure(cases, windows, options)


def chosen_windows(tokens: Sequence[int], asked: Sequence[str]) -> dict[int, int]:
    """Tokens a step -> window, from the options of these names.

    Raises:
        ValueError: tokens below 1, a window that does not hold a step, or another number of windows than of tokens.
    """
    if min(tokens) < 1:
        raise ValueError(f"--tokens must be at least 1; got {min(tokens)}. Give other numbers.")
    if len(asked) not in (1, len(tokens)):
        raise ValueError(
            f"--window must be 1 value, or {len(tokens)}, one for each of --tokens; got {len(asked)}. Give one for all."
        )
    each = list(asked) * (len(tokens) // len(asked))
    windows = {t: _window(t, said) for t, said in zip(tokens, each, strict=True)}
    for t, window in windows.items():
        if not max(t, 2) <= window <= LONGEST:
            raise ValueError(
                f"--window must be {max(t, 2)} to {LONGEST} for {t} tokens; got {window}. It holds a step at least."
            )
    return windows


def _window(tokens: int, said: str) -> int:
    if said == "auto":
        return next((window for most, window in AUTO.items() if tokens <= most), 4 * tokens)
    if not said.isdecimal():
        raise ValueError(f'--window must be "auto" or numbers of tokens; got {said!r}. Give a number.')
    return int(said)


def traffic(case: Case, batch: int, window: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that each kind of step moves, by ``replayssm.plan``."""
    sizes = case.layer_bytes(dtype)
    moved: dict[str, Traffic] = {
        "conventional": conventional_step(sizes),
        "replay": replay_step(sizes, window, tokens),
        "replay_half": replay_step(sizes, window, tokens, half(tokens)),
        "native": conventional_step(sizes, tokens),
    }
    return {f"bytes_{name}": batch * each.moved for name, each in moved.items()}


def traffic_table(cases: Sequence[Case], batches: Sequence[int], windows: dict[int, int], dtype: torch.dtype) -> str:
    """Bytes of each kind of step in conventional steps of one token, as a table."""
    rows = []
    for case in cases:
        for batch in batches:
            for tokens, window in windows.items():
                one, *others = traffic(case, batch, window, tokens, dtype).values()
                ratios = [f"{other / one:.2f}" for other in others]
                rows.append([case.layer, str(batch), str(tokens), str(window), f"{one / 1e6:,.1f}", *ratios])
    header = ["layer", "batch", "tokens", "window", "conventional (MB)", "replay", "half kept", "native"]
    return report.markdown(header, rows)


def measure_batch(
    case: Case,
    batch: int,
    windows: dict[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    ceiling: float,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Tune, check and time one case for all numbers of tokens: entries of "runs", without those that are wrong.

    Args:
        windows: tokens a step -> window.
        ceiling: TB/s that this GPU reads.
    """
    from replayssm.bench import arms, gate, tune  # these need triton

    progress.stage(f"{case.layer} batch {batch}: tuning the conventional step")
    states = [gate.random_state(case, batch, device) for _ in range(timing.copies(batch * case.state_bytes))]
    config = tune.tune(case, states, dtype=dtype)
    step = tune.step_with(config, case)
    entries = []
    for tokens, window in windows.items():
        label = f"{case.layer} batch {batch}, {tokens} tokens"
        progress.stage(f"{label}: {STAGES[0]}")
        snapshots = [torch.empty(batch, tokens, *state.shape[1:], device=device) for state in states]
        native_config = tune.tune_native(case, states, snapshots, tokens=tokens, dtype=dtype)
        native = tune.native_with(native_config, case)
        progress.stage(f"{label}: {STAGES[1]}")
        verdict = gate.check_tokens(
            case, batch, window, tokens, dtype=dtype, device=device, kernels=kernels, step=step, native=native
        )
        if not verdict.passed:
            progress.part(f"{label}: NOT TIMED, results are wrong: {verdict}")
            continue
        progress.stage(f"{label}: {STAGES[2]}")
        times = arms.time_tokens(
            case, states, snapshots, step, native, tokens=tokens, window=window, dtype=dtype, kernels=kernels
        )
        unit = times["conventional"].median_us
        moved = traffic(case, batch, window, tokens, dtype)
        steps = {f"{name}_steps": time.median_us / unit for name, time in times.items() if name != "conventional"}
        progress.part(f"{label}: {', '.join(f'{name} {value:.2f}' for name, value in steps.items())}")
        entries.append(
            dict(
                layer=case.layer,
                geometry=case.geometry,
                nheads=case.nheads,
                headdim=case.headdim,
                d_state=case.d_state,
                ngroups=case.ngroups,
                dtype=str(dtype).removeprefix("torch."),
                batch=batch,
                tokens=tokens,
                half=half(tokens),
                window=window,
                conventional_config=str(config),
                conventional_tb_s=2 * batch * case.state_bytes / unit / 1e6,  # of the state alone
                native_config=str(native_config),
                native_tb_s=(1 + tokens) * batch * case.state_bytes / times["native"].median_us / 1e6,
                **{f"{name}_us": time.median_us for name, time in times.items()},
                **{f"{name}_spread_us": time.spread_us for name, time in times.items()},
                **steps,
                **moved,
                percent_of_ceiling=100 * moved["bytes_replay"] / times["replay"].median_us / 1e6 / ceiling,
                gate=verdict._asdict(),
            )
        )
        del snapshots  # 16 states of a large batch are 16 GiB: the next ones must find room
    return entries


def _measure(cases: Sequence[Case], windows: dict[int, int], options: argparse.Namespace) -> int:
    from replayssm.bench.ceiling import read_ceiling  # these need triton
    from replayssm.ops import triton_decode

    device = torch.device("cuda", torch.cuda.current_device())
    wanted = len(cases) * len(options.batch) * len(windows)
    progress = Progress(1 + wanted, len(STAGES))
    progress.stage("how fast this GPU reads")
    ceiling = read_ceiling(device)
    progress.part(f"read ceiling: {ceiling:.2f} TB/s")
    runs = []
    for case in cases:
        for batch in options.batch:
            runs += measure_batch(
                case,
                batch,
                windows,
                dtype=DTYPES[options.dtype],
                device=device,
                kernels=triton_decode,
                ceiling=ceiling,
                progress=progress,
            )
    chosen = f"--tokens {' '.join(map(str, windows))} --window {' '.join(map(str, windows.values()))}"
    command = f"replayssm bench verify {named(options)} {chosen} --dtype {options.dtype}"
    document: dict[str, Any] = about(command, options.commit, device) | {"read_ceiling_tb_s": ceiling, "runs": runs}
    path = report.save(document, "verify", options.out)
    print(verify_report.table(document))
    print(f"\n{verify_report.conditions(document)}\n\n{verify_report.losses(document)}\n\nWritten: {path}")
    failed = wanted - len(runs)
    if failed:
        print(f"{failed} of {wanted} cases gave wrong results and are left out.", file=sys.stderr)
    return 1 if failed else 0
