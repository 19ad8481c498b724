"""Programs: how sequences are fed through a cache. Which tokens are accepted is fixed; everything else may vary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from backends import interpreted
from draws import draw
from geometries import windows
from hypothesis import strategies as st
from torch import Tensor, nn

import replayssm

BATCH = 3


@dataclass(frozen=True)
class Action:
    """One model step of t tokens, of which each row keeps some; then perhaps an early flush of some rows."""

    t: int
    kept: tuple[int, ...]
    flush: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    window: int
    step_tokens: int
    actions: tuple[Action, ...]

    @property
    def longest(self) -> int:
        return max(sum(action.kept[row] for action in self.actions) for row in range(BATCH))


@st.composite
def programs(draw, reject: bool = False, flush: bool = False, longest: int = 9) -> Program:
    """Steps of 1 .. step_tokens tokens and a scan now and then, with or without rejections and early flushes."""
    step_tokens = draw(st.integers(1, 5))
    window = draw(windows(step_tokens))
    actions = []
    for _ in range(draw(st.integers(1, longest // 2 if interpreted() else longest))):
        t = draw(st.integers(1, step_tokens) | st.integers(1, step_tokens) | st.integers(1, step_tokens + 9))
        partly = reject and t <= step_tokens
        kept = tuple(draw(st.integers(0, t)) if partly else t for _ in range(BATCH))
        rows = draw(st.sets(st.integers(0, BATCH - 1))) if flush else ()
        actions.append(Action(t, kept, tuple(sorted(rows))))
    return Program(window, step_tokens, tuple(actions))


def run(
    layer: nn.Module,
    stream: Tensor,
    program: Program,
    *,
    draft_seed: int = 77,
    after_commit: Callable[[replayssm.ReplayStateCache], None] | None = None,
) -> tuple[list[Tensor], replayssm.ReplayStateCache]:
    """Feed the stream (batch, tokens, d_model); what a step does not keep is a draft that the stream never held.

    Returns:
        The outputs at the kept tokens of each row, and the cache.
    """
    batch, _, d_model = stream.shape
    cache = replayssm.ReplayStateCache(
        [layer], batch, window=program.window, step_tokens=program.step_tokens, device=stream.device
    )
    outputs: list[list[Tensor]] = [[] for _ in range(batch)]
    position = [0] * batch
    with torch.no_grad():
        for number, action in enumerate(program.actions):
            x = draw(draft_seed + number, batch, action.t, d_model, dtype=stream.dtype)
            for row, kept in enumerate(action.kept):
                x[row, :kept] = stream[row, position[row] : position[row] + kept]
            y = layer(x, cache[0])
            all_kept = all(kept == action.t for kept in action.kept)
            cache.commit(None if all_kept else torch.tensor(action.kept, device=stream.device))
            for row, kept in enumerate(action.kept):
                outputs[row].append(y[row, :kept])
                position[row] += kept
            if action.flush:
                cache.flush(list(action.flush))
            if after_commit is not None:
                after_commit(cache)
    assert cache.seqlen.tolist() == position
    return [torch.cat(pieces) for pieces in outputs], cache


def live_slots(cache: replayssm.ReplayStateCache, row: int) -> set[int]:
    """Ring slots of a row that hold committed records which the checkpoint does not."""
    slots = cache[0].ring.v.shape[1]
    return {token % slots for token in range(int(cache.flushed[row]), int(cache.seqlen[row]))}


def poison(cache: replayssm.ReplayStateCache, value: float = torch.nan) -> None:
    """Write ``value`` into every ring slot and convolution slot that is dead between two steps."""
    for state in (cache[i] for i in range(count_layers(cache))):
        slots = state.conv.shape[1]
        for row in range(cache.batch):
            alive = live_slots(cache, row)
            dead = [slot for slot in range(state.ring.v.shape[1]) if slot not in alive]
            for name, ring in state.tensors().items():
                if name.startswith("ring."):
                    ring[row, dead] = value
            seqlen = int(cache.seqlen[row])
            recent = {token % slots for token in range(max(0, seqlen - (state.geometry.d_conv - 1)), seqlen)}
            state.conv[row, [slot for slot in range(slots) if slot not in recent]] = value


def count_layers(cache: replayssm.ReplayStateCache) -> int:
    return sum(name.endswith("checkpoint") for name in cache.tensors())
