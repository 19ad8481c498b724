"""The flush where many records are due at once and nothing is corrected (no delta rule): one matrix product."""

import triton
import triton.language as tl

from replayssm.ops.triton_fold import nth_to_flush
from replayssm.ops.triton_products import as_the_state, load_piece, store_piece, times

# Axes: R records, oldest first, H value heads, G key groups, P headdim, N d_state; r are indices of records, p and n of
# rows and keys of a state. A name ending in _ptr points at the row of the cache that the program works on.


@triton.jit
def _fold_records(
    tile, k_ptr, v_ptr, g_ptr, beta_ptr, first_slot, count, head, first_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, RECORDS: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tile (ROWS, n) of the state after the count <= RECORDS records from first_slot on."""
    r = tl.arange(0, RECORDS)
    n = tl.arange(0, BLOCK_N)
    p = first_p + tl.arange(0, ROWS)[:, None]
    slot = first_slot + r
    slot = tl.where(slot >= SLOTS, slot - SLOTS, slot)
    live = r < count
    keys = tl.load(
        k_ptr + slot[:, None] * (G * N) + head // (H // G) * N + n, mask=live[:, None] & (n < N), other=0.0
    )  # fmt: skip
    u = tl.load(v_ptr + (slot * H + head) * P + p, mask=live & (p < P), other=0.0).to(WIDE)
    beta = tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)
    g = tl.load(g_ptr + slot * H + head, mask=live, other=0.0)
    later = tl.where(slot + 1 >= SLOTS, 0, slot + 1)
    g_later = tl.load(g_ptr + later * H + head, mask=r + 1 < count, other=0.0)
    weight = tl.exp(tl.cumsum(g_later, axis=0, reverse=True))  # of a record at the end
    if keys.dtype != tl.bfloat16:
        keys = keys.to(WIDE)
    keys = as_the_state(tl.trans(keys), BLOCK_N, RECORDS)
    return times(u * (beta * weight), tl.trans(keys), tile * tl.exp(tl.sum(g, axis=0)))


@triton.jit
def fold_kernel(
    state, k, v, g, beta, rows, flushing, seqlen, flushed, batch,
    state_stride, k_stride, v_stride, g_stride, beta_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr, RECORDS: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The programs share the rows of the call that flush, ROWS rows of the state of a head at a time.
    TILES: tl.constexpr = (P + ROWS - 1) // ROWS
    item = tl.program_id(0)
    called, _ = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
    while called >= 0:
        row = called.to(tl.int64)
        if rows is not None:
            row = tl.load(rows + row).to(tl.int64)
        head = item // TILES % H
        first_p = item % TILES * ROWS
        first, count = tl.load(flushed + row), (tl.load(seqlen + row) - tl.load(flushed + row)).to(tl.int32)
        state_ptr = state + row * state_stride + head * P * N
        tile = load_piece(state_ptr, first_p, 0, P, N, ROWS, BLOCK_N)
        for folded in tl.range(0, count, RECORDS, num_stages=1):
            tile = _fold_records(
                tile, k + row * k_stride, v + row * v_stride, g + row * g_stride, beta + row * beta_stride,
                ((first + folded) % SLOTS).to(tl.int32), tl.minimum(count - folded, RECORDS), head, first_p,
                H, G, P, N, SLOTS, ROWS, RECORDS, BLOCK_N, WIDE,
            )  # fmt: skip
        store_piece(tile, state_ptr, first_p, 0, P, N, ROWS, BLOCK_N)
        item += tl.num_programs(0)
        called, _ = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
