"""Time decode steps by replay beside a tuned conventional step on this machine's GPU; without one, count bytes."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replayssm import arguments
from replayssm.bench import kernel_report, report, timing
from replayssm.bench.cases import BATCHES, Case
from replayssm.bench.machine import about
from replayssm.bench.options import DTYPES, add_cases, add_output, chosen_cases, named
from replayssm.bench.progress import Progress
from replayssm.bench.sequences import Kernels
from replayssm.cache import formats
from replayssm.cache.checkpoint import NAMES
from replayssm.plan import StateBytes, conventional_step, conventional_traffic, replay_step, replay_traffic

STAGES = ("tuning the conventional step", "checking", "timing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench kernel``."""
    add_cases(parser, BATCHES)
    said = 'tokens; "auto" (default) is what a cache takes where there are many rows; window 0 is timed beside it'
    parser.add_argument("--window", type=arguments.window, default="auto", help=said)
    parser.add_argument("--checkpoint", choices=NAMES, default="fp32", help="format of the states (default fp32)")
    parser.add_argument("--read-format", choices=formats.names(), help="of a copy that steps read; default: none")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Check, time, print a table and write the JSON.

    Returns:
        The exit status: 0, or 1 if a case failed its correctness gate; such a case is neither timed nor written.
    """
    cases = chosen_cases(options)
    if options.window != "auto" and not 2 <= options.window <= 64:
        raise ValueError(
            f"--window must be 2 to 64 tokens; got {options.window}. Window 0 is timed beside every other one."
        )
    if not torch.cuda.is_available():
        print(traffic_table(_windows(cases, options), options.batch, DTYPES[options.dtype]))
        print("\nThis is the traffic model (replayssm/plan.py). Nothing was timed: torch finds no GPU here.")
        return 0
    return _measure(cases, options)


def _windows(cases: Sequence[Case], options: argparse.Namespace) -> dict[Case, int]:
    formats = DTYPES[options.dtype], options.checkpoint, options.read_format
    return {case: case.window(*formats) if options.window == "auto" else options.window for case in cases}


def traffic_table(windows: Mapping[Case, int], batches: Sequence[int], dtype: torch.dtype) -> str:
    """Megabytes of states and records that a step moves, as a table."""
    rows = []
    for case, window in windows.items():
        layer = case.layer_bytes(dtype)
        sizes = StateBytes(layer.state, layer.record)
        conventional, replay = sum(conventional_traffic(sizes)), sum(replay_traffic(sizes, window))
        for batch in batches:
            moved = [f"{batch * each / 1e6:,.1f}" for each in (conventional, replay)]
            rows.append([case.layer, case.geometry, str(window), str(batch), *moved, f"{conventional / replay:.2f}"])
    header = ["layer", "geometry", "window", "batch", "conventional (MB)", "replay (MB)", "ratio"]
    return report.markdown(header, rows)


def measure_case(
    case: Case,
    batch: int,
    *,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    checkpoint: str = "fp32",
    read_format: str | None = None,
    ceiling: float,
    progress: Progress,
) -> dict[str, Any] | None:
    """Tune, check and time one case: an entry of "runs", or None if the gate did not pass.

    Args:
        checkpoint, read_format: of the states that ``kernels`` keep.
        ceiling: TB/s that this GPU reads.
    """
    from replayssm.bench import arms, gate, tune  # these need triton
    from replayssm.bench.stored import StoredKernels

    label = f"{case.layer} batch {batch}"
    layer = case.layer_bytes(dtype, checkpoint, read_format)
    states = [gate.random_state(case, batch, device) for _ in range(timing.copies(batch * layer.read))]
    progress.stage(f"{label}: {STAGES[0]}")
    config = tune.tune(case, states, dtype=dtype)
    progress.stage(f"{label}: {STAGES[1]}")
    step = tune.step_with(config, case)
    # beside rounding in fp32 outputs may have the error of what is read, twice: copies of later states differ
    initial = gate.random_state(case, batch, device)  # those that were tuned on are of low rank by now
    coarse = 2 * kernels.error(initial) if isinstance(kernels, StoredKernels) else 0.0
    verdict = gate.check(case, batch, window, dtype=dtype, device=device, kernels=kernels, step=step, coarse=coarse)
    if not verdict.passed:
        progress.part(f"{label}: NOT TIMED, results are wrong: {verdict}")
        return None
    progress.stage(f"{label}: {STAGES[2]}")
    times = arms.time_arms(case, states, step, window=window, dtype=dtype, kernels=kernels)
    conventional_us, replay_us = times["conventional"].median_us, times["replay"].median_us
    nonflush_us, flush_us = times["nonflush"].median_us, times["flush"].median_us
    bytes_replay = batch * replay_step(layer, window).moved
    speedup = conventional_us / replay_us
    progress.part(f"{label}: conventional {conventional_us:.1f} us, replay {replay_us:.1f} us, {speedup:.2f}x")
    return dict(
        layer=case.layer,
        geometry=case.geometry,
        nheads=case.nheads,
        headdim=case.headdim,
        d_state=case.d_state,
        ngroups=case.ngroups,
        window=window,
        dtype=str(dtype).removeprefix("torch."),
        batch=batch,
        conventional_us=conventional_us,
        conventional_config=str(config),
        conventional_tb_s=2 * batch * case.state_bytes / conventional_us / 1e6,  # of the state alone
        replay_us=replay_us,
        replay_spread_us=times["replay"].spread_us,
        conventional_spread_us=times["conventional"].spread_us,
        nonflush_us=nonflush_us,
        flush_us=flush_us,
        aligned_us=(nonflush_us * (window - 1) + flush_us) / window,
        window0_us=times["window0"].median_us,
        bytes_conventional=batch * conventional_step(layer).moved,
        bytes_replay=bytes_replay,
        percent_of_ceiling=100 * bytes_replay / replay_us / 1e6 / ceiling,
        speedup=speedup,
        gate=verdict._asdict(),
    ) | _formats(checkpoint, read_format)


def _measure(cases: Sequence[Case], options: argparse.Namespace) -> int:
    from replayssm.bench.ceiling import read_ceiling  # these need triton
    from replayssm.bench.stored import StoredKernels
    from replayssm.ops import triton_decode

    device = torch.device("cuda", torch.cuda.current_device())
    plain = options.checkpoint == "fp32" and options.read_format is None
    progress = Progress(1 + len(cases) * len(options.batch), len(STAGES))
    progress.stage("how fast this GPU reads")
    ceiling = read_ceiling(device)
    progress.part(f"read ceiling: {ceiling:.2f} TB/s")
    document: dict[str, Any] = about(_command(options), options.commit, device) | {
        "read_ceiling_tb_s": ceiling,
        "runs": [],
    }
    windows = _windows(cases, options)
    wanted = [(case, batch) for case in cases for batch in options.batch]
    for case, batch in wanted:
        entry = measure_case(
            case,
            batch,
            window=windows[case],
            dtype=DTYPES[options.dtype],
            device=device,
            # new ones for each case: they keep the states that they have seen
            kernels=triton_decode if plain else StoredKernels(options.checkpoint, options.read_format),
            checkpoint=options.checkpoint,
            read_format=options.read_format,
            ceiling=ceiling,
            progress=progress,
        )
        if entry is not None:
            document["runs"].append(entry)
    path = report.save(document, "kernel", options.out)
    print(kernel_report.table(document))
    print(f"\n{kernel_report.conditions(document)}\n\n{kernel_report.losses(document)}\n\nWritten: {path}")
    failed = len(wanted) - len(document["runs"])
    if failed:
        print(f"{failed} of {len(wanted)} cases gave wrong results and are left out.", file=sys.stderr)
    return 1 if failed else 0


def _formats(checkpoint: str, read_format: str | None) -> dict[str, str]:
    """What differs from states in fp32 that are read as they are."""
    given = {} if checkpoint == "fp32" else {"checkpoint": checkpoint}
    return given if read_format is None else given | {"read_format": read_format}


def _command(options: argparse.Namespace) -> str:
    formats = _formats(options.checkpoint, options.read_format)
    stored = "".join(f" --{name.replace('_', '-')} {value}" for name, value in formats.items())
    return f"replayssm bench kernel {named(options)} --window {options.window} --dtype {options.dtype}{stored}"
