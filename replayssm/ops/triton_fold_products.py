"""The flush where many records are due at once: matrix products, for decays of a head.

The recurrence of ``triton_fold`` costs as many instructions for a token as for a step; here one pass over a piece of the
state folds up to RECORDS of them. With a delta rule the write vectors solve a triangular system, whose inverse the rows
of a state share.
"""

import triton
import triton.language as tl

from replayssm.ops.triton_products import as_the_state, inverse, load_piece, store_piece, times, times_state

# Axes: R records, oldest first, H value heads, G key groups, P headdim, N d_state; r and s are indices of records, p and
# n of rows and keys of a state. A name ending in _ptr points at the row of the cache that the program works on.


@triton.jit
def fold_records(
    state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first_slot, count, head, first_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_P: tl.constexpr, ROWS: tl.constexpr, RECORDS: tl.constexpr, BLOCK_N: tl.constexpr,
    DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fold the count <= RECORDS records from first_slot on into BLOCK_P rows of the state, in place, ROWS at a time."""
    r = tl.arange(0, RECORDS)
    n = tl.arange(0, BLOCK_N)
    slot = first_slot + r
    slot = tl.where(slot >= SLOTS, slot - SLOTS, slot)
    live = r < count
    at_n = slot[:, None] * (G * N) + head // (H // G) * N + n
    real = live[:, None] & (n < N)
    beta = tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)
    g = tl.load(g_ptr + slot * H + head, mask=live, other=0.0)
    later = tl.where(slot + 1 >= SLOTS, 0, slot + 1)
    g_later = tl.load(g_ptr + later * H + head, mask=r + 1 < count, other=0.0)
    weight = tl.exp(tl.cumsum(g_later, axis=0, reverse=True))  # of a record at the end
    whole = tl.exp(tl.sum(g, axis=0))
    if DELTA:
        reached = tl.exp(tl.cumsum(g, axis=0))
        keys = tl.load(k_ptr + at_n, mask=real, other=0.0)
        over_k = times(keys, tl.trans(keys), tl.zeros((RECORDS, RECORDS), WIDE))
        over_k *= tl.exp(tl.cumsum(tl.where(r > r[:, None], g, 0.0), axis=1))
        solved = inverse(over_k, beta, count, RECORDS, WIDE)
    for piece in tl.range(0, BLOCK_P // ROWS, num_stages=1):
        begin = first_p + piece * ROWS
        tile = load_piece(state_ptr, begin, 0, P, N, ROWS, BLOCK_N)
        p = begin + tl.arange(0, ROWS)[:, None]
        u = tl.load(v_ptr + (slot * H + head) * P + p, mask=live & (p < P), other=0.0).to(WIDE)
        keys = tl.load(k_ptr + at_n, mask=real, other=0.0)
        if keys.dtype != tl.bfloat16:
            keys = keys.to(WIDE)
        if DELTA:
            held = times_state(
                tile, as_the_state(tl.trans(keys), BLOCK_N, RECORDS), tl.zeros((ROWS, RECORDS), WIDE), BLOCK_N, 16
            )  # fmt: skip
            u = times((u - held * reached) * beta, solved, tl.zeros((ROWS, RECORDS), WIDE)) * weight
        else:
            u *= beta * weight
        tile = times(u, tl.trans(as_the_state(tl.trans(keys), BLOCK_N, RECORDS)), tile * whole)
        store_piece(tile, state_ptr, begin, 0, P, N, ROWS, BLOCK_N)
