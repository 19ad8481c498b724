"""Where states are kept in fewer bits: rows that flush fold, answer, and store their checkpoint; then it is copied.

A program owns rows of a head, or a whole one where some scales are of a head. It answers from what it has folded,
before any rounding. A kernel knows no format: it gets the functions that load, store and copy a tile.

The copy is made by a launch of its own (``triton_quantize``). An fp32 checkpoint is folded and answered by the kernels
of ``triton_decode``, as it is without a copy.
"""

import importlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops import triton_copies, triton_decode, triton_quantize, triton_tokens
from replayssm.ops.launching import by_token, outer_strides, padded, pieces, registers, strides, token_strides, wide
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import choose_store_tiling
from replayssm.ops.triton_blocks import of_head
from replayssm.ops.triton_checkpoints import EXACT, FORMATS
from replayssm.ops.triton_decode import ABREAST, BLOCK_B, LANES
from replayssm.ops.triton_fold import as_keys, folded, nth_to_flush, over_keys, tile_rows
from replayssm.ops.triton_overlap import let_next_begin
from replayssm.ops.triton_records import append_shared

# Axes: T new tokens, H value heads, G key groups, P headdim, N d_state; n and p are indices of keys and of rows of a
# state. A name ending in _ptr points at the row of the cache that the program works on, one ending in _at at the first
# new token of the row of the call. Tiles of the state: see triton_fold.


@triton.jit
def _answer(
    tile, i, y_at, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
    slot, head, first_p, p, q_token, k_token, v_token, g_token, beta_token,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr, LANES: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The rows p from first_p on of the state after new token i, by the recurrence; write its output, and append it."""
    OUTER: tl.constexpr = BLOCK_N // LANES
    n = tl.arange(0, BLOCK_N)
    group = head // (H // G) * N
    q = tl.load(q_at + i * q_token + group + n, mask=n < N, other=0.0).to(WIDE)
    k = tl.load(k_at + i * k_token + group + n, mask=n < N, other=0.0).to(WIDE)
    v = tl.load(v_at + i * v_token + head * P + p, mask=p < P, other=0.0).to(WIDE)
    beta = tl.load(beta_at + i * beta_token + head)
    if CHANNEL:
        g = tl.load(g_at + i * g_token + head * N + n, mask=n < N, other=0.0)
        decay = as_keys(tl.exp(g), OUTER, LANES)
    else:
        g = tl.load(g_at + i * g_token + head)
        decay = tl.exp(g)
    # this slot is none that a program of this launch may read
    if first_p == 0:
        append_shared(k, g, beta, k_ptr, g_ptr, beta_ptr, slot, head, n, H, G, N, CHANNEL)
    tl.store(v_ptr + (slot * H + head) * P + p, v, mask=p < P)
    q, k = as_keys(q, OUTER, LANES), as_keys(k, OUTER, LANES)
    tile *= decay
    if DELTA:
        u = beta * (v - over_keys(tile * k))
        tl.store(u_ptr + (slot * H + head) * P + p, u, mask=p < P)
    else:
        u = beta * v
    tile += u[:, :, None, None] * k
    tl.store(y_at + (i * H + head) * P + p, over_keys(tile * q), mask=p < P)
    return tile


@triton.jit(do_not_specialize=["layer", "batch"])
def store_kernel(
    y, planes, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u,
    rows, length, flushing, seqlen, flushed, seed, layer, batch,
    plane_strides, q_token, k_token, v_token, g_token, beta_token, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_B: tl.constexpr, ROWS: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    ONCE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The programs share the rows of the call that flush, ROWS rows of the state of a head at a time; without new tokens
    # T is 0.
    let_next_begin()
    TILES: tl.constexpr = (P + ROWS - 1) // ROWS
    item = tl.program_id(0)
    called, _ = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
    while called >= 0:
        at = called.to(tl.int64)
        row = at
        if rows is not None:
            row = tl.load(rows + at).to(tl.int64)
        head = item // TILES % H
        first_p = item % TILES * ROWS
        p = tile_rows(first_p, ROWS, ABREAST)
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        start, first = tl.load(seqlen + row), tl.load(flushed + row)
        held = of_head(planes, plane_strides, row, head)
        tile = folded(
            held, k_ptr, v_ptr, g_ptr, beta_ptr, first, start, head, first_p,
            H, G, P, N, SLOTS, ROWS, ABREAST, BLOCK_N, LANES, LOAD, ONCE, CHANNEL, DELTA, WIDE,
        )  # fmt: skip
        if T > 0:
            y_at, q_at, k_at = y + at * T * (H * P), q_new + at * T * q_token, k_new + at * T * k_token
            v_at, g_at, beta_at = v_new + at * T * v_token, g_new + at * T * g_token, beta_new + at * T * beta_token
            slot = (start % SLOTS).to(tl.int32)
            new = T
            if length is not None:  # with window 0 a row without a new token may be due all the same
                new = tl.load(length + at).to(tl.int32)
        if T == 1 and new > 0:  # before the tile is rounded, which takes many registers
            _answer(
                tile, 0, y_at, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                slot, head, first_p, p, q_token, k_token, v_token, g_token, beta_token,
                H, G, P, N, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
        if start > first:  # what is stored already would be rounded once more
            tl.debug_barrier()  # every thread has loaded its part: others may store there
            STORE(tile, (tl.load(seed + row), start - 1, layer, head), held, p, P, N)
        if T > 1:
            for i in range(new):
                tile = _answer(
                    tile, i, y_at, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                    slot, head, first_p, p, q_token, k_token, v_token, g_token, beta_token,
                    H, G, P, N, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
                )  # fmt: skip
                slot = tl.where(slot + 1 >= SLOTS, 0, slot + 1)
        item += tl.num_programs(0)
        called, _ = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)


def store(
    new: tuple[Tensor, Tensor, Records] | None,
    planes: Sequence[Tensor],
    copies: Sequence[Tensor],
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    seed: Tensor,
    *,
    layer: int,
    checkpoint: str,
    read_format: str | None,
    rows: Tensor | None = None,
    length: Tensor | None = None,
    recurrence: Recurrence,
) -> None:
    """Fold what rows that flush have committed into their checkpoints, in any format, and copy these; answer.

    Args:
        new: of a step, its outputs (rows of the call, t, nheads, headdim), which are written where a row flushes and
            the token is real, q (rows of the call, t, ngroups, d_state) and the records, in the dtypes of ``ring``
            and as ``by_token`` gives them; these are appended. None folds only.
        planes: of the checkpoint, (batch, nheads, ...), in the order of its format; changed in place.
        copies: of the read copy, likewise; none without a read format.
        ring, u, flushing, seqlen, flushed, rows, length: as ``triton_decode.replay`` takes them.
        seed: (batch,) int64, the row's random stream.
        layer: which replay layer of the model.
        checkpoint, read_format: the names of the formats.

    Cost: for rows that flush one state read and one written, read once more for its copy, and that written.
    """
    step = flushing, seqlen, flushed
    if checkpoint != EXACT:
        _store_rounded(new, planes, ring, u, *step, seed, layer, checkpoint, rows, length, recurrence)
    elif new is None:
        triton_decode.flush(flushing, planes[0], ring, seqlen, flushed, recurrence=recurrence)
    else:
        y, q, records = new
        called = torch.arange(len(y), device=y.device) if rows is None else rows
        due = torch.where(flushing[called] & (called >= 0), called, -1)
        triton_decode.replay(
            q, records, planes[0], ring, u, *step, rows=due, length=length, recurrence=recurrence, y=y
        )  # fmt: skip
    if read_format is not None:
        triton_quantize.copy(planes, copies, *step, rows, checkpoint, read_format, (*ring.v.shape[2:], ring.k.shape[3]))


def _store_rounded(
    new: tuple[Tensor, Tensor, Records] | None,
    planes: Sequence[Tensor],
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    seed: Tensor,
    layer: int,
    checkpoint: str,
    rows: Tensor | None,
    length: Tensor | None,
    recurrence: Recurrence,
) -> None:
    nheads, headdim, slots = ring.v.shape[2], ring.v.shape[3], ring.v.shape[1]
    ngroups, d_state = ring.k.shape[2:]
    batch = len(flushing) if rows is None else len(rows)
    t, y, inputs = 0, None, []
    if new is not None:
        y, q, records = new
        t, inputs = y.shape[1], [q, *records]
    no_inputs: tuple[None, ...] = (None,) * 5
    cached = *ring, ring.v if u is None else u  # without a delta rule never looked at
    cut = choose_store_tiling(batch, nheads, headdim, d_state, recurrence, checkpoint)
    store_kernel[(min(batch * nheads * pieces(headdim, cut.rows), cut.programs),)](
        y, tuple(planes), *(inputs or no_inputs), *cached, rows, length, flushing, seqlen, flushed, seed, layer, batch,
        outer_strides(planes), *(token_strides(*inputs) or [0] * 5), *strides(0, *cached),
        t, nheads, ngroups, headdim, d_state, slots, min(BLOCK_B, padded(batch)),
        cut.rows, ABREAST, cut.keys, LANES, cut.warps > 1 or recurrence.decay == "channel", *FORMATS[checkpoint],
        recurrence.decay == "channel", recurrence.delta, wide(ring.beta.dtype),
        num_warps=cut.warps, **registers(cut.registers),
    )  # fmt: skip


READERS = {"fp16_sr": "fp16", "bf16_sr": "bf16", "int16_sr": "int16"}  # checkpoints that are no read format besides


def replay(
    q: Tensor,
    records: Records,
    planes: Sequence[Tensor],
    copies: Sequence[Tensor],
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    seed: Tensor,
    *,
    layer: int,
    checkpoint: str,
    read_format: str | None,
    rows: Tensor | None,
    length: Tensor | None,
    recurrence: Recurrence,
) -> Tensor:
    """A step of new tokens, ``triton_decode.replay`` for states in any format; arguments as for ``store``.

    Rows that flush answer from the state that they have folded, before it is rounded. The others read the copy, or the
    checkpoint where there is none.

    Returns:
        (rows of the call, t, nheads, headdim), fp32 or fp64; not written where there is no real token.
    """
    if checkpoint == EXACT and read_format is None:
        return triton_decode.replay(
            q, records, planes[0], ring, u, flushing, seqlen, flushed, rows=rows, length=length, recurrence=recurrence
        )  # fmt: skip
    batch, t = q.shape[:2]
    q, records = by_token(q), Records(*map(by_token, records))  # nothing may be launched between the two below
    y = torch.empty(batch, t, *ring.v.shape[2:], dtype=ring.beta.dtype, device=q.device)
    step = flushing, seqlen, flushed
    store(
        (y, q, records), planes, copies, ring, u, *step, seed, layer=layer, checkpoint=checkpoint,
        read_format=read_format, rows=rows, length=length, recurrence=recurrence,
    )  # fmt: skip
    name = READERS.get(checkpoint, checkpoint.removesuffix("_sr")) if read_format is None else read_format
    held = importlib.import_module(f"replayssm.ops.triton_formats.{name}").held
    read = planes if read_format is None else copies
    if t == 1:
        triton_copies.read(
            y, q, records, tuple(read), held, ring, u, *step, rows=rows, length=length, recurrence=recurrence
        )  # fmt: skip
    else:
        triton_tokens.read(
            q, records, tuple(read), held, ring, u, *step, rows=rows, length=length, recurrence=recurrence,
            dtype=y.dtype, y=y,
        )  # fmt: skip
    return y
