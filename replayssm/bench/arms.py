"""What is timed for one case: the steps of the bench's own kernels and of replay, one pass each over all copies."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from replayssm.bench import timing
from replayssm.bench.cases import Case
from replayssm.bench.gate import Native, Step, half
from replayssm.bench.sequences import Kernels, Sequences
from replayssm.bench.timing import Cursors, Time
from replayssm.ops.records import Records


def time_arms(
    case: Case, states: list[Tensor], step: Step, *, window: int, dtype: torch.dtype, kernels: Kernels
) -> dict[str, Time]:
    """Time one decode step of all rows, five ways, in turn.

    "conventional"; "replay", a whole window with the rows' flushes spread over it; "nonflush" and "flush", the steps of
    a window in which no row and in which every row flushes; "window0", where every row folds one record at each step.

    Args:
        states: copies (batch, nheads, headdim, d_state) fp32, rotated over; they are decoded on, in place.
        step: the conventional step.
        window: >= 2.
    """
    batch, device = len(states[0]), states[0].device
    q, records = case.draw(batch, 1, dtype=dtype, device=device, seed=3)
    y = torch.empty(batch, 1, case.nheads, case.headdim, device=device)

    def rotated(window: int) -> list[Sequences]:
        return [Sequences(case, state, window=window, dtype=dtype, seed=4 + i) for i, state in enumerate(states)]

    def replay_pass(steps: Sequence[Cursors], copies: Sequence[Sequences]) -> list[Callable[[], object]]:
        return [partial(copy.step, kernels, q, records, cursors) for cursors in steps for copy in copies]

    spread = timing.schedule(batch, window, spread=True, device=device)
    aligned = timing.schedule(batch, window, spread=False, device=device)
    always = timing.schedule(batch, 0, spread=False, device=device)
    copies = rotated(window)
    passes: dict[str, Sequence[Callable[[], object]]] = {
        "conventional": [partial(step, state, q, records, y) for state in states] * window,
        "replay": replay_pass(spread, copies),
        "nonflush": replay_pass(aligned[:-1], copies),
        "flush": replay_pass(aligned[-1:], copies),
        "window0": replay_pass(always, rotated(0)),
    }
    return dict(zip(passes, timing.measure(list(passes.values())), strict=True))


def time_tokens(
    case: Case,
    states: list[Tensor],
    snapshots: list[Tensor],
    step: Step,
    native: Native,
    *,
    tokens: int,
    window: int,
    dtype: torch.dtype,
    kernels: Kernels,
) -> dict[str, Time]:
    """Time steps of ``tokens`` tokens for all rows, in turn with the conventional step of one token.

    "conventional"; "native", which writes a state behind each token; "replay" and "replay_half", whole windows with the
    rows' flushes spread over them, in which a row keeps all tokens of a step or half of them.

    Args:
        states: copies (batch, nheads, headdim, d_state) fp32, rotated over; they are decoded on, in place.
        snapshots: as many, each (batch, tokens, nheads, headdim, d_state) fp32, written.
        step, native: the steps without records.
        window: >= tokens.
    """
    batch, device = len(states[0]), states[0].device
    q, records = case.draw(batch, tokens, dtype=dtype, device=device, seed=3)
    y = torch.empty(batch, tokens, case.nheads, case.headdim, device=device)
    one_q, one = q[:, :1].contiguous(), Records(*(field[:, :1].contiguous() for field in records))
    one_y = y[:, :1].contiguous()
    copies = [
        Sequences(case, state, window=window, dtype=dtype, seed=4 + i, tokens=tokens) for i, state in enumerate(states)
    ]

    def replay_pass(kept: int) -> list[Callable[[], object]]:
        steps = timing.schedule(batch, window, spread=True, device=device, tokens=tokens, kept=kept)
        return [partial(copy.step, kernels, q, records, cursors) for cursors in steps for copy in copies]

    # the longer a step, the fewer of them take the time of as many launches of one token
    passes: dict[str, Sequence[Callable[[], object]]] = {
        "conventional": [partial(step, state, one_q, one, one_y) for state in states] * timing.LAUNCHES,
        "native": [partial(native, *pair, q, records, y) for pair in zip(states, snapshots, strict=True)],
        "replay": replay_pass(tokens),
        "replay_half": replay_pass(half(tokens)),
    }
    times = timing.measure(list(passes.values()), launches=max(1, timing.LAUNCHES // tokens))
    return dict(zip(passes, times, strict=True))
