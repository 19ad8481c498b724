"""Decoding on a GPU: flush, replay and appends of a step in one launch, and the flush alone.

One kernel serves every recurrence, because each row p of a state evolves by itself: a program owns (row of the batch,
value head, BLOCK_P rows of the state), reads that tile once, and needs no other program. Sums run in fp32 (fp64 in an
fp64 layer) on plain cores, so nothing is rounded to TF32.

For the delta rules the ring has a companion, ``u``: the write vectors, so that a step need not solve for them again. It
belongs to the read side. A flush runs the recurrence from the raw records and never looks at it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops import triton_tokens
from replayssm.ops.launching import by_token, padded, pieces, registers, strides, token_strides, wide
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import Tiling, choose_tiling, choose_tokens_tiling
from replayssm.ops.triton_fold import (
    as_keys,
    fold,
    four_a_thread,
    load_tile,
    nth_to_flush,
    over_keys,
    tile_keys,
    tile_rows,
)
from replayssm.ops.triton_fold_products import fold_kernel
from replayssm.ops.triton_records import append_shared, from_records

ABREAST, LANES = 4, 32  # of a tile; 4 rows of 8 threads with 4 keys each
FEW = 528  # programs that fold when there is little to fold: 4 on each of 132 processors
BLOCK_B = 256  # rows of a call that a program looks at together, for those that are due

# Axes: H value heads, G key groups, P headdim, N d_state; n and p are indices of keys and of rows of a state. A name
# ending in _ptr points at the row of the cache that the program works on. Tiles of the state: see triton_fold.


@triton.jit
def flush_kernel(
    which, state, k, v, g, beta, seqlen, flushed, state_stride, k_stride, v_stride, g_stride, beta_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    FOLD_P: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (P + FOLD_P - 1) // FOLD_P
    row = (tl.program_id(0) // (H * TILES)).to(tl.int64)
    if tl.load(which + row) != 0:
        head = tl.program_id(0) // TILES % H
        fold(
            state + row * state_stride + head * P * N, k + row * k_stride, v + row * v_stride, g + row * g_stride,
            beta + row * beta_stride, tl.load(flushed + row), tl.load(seqlen + row), head,
            tl.program_id(0) % TILES * FOLD_P,
            H, G, P, N, SLOTS, FOLD_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
        )  # fmt: skip


@triton.jit
def _replay_token(
    tile, y_ptr, state_ptr, q_new, k_new, v_new, g_new, beta_new, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
    start_slot, count, head, p_tile,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, READ_P: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The output of one new token for BLOCK_P rows of a state, from the state and count live records; append it.

    tile holds the rows if they are one piece (READ_P is BLOCK_P), else it is None and they are loaded piece by piece.
    """
    OUTER: tl.constexpr = BLOCK_N // LANES
    n = tl.arange(0, BLOCK_N)
    n_tile = tile_keys(ABREAST, BLOCK_N, LANES)
    p = p_tile * BLOCK_P + tl.arange(0, BLOCK_P)
    q_ptr, new_k_ptr = q_new + head // (H // G) * N, k_new + head // (H // G) * N
    q = tl.load(q_ptr + n, mask=n < N, other=0.0).to(WIDE)
    k = tl.load(new_k_ptr + n, mask=n < N, other=0.0).to(WIDE)
    v = tl.load(v_new + head * P + p, mask=p < P, other=0.0).to(WIDE)
    beta = tl.load(beta_new + head)
    if CHANNEL:
        g = tl.load(g_new + head * N + n, mask=n < N, other=0.0)
    else:
        g = tl.load(g_new + head)
        q_tile = tl.load(four_a_thread(q_ptr, start_slot) + n_tile, mask=n_tile < N, other=0.0).to(WIDE)
        k_tile = tl.load(four_a_thread(new_k_ptr, start_slot) + n_tile, mask=n_tile < N, other=0.0).to(WIDE)
    for_q, for_k, elapsed = from_records(
        q, k, g, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, start_slot, count, head, n, p,
        H, G, P, N, SLOTS, BLOCK_R, CHANNEL, DELTA, WIDE,
    )  # fmt: skip
    remaining = tl.exp(elapsed)
    if CHANNEL:
        q_tile, k_tile = as_keys(q * remaining, OUTER, LANES), as_keys(k * remaining, OUTER, LANES)
        remaining = 1.0
    # what the state holds
    if tile is not None:
        state_q = over_keys(tile * q_tile)[None]
        state_k = over_keys(tile * k_tile)[None]
    else:
        # piece by piece, so that a program needs few registers and many are resident
        piece = tl.arange(0, BLOCK_P // READ_P)[:, None, None]
        state_q = tl.zeros((BLOCK_P // READ_P, ABREAST, READ_P // ABREAST), WIDE)
        state_k = tl.zeros((BLOCK_P // READ_P, ABREAST, READ_P // ABREAST), WIDE)
        for i in range(BLOCK_P // READ_P):
            p_row = tile_rows(p_tile * BLOCK_P + i * READ_P, READ_P, ABREAST)
            rows = load_tile(state_ptr, p_row, n_tile, P, N, P % BLOCK_P == 0, N == BLOCK_N)
            state_q = tl.where(piece == i, over_keys(rows * q_tile)[None], state_q)
            if DELTA:
                state_k = tl.where(piece == i, over_keys(rows * k_tile)[None], state_k)
    for_q += tl.reshape(tl.permute(state_q, (0, 2, 1)), (BLOCK_P,)) * remaining
    if DELTA:
        for_k += tl.reshape(tl.permute(state_k, (0, 2, 1)), (BLOCK_P,)) * remaining
        u = beta * (v - for_k)
        tl.store(u_ptr + (start_slot * H + head) * P + p, u, mask=p < P)
    else:
        u = beta * v
    tl.store(y_ptr + head * P + p, for_q + u * tl.sum(k * q), mask=p < P)
    # this slot is none that a program of this launch may read
    tl.store(v_ptr + (start_slot * H + head) * P + p, v, mask=p < P)
    if p_tile == 0:
        append_shared(k, g, beta, k_ptr, g_ptr, beta_ptr, start_slot, head, n, H, G, N, CHANNEL)


@triton.jit
def token_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    batch, flushers, q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, READ_P: tl.constexpr, FOLD_P: tl.constexpr, FEW: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The first flushers programs share the rows of the call that flush, FOLD_P rows of the state of a head at a time;
    # they start first, because they take longest. Every other program owns BLOCK_P rows and reads; it has nothing to do
    # if its row flushes.
    folds = tl.program_id(0) < flushers
    item = tl.program_id(0)
    if folds:
        TILES: tl.constexpr = (P + FOLD_P - 1) // FOLD_P
        called, count = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
        # few at a time leave the others room to read, unless there is much to fold
        sharers = tl.minimum(flushers, tl.maximum(FEW, count * (H * TILES) // 16))
        called = tl.where(item < sharers, called, -1)
        while called >= 0:
            at = called.to(tl.int64)
            row = at
            if rows is not None:
                row = tl.load(rows + at).to(tl.int64)
            head = item // TILES % H
            state_ptr = state + row * state_stride + head * P * N
            k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
            beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
            start, first = tl.load(seqlen + row), tl.load(flushed + row)
            start_slot = (start % SLOTS).to(tl.int32)
            tile = fold(
                state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, start, head, item % TILES * FOLD_P,
                H, G, P, N, SLOTS, FOLD_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
            new = True
            if length is not None:
                new = tl.load(length + at) > 0
            if new:  # a row without a new token may be due all the same, with window 0
                _replay_token(
                    tile, y + at * (H * P), state_ptr, q_new + at * q_token, k_new + at * k_token, v_new + at * v_token,
                    g_new + at * g_token, beta_new + at * beta_token, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                    start_slot, 0, head, item % TILES,
                    H, G, P, N, SLOTS, BLOCK_R, FOLD_P, FOLD_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
                )  # fmt: skip
            item += sharers
            called, count = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
    else:
        READ_TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
        item -= flushers
        at = (item // (H * READ_TILES)).to(tl.int64)
        row = at
        if rows is not None:
            row = tl.load(rows + at).to(tl.int64)
        reads = row >= 0
        if length is not None:
            reads = reads & (tl.load(length + at) > 0)
        start = tl.load(seqlen + row, mask=reads, other=0)
        first = tl.load(flushed + row, mask=reads, other=0)
        if reads & (tl.load(flushing + row, mask=reads, other=1) == 0):
            head = item // READ_TILES % H
            state_ptr = state + row * state_stride + head * P * N
            tile = None
            if BLOCK_P == READ_P:  # the state is on its way while the records are read
                p = tile_rows(item % READ_TILES * BLOCK_P, BLOCK_P, ABREAST)
                n = tile_keys(ABREAST, BLOCK_N, LANES)
                tile = load_tile(state_ptr, p, n, P, N, P % BLOCK_P == 0, N == BLOCK_N)
            _replay_token(
                tile, y + at * (H * P), state_ptr,
                q_new + at * q_token, k_new + at * k_token, v_new + at * v_token, g_new + at * g_token,
                beta_new + at * beta_token, k + row * k_stride, v + row * v_stride, g + row * g_stride,
                beta + row * beta_stride, u + row * u_stride,
                (start % SLOTS).to(tl.int32), (start - first).to(tl.int32), head, item % READ_TILES,
                H, G, P, N, SLOTS, BLOCK_R, BLOCK_P, READ_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
            )  # fmt: skip


def replay(
    q: Tensor,
    records: Records,
    checkpoint: Tensor,
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    *,
    rows: Tensor | None = None,
    length: Tensor | None = None,
    recurrence: Recurrence,
    tiling: Tiling | None = None,
    y: Tensor | None = None,
) -> Tensor:
    """One step of t new tokens for some rows of a cache: flush where it is due, append, and read the outputs.

    Args:
        q: (rows of the call, t, ngroups, d_state), the read keys.
        records: of the new tokens, in the dtypes of ``ring``.
        checkpoint: (batch, nheads, headdim, d_state), changed in place for rows that flush.
        ring: Records with axis 1 = slot; token i stands in slot i % slots. New records go behind the committed ones.
        u: (batch, slots, nheads, headdim) fp32 or fp64, the write vectors of a delta rule by the same rule, else None.
        flushing: (batch,) bool, rows that fold their committed records first.
        seqlen, flushed: (batch,) int64, tokens committed and tokens inside the checkpoint; not changed.
        rows: (rows of the call,) int, cache row of each, -1 for off; None is all rows in order.
        length: (rows of the call,) int64, real tokens of each; None is all t.
        tiling: how the work is cut; None chooses by shape.
        y: for the outputs, if it is there already.

    Returns:
        (rows of the call, t, nheads, headdim), fp32 or fp64; not written where there is no real token.
    Cost: one state read, and one written for rows that flush; every tensor may have any row stride.
    """
    batch, t, ngroups, d_state = q.shape
    slots, nheads, headdim = ring.v.shape[1:]
    tiling = tiling or choose_tiling(batch, nheads, headdim, d_state, recurrence)
    if t > 1:
        if by_products(t, recurrence):
            fold_by_products(flushing, checkpoint, ring, seqlen, flushed, rows, t, recurrence)
        else:
            flush(flushing, checkpoint, ring, seqlen, flushed, recurrence=recurrence, tiling=tiling)
        return triton_tokens.read(
            q, records, (checkpoint,), None, ring, u, flushing, seqlen, flushed, rows=rows, length=length,
            recurrence=recurrence, dtype=checkpoint.dtype, y=y,
        )  # fmt: skip
    if y is None:
        y = torch.empty(batch, t, nheads, headdim, dtype=checkpoint.dtype, device=q.device)
    new = tuple(by_token(x) for x in (q, *records))
    cached = checkpoint, *ring, ring.v if u is None else u  # without a delta rule u is never looked at
    programs = batch * nheads * pieces(headdim, tiling.block_p)
    flushers = min(batch * nheads * pieces(headdim, tiling.fold_p), tiling.flushers)
    block_n = padded(d_state)
    token_kernel[(flushers + programs,)](
        y, checkpoint, *new, *cached[1:], rows, length, flushing, seqlen, flushed, batch, flushers,
        *token_strides(*new), *strides(0, *cached), nheads, ngroups, headdim, d_state, slots,
        min(BLOCK_B, padded(batch)), min(tiling.records, padded(slots - t)),
        tiling.block_p, tiling.read_p, tiling.fold_p, FEW, ABREAST, block_n, min(LANES, block_n),
        recurrence.decay == "channel", recurrence.delta, wide(checkpoint.dtype),
        num_warps=1, **registers(tiling.registers),
    )  # fmt: skip
    return y


def by_products(t: int, recurrence: Recurrence) -> bool:
    """Whether a step of t tokens folds by matrix products: with several, many records are due at once."""
    return t > 1 and recurrence == Recurrence("head", delta=False)


def fold_by_products(
    which: Tensor,
    checkpoint: Tensor,
    ring: Records,
    seqlen: Tensor,
    flushed: Tensor,
    rows: Tensor | None,
    t: int,
    recurrence: Recurrence,
) -> None:
    """The flush of such a step, of t tokens."""
    batch, nheads, headdim, d_state = checkpoint.shape
    called = batch if rows is None else len(rows)
    slots = ring.v.shape[1]
    cut = choose_tokens_tiling(called, nheads, headdim, recurrence)
    fold_kernel[(min(called * nheads * pieces(headdim, cut.fold_p), cut.flushers),)](
        checkpoint, *ring, rows, which, seqlen, flushed, called, *strides(0, checkpoint, *ring),
        nheads, ring.k.shape[2], headdim, d_state, slots, min(BLOCK_B, padded(called)), cut.fold_p,
        max(16, min(padded(slots - t), cut.records)), max(16, padded(d_state)),
        wide(checkpoint.dtype), num_warps=cut.fold_p // 16,
    )  # fmt: skip


def flush(
    which: Tensor,
    checkpoint: Tensor,
    ring: Records,
    seqlen: Tensor,
    flushed: Tensor,
    *,
    recurrence: Recurrence,
    tiling: Tiling | None = None,
) -> None:
    """Fold the committed records of the rows in ``which`` (batch,) bool into their checkpoints; arguments as above.

    Cost: one state read and one written for these rows.
    """
    batch, nheads, headdim, d_state = checkpoint.shape
    tiling = tiling or choose_tiling(batch, nheads, headdim, d_state, recurrence)
    block_n = padded(d_state)
    flush_kernel[(batch * nheads * pieces(headdim, tiling.fold_p),)](
        which, checkpoint, *ring, seqlen, flushed, *strides(0, checkpoint, *ring),
        nheads, ring.k.shape[2], headdim, d_state, ring.v.shape[1], tiling.fold_p, ABREAST, block_n,
        min(LANES, block_n), recurrence.decay == "channel", recurrence.delta, wide(checkpoint.dtype), num_warps=1,
    )  # fmt: skip
