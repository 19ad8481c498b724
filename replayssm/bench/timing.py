"""How times are taken: whole windows in CUDA graphs, the arms of a comparison in turn, every state from memory."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.plan import steps_of_window

ROUNDS = 24
ROUGH_ROUNDS = 8  # to choose between launch configurations
WARM_ROUNDS = 3  # not counted: clocks rise, lazy initialisation ends
COLD_BYTES = 4 * 60_000_000  # 4 times the L2 cache of an H200: states that add up to this come from memory
LAUNCHES = 16  # in a graph, at least: its own start is then noise


class Cursors(NamedTuple):
    """The counters of every row before a step, and which rows flush in it."""

    seqlen: Tensor  # (batch,) int64
    flushed: Tensor  # (batch,) int64
    flushing: Tensor  # (batch,) bool


class Time(NamedTuple):
    """Microseconds a step."""

    median_us: float
    spread_us: float  # from the 10th to the 90th percentile


def schedule(
    batch: int, window: int, *, spread: bool, device: torch.device | str, tokens: int = 1, kept: int = 1
) -> list[Cursors]:
    """The steps between two flushes of a row, by the rule of a cache; every row flushes in exactly one of them.

    Args:
        spread: rows start at different steps of their windows, so about as many rows flush at each step. Otherwise
            every row starts with ``kept`` records pending, and all flush at the last step.
        tokens: of a step, for which a row must have room.
        kept: tokens of each step that are committed, 1 .. tokens.

    Returns:
        ``steps_of_window(window, tokens, kept)`` steps: ``window`` for one token, and one for window 0, which folds
        the one pending record at each step.
    """
    period = steps_of_window(window, tokens, kept)
    row = torch.arange(batch, device=device)
    flushed = period + 3 * row  # rows stand at different slots of their rings
    seqlen = flushed + kept * (1 + (row % period if spread else 0))
    steps = []
    for _ in range(period):
        flushing = seqlen - flushed + tokens > window
        steps.append(Cursors(seqlen, flushed, flushing))
        flushed = torch.where(flushing, seqlen, flushed)
        seqlen = seqlen + kept
    flushes = torch.stack([step.flushing for step in steps]).sum(0)
    assert (flushes == 1).all(), f"a window of {window} flushed rows {flushes.tolist()} times in {period} steps"
    return steps


def copies(set_bytes: int) -> int:
    """How many sets of ``set_bytes`` to rotate over, so that each has left the caches before it is used again."""
    return math.ceil(COLD_BYTES / set_bytes)


def measure(
    arms: Sequence[Sequence[Callable[[], object]]], rounds: int = ROUNDS, launches: int = LAUNCHES
) -> list[Time]:
    """Time every arm, in turn, ``rounds`` times.

    Args:
        arms: each is the steps of one pass, captured in order into one graph, again and again up to ``launches``.

    Returns:
        For each arm, microseconds of one of its steps.
    """
    graphs, lengths = [], []
    for steps in arms:
        repeats = math.ceil(launches / len(steps))
        graphs.append(_captured([*steps] * repeats))
        lengths.append(len(steps) * repeats)
    # all of it is queued before anything is waited for, so that no launch stands between two events
    marks = [_mark()]
    for _ in range(WARM_ROUNDS + rounds):
        for graph in graphs:
            graph.replay()
            marks.append(_mark())
    torch.cuda.synchronize()
    taken = [1e3 * begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    counted = taken[WARM_ROUNDS * len(arms) :]
    return [summary(counted[arm :: len(arms)], length) for arm, length in enumerate(lengths)]


def summary(taken_us: Sequence[float], steps: int) -> Time:
    """Median and spread of passes of ``steps`` steps each."""
    deciles = statistics.quantiles(taken_us, n=10, method="inclusive")
    return Time(statistics.median(taken_us) / steps, (deciles[-1] - deciles[0]) / steps)


def _captured(steps: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in dict.fromkeys(steps):  # compiles what is not compiled yet
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
