"""The conventional decode step, as fast as it can be made: the yardstick of every figure, used by the bench alone.

The whole state is read, decayed, corrected (delta rules), updated and written for every token.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.records import Records, Recurrence


class Config(NamedTuple):
    """A launch configuration."""

    block_p: int  # rows of a state in a program
    num_warps: int
    segment: int  # keys side by side in a row of threads; 32: eight threads share a row, so sums need few shuffles
    load_policy: str  # eviction policy of the state's loads
    store_modifier: str  # cache modifier of its stores

    def __str__(self) -> str:
        hints = f", load {self.load_policy or 'plain'}, store {self.store_modifier or 'plain'}"
        return f"block_p {self.block_p}, {self.num_warps} warps, segment {self.segment}{hints}"


# 16 to 128 values of a state a thread: fewer leave too few bytes in flight, more do not fit the registers.
SHAPES = ((8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 2), (64, 4), (64, 8))
ROWS = ((8, 1), (16, 2), (16, 4), (32, 4), (64, 8))  # a whole warp to a row of 128 keys
CONFIGS = tuple(Config(*shape, segment, "", "") for segment, shapes in ((32, SHAPES), (128, ROWS)) for shape in shapes)
HINTS = (("", ""), ("evict_first", ""), ("", ".cs"), ("evict_first", ".cs"))


# Axes: H value heads, G key groups, P headdim, N d_state. A tile is (BLOCK_P, N / SEGMENT, SEGMENT), n = index of the
# segment * SEGMENT + place in it. One program owns one (row of the batch, value head) and BLOCK_P rows of its state.
@triton.jit
def step_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, y_ptr,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, SEGMENT: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, LOAD_POLICY: tl.constexpr, STORE_MODIFIER: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = P // BLOCK_P
    program = tl.program_id(0)
    bh = program // TILES
    group = bh // (H // G)  # of all rows: row * G + group, as H is a multiple of G
    n = (tl.arange(0, N // SEGMENT) * SEGMENT)[None, :, None] + tl.arange(0, SEGMENT)[None, None, :]
    p = tl.arange(0, BLOCK_P)
    # tiles follow each other in memory in the order of programs; 64 bits: B * H * P * N passes 2**31
    tile_ptr = state_ptr + program.to(tl.int64) * (BLOCK_P * N) + p[:, None, None] * N + n
    # All loads are issued before the first is used. The state's comes last: the last one decides how the tile is laid
    # out over threads, for SEGMENT 32 eight to a row; with q or k there it went through shared memory (sm_90 code).
    beta = tl.load(beta_ptr + bh)
    if CHANNEL:
        g = tl.load(g_ptr + bh * N + n)
    else:
        g = tl.load(g_ptr + bh)
    v = tl.load(v_ptr + program * BLOCK_P + p)
    q = tl.load(q_ptr + group * N + n)
    k = tl.load(k_ptr + group * N + n)
    state = tl.load(tile_ptr, eviction_policy=LOAD_POLICY) * tl.exp(g)
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    if DELTA:
        v -= tl.sum(tl.sum(state * k, axis=1), axis=1)
    state += (beta * v)[:, None, None] * k
    tl.store(tile_ptr, state, cache_modifier=STORE_MODIFIER)
    y = tl.sum(tl.sum(state * q, axis=1), axis=1)
    tl.store(y_ptr + program * BLOCK_P + p, y)


def step(config: Config, state: Tensor, q: Tensor, records: Records, y: Tensor, recurrence: Recurrence) -> None:
    """One token of every row: ``state`` is updated in place and ``y`` is written.

    Args:
        config: its block_p divides headdim, its segment divides d_state.
        state: (batch, nheads, headdim, d_state), fp32; headdim and d_state are powers of two.
        q: (batch, 1, ngroups, d_state), the read keys.
        records: one token; g and beta fp32. All tensors are contiguous.
        y: (batch, 1, nheads, headdim), fp32.
    Cost: the state is read once and written once.
    """
    batch, nheads, headdim, d_state = state.shape
    step_kernel[(batch * nheads * (headdim // config.block_p),)](
        state, q, *records, y,
        H=nheads, G=q.shape[2], P=headdim, N=d_state, BLOCK_P=config.block_p, SEGMENT=config.segment,
        CHANNEL=recurrence.decay == "channel", DELTA=recurrence.delta,
        LOAD_POLICY=config.load_policy, STORE_MODIFIER=config.store_modifier, num_warps=config.num_warps,
    )  # fmt: skip
