"""Verification without records, as fast as it can be made: a state is written behind every token of a step.

What engines do that keep states: the step reads the state once, and of the states that it writes, the one behind the
last accepted token is where the next step begins. Used by the bench alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.bench.conventional import Config
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.triton_fold import four_a_thread, over_keys, tile_keys, tile_rows

# Axes: T tokens, H value heads, G key groups, P headdim, N d_state. A tile of the state is (ABREAST, deep, outer,
# SEGMENT) as in ops/triton_fold.py, for the reason given there: keys are loaded in the layout of the tile. One program
# owns one (row of the batch, value head) and BLOCK_P rows of its state.


@triton.jit
def _inputs(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, token, head, p, n, natural,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """q, k, v, g and beta of one token, as they are in memory; q and k (and g of a channel) in the tile's layout."""
    group = token * G + head // (H // G)
    at = token * H + head
    beta = tl.load(beta_ptr + at)
    v = tl.load(v_ptr + at * P + p)
    if CHANNEL:
        g = tl.load(g_ptr + at * N + n)
    else:
        g = tl.load(g_ptr + at)
    q = tl.load(four_a_thread(q_ptr + group * N, natural) + n)
    k = tl.load(four_a_thread(k_ptr + group * N, natural) + n)
    return q, k, v, g, beta


# T is no constant of the code, so that a configuration is compiled once for all numbers of tokens.
@triton.jit(do_not_specialize=["T"])
def tokens_kernel(
    state_ptr, snapshots_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, y_ptr, T,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, ABREAST: tl.constexpr, SEGMENT: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, LOAD_POLICY: tl.constexpr, STORE_MODIFIER: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = P // BLOCK_P
    program = tl.program_id(0)
    bh = program // TILES
    head = bh % H
    first = bh // H * T  # of the tokens of all rows
    n = tile_keys(ABREAST, N, SEGMENT)
    p = tile_rows(program % TILES * BLOCK_P, BLOCK_P, ABREAST)
    in_tile = p[:, :, None, None] * N + n
    q, k, v, g, beta = _inputs(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, head, p, n, T, H, G, P, N, CHANNEL)
    # 64 bits: B * T * H * P * N passes 2**31
    state = tl.load(state_ptr + bh.to(tl.int64) * (P * N) + in_tile, eviction_policy=LOAD_POLICY)
    for t in range(T):
        # the inputs of the next token are on their way while this one is computed; the last token loads its own again
        following = first + tl.minimum(t + 1, T - 1)
        q_next, k_next, v_next, g_next, beta_next = _inputs(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, following, head, p, n, T, H, G, P, N, CHANNEL
        )
        q, k, write = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        state *= tl.exp(g)
        if DELTA:
            write -= over_keys(state * k)
        state += (beta * write)[:, :, None, None] * k
        at = (first + t) * H + head
        tl.store(snapshots_ptr + at.to(tl.int64) * (P * N) + in_tile, state, cache_modifier=STORE_MODIFIER)
        tl.store(y_ptr + at * P + p, over_keys(state * q))
        q, k, v, g, beta = q_next, k_next, v_next, g_next, beta_next


def step(
    config: Config, state: Tensor, snapshots: Tensor, q: Tensor, records: Records, y: Tensor, recurrence: Recurrence
) -> None:
    """t tokens of every row: the state behind each of them and its outputs.

    Args:
        config: its block_p divides headdim, its segment divides d_state.
        state: (batch, nheads, headdim, d_state), fp32, before the first token; it is left as it was. headdim and
            d_state are powers of two.
        snapshots: (batch, t, nheads, headdim, d_state), fp32, written.
        q: (batch, t, ngroups, d_state), the read keys.
        records: t tokens; g and beta fp32. All tensors are contiguous.
        y: (batch, t, nheads, headdim), fp32, written.
    Cost: the state is read once and written t times.
    """
    batch, nheads, headdim, d_state = state.shape
    tokens_kernel[(batch * nheads * (headdim // config.block_p),)](
        state, snapshots, q, *records, y, q.shape[1],
        H=nheads, G=q.shape[2], P=headdim, N=d_state, BLOCK_P=config.block_p,
        ABREAST=config.num_warps * (128 // config.segment), SEGMENT=config.segment,
        CHANNEL=recurrence.decay == "channel", DELTA=recurrence.delta,
        LOAD_POLICY=config.load_policy, STORE_MODIFIER=config.store_modifier, num_warps=config.num_warps,
    )  # fmt: skip
