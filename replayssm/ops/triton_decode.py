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

from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import Tiling, choose_tiling
from replayssm.ops.triton_records import append_shared, from_records
from replayssm.ops.triton_tokens import tokens_kernel

# Axes: H value heads, G key groups, P headdim, N d_state, R records. A tile of the state is (ABREAST, deep, outer, LANES):
# row p = deep * ABREAST + abreast, key n = outer * LANES + lane. The threads of a warp lie along abreast and lanes, eight
# to a row, so that a sum over keys stays mostly in one thread. Key vectors are loaded once for every row abreast, hence
# in the layout of the tile: nothing is moved between threads to multiply them.
# A name ending in _ptr points at the row of the cache, or of the call, that the program works on.


@triton.jit
def _load(pointer, mask, WHOLE: tl.constexpr):
    """Without a mask where the sizes are such that it would be true everywhere."""
    if WHOLE:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _keys(ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """(ABREAST, 1, outer, LANES): n, the same for every row."""
    OUTER: tl.constexpr = BLOCK_N // LANES
    n = (tl.arange(0, OUTER) * LANES)[None, None, :, None] + tl.arange(0, LANES)[None, None, None, :]
    return tl.broadcast_to(n, (ABREAST, 1, OUTER, LANES))


@triton.jit
def _rows(first, BLOCK_P: tl.constexpr, ABREAST: tl.constexpr):
    """(ABREAST, deep): p of BLOCK_P rows from first on."""
    return first + tl.arange(0, BLOCK_P // ABREAST)[None, :] * ABREAST + tl.arange(0, ABREAST)[:, None]


@triton.jit
def _over_keys(x):
    """Sum (ABREAST, deep, outer, LANES) -> (ABREAST, deep)."""
    return tl.sum(tl.sum(x, axis=2), axis=2)


@triton.jit
def _fold(
    tile, k_ptr, v_ptr, g_ptr, beta_ptr, first, last, head, n, p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, TOGETHER: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Run the recurrence over the records of tokens first .. last - 1 on a tile."""
    for group in range(first, last, TOGETHER):
        for j in tl.static_range(TOGETHER):  # unrolled, so that their loads are under way together
            token = group + j
            slot = (token % SLOTS).to(tl.int32)
            real = token < last  # a record of zeros changes nothing
            k = tl.load(k_ptr + (slot * G + head // (H // G)) * N + n, mask=real & (n < N), other=0.0).to(WIDE)
            v = tl.load(v_ptr + (slot * H + head) * P + p, mask=real & (p < P), other=0.0).to(WIDE)
            beta = tl.load(beta_ptr + slot * H + head, mask=real, other=0.0)
            if CHANNEL:
                g = tl.load(g_ptr + (slot * H + head) * N + n, mask=real & (n < N), other=0.0)
            else:
                g = tl.load(g_ptr + slot * H + head, mask=real, other=0.0)
            tile *= tl.exp(g)
            if DELTA:
                v -= _over_keys(tile * k)
            tile += (beta * v)[:, :, None, None] * k
    return tile


@triton.jit
def flush_kernel(
    which, state, k, v, g, beta, seqlen, flushed, state_stride, k_stride, v_stride, g_stride, beta_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, TOGETHER: tl.constexpr,
    FOLD_P: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (P + FOLD_P - 1) // FOLD_P
    row = (tl.program_id(0) // (H * PIECES)).to(tl.int64)
    if tl.load(which + row) == 0:
        return
    head = tl.program_id(0) // PIECES % H
    n = _keys(ABREAST, BLOCK_N, LANES)
    p = _rows(tl.program_id(0) % PIECES * FOLD_P, FOLD_P, ABREAST)
    tile_ptr = state + row * state_stride + (head * P + p[:, :, None, None]) * N + n
    inside = (p[:, :, None, None] < P) & (n < N)
    tile = _fold(
        _load(tile_ptr, inside, N == BLOCK_N and P % FOLD_P == 0), k + row * k_stride, v + row * v_stride,
        g + row * g_stride, beta + row * beta_stride, tl.load(flushed + row), tl.load(seqlen + row), head, n, p,
        H, G, P, N, SLOTS, TOGETHER, CHANNEL, DELTA, WIDE,
    )  # fmt: skip
    tl.store(tile_ptr, tile, mask=inside)


@triton.jit
def _nth_to_flush(wanted, flushing, rows, batch, BLOCK_B: tl.constexpr):
    """The row of the call that is the wanted-th, from 0, of those to flush, and how many there are."""
    found = 0
    count = 0
    for first in range(0, batch, BLOCK_B):
        called = first + tl.arange(0, BLOCK_B)
        row = called
        if rows is not None:
            row = tl.load(rows + called, mask=called < batch, other=-1)
        due = tl.load(flushing + row, mask=(called < batch) & (row >= 0), other=0).to(tl.int32)
        place = count + tl.cumsum(due, axis=0) - 1
        found += tl.sum(tl.where((place == wanted) & (due != 0), called, 0), axis=0)
        count += tl.sum(due, axis=0)
    return found, count


@triton.jit
def token_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed, batch,
    flushers, q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, READ_P: tl.constexpr, FOLD_P: tl.constexpr, TOGETHER: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n_tile = _keys(ABREAST, BLOCK_N, LANES)
    if tl.program_id(0) < flushers:
        # rows that flush: these programs start first and share the work, a piece of FOLD_P rows of a state at a time
        PIECES: tl.constexpr = (P + FOLD_P - 1) // FOLD_P
        item = tl.program_id(0)
        called, count = _nth_to_flush(item // (H * PIECES), flushing, rows, batch, BLOCK_B)
        while item < count * (H * PIECES):
            row = called.to(tl.int64)
            at = row
            if rows is not None:
                row = tl.load(rows + called).to(tl.int64)
            head = item // PIECES % H
            p = _rows(item % PIECES * FOLD_P, FOLD_P, ABREAST)
            tile_ptr = state + row * state_stride + (head * P + p[:, :, None, None]) * N + n_tile
            inside = (p[:, :, None, None] < P) & (n_tile < N)
            k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
            beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
            start = tl.load(seqlen + row)
            tile = _fold(
                _load(tile_ptr, inside, N == BLOCK_N and P % FOLD_P == 0), k_ptr, v_ptr, g_ptr, beta_ptr,
                tl.load(flushed + row), start, head, n_tile, p,
                H, G, P, N, SLOTS, TOGETHER, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
            tl.store(tile_ptr, tile, mask=inside)
            group = head // (H // G)
            q_s = tl.load(q_new + at * q_token + group * N + n_tile, mask=n_tile < N, other=0.0).to(WIDE)
            k_s = tl.load(k_new + at * k_token + group * N + n_tile, mask=n_tile < N, other=0.0).to(WIDE)
            v_s = tl.load(v_new + at * v_token + head * P + p, mask=p < P, other=0.0).to(WIDE)
            beta_s = tl.load(beta_new + at * beta_token + head)
            if CHANNEL:
                g_s = tl.load(g_new + at * g_token + head * N + n_tile, mask=n_tile < N, other=0.0)
            else:
                g_s = tl.load(g_new + at * g_token + head)
            tile *= tl.exp(g_s)
            u_s = beta_s * (v_s - _over_keys(tile * k_s)) if DELTA else beta_s * v_s
            y_s = _over_keys(tile * q_s) + u_s * _over_keys(k_s * q_s)
            tl.store(y + (at * H + head) * P + p, y_s, mask=p < P)
            slot = (start % SLOTS).to(tl.int32)
            tl.store(v_ptr + (slot * H + head) * P + p, v_s, mask=p < P)
            if DELTA:
                tl.store(u_ptr + (slot * H + head) * P + p, u_s, mask=p < P)
            if item % PIECES == 0:
                append_shared(k_s, g_s, beta_s, k_ptr, g_ptr, beta_ptr, slot, head, n_tile, H, G, N, CHANNEL)
            item += flushers
            called, count = _nth_to_flush(item // (H * PIECES), flushing, rows, batch, BLOCK_B)
    else:
        TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
        program = tl.program_id(0) - flushers
        at = (program // (H * TILES)).to(tl.int64)
        row = at
        if rows is not None:
            row = tl.load(rows + at).to(tl.int64)
        reads = row >= 0
        if length is not None:
            reads = reads & (tl.load(length + at) > 0)
        if reads:
            reads = tl.load(flushing + row) == 0
        if reads:
            head = program // TILES % H
            group = head // (H // G)
            p_tile = program % TILES
            n = tl.arange(0, BLOCK_N)
            p = p_tile * BLOCK_P + tl.arange(0, BLOCK_P)
            k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
            beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
            start = tl.load(seqlen + row)
            count = (start - tl.load(flushed + row)).to(tl.int32)  # live records
            start_slot = (start % SLOTS).to(tl.int32)
            q_s = tl.load(q_new + at * q_token + group * N + n, mask=n < N, other=0.0).to(WIDE)
            k_s = tl.load(k_new + at * k_token + group * N + n, mask=n < N, other=0.0).to(WIDE)
            v_s = tl.load(v_new + at * v_token + head * P + p, mask=p < P, other=0.0).to(WIDE)
            beta_s = tl.load(beta_new + at * beta_token + head)
            if CHANNEL:
                g_s = tl.load(g_new + at * g_token + head * N + n, mask=n < N, other=0.0)
            else:
                g_s = tl.load(g_new + at * g_token + head)
                q_tile = tl.load(q_new + at * q_token + group * N + n_tile, mask=n_tile < N, other=0.0).to(WIDE)
                k_tile = tl.load(k_new + at * k_token + group * N + n_tile, mask=n_tile < N, other=0.0).to(WIDE)

            y_s, held, elapsed = from_records(
                q_s, k_s, g_s, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, start_slot, count, head, n, p,
                H, G, P, N, SLOTS, BLOCK_R, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
            remaining = tl.exp(elapsed)
            if CHANNEL:
                q_tile = tl.reshape((q_s * remaining)[None, None, :], (1, 1, BLOCK_N // LANES, LANES))
                k_tile = tl.reshape((k_s * remaining)[None, None, :], (1, 1, BLOCK_N // LANES, LANES))
            # what the state holds: piece by piece, so that few registers are needed and many programs are resident
            DEEP: tl.constexpr = READ_P // ABREAST
            piece = tl.arange(0, BLOCK_P // READ_P)[:, None, None]
            from_state = tl.zeros((BLOCK_P // READ_P, ABREAST, DEEP), WIDE)
            from_state_k = tl.zeros((BLOCK_P // READ_P, ABREAST, DEEP), WIDE)
            for i in range(BLOCK_P // READ_P):
                rows_p = _rows(p_tile * BLOCK_P + i * READ_P, READ_P, ABREAST)[:, :, None, None]
                tile = _load(
                    state + row * state_stride + (head * P + rows_p) * N + n_tile, (rows_p < P) & (n_tile < N),
                    N == BLOCK_N and P % BLOCK_P == 0,
                )  # fmt: skip
                from_state = tl.where(piece == i, _over_keys(tile * q_tile)[None], from_state)
                if DELTA:
                    from_state_k = tl.where(piece == i, _over_keys(tile * k_tile)[None], from_state_k)
            from_state = tl.reshape(tl.permute(from_state, (0, 2, 1)), (BLOCK_P,))
            y_s += from_state if CHANNEL else from_state * remaining
            if DELTA:
                from_state_k = tl.reshape(tl.permute(from_state_k, (0, 2, 1)), (BLOCK_P,))
                held += from_state_k if CHANNEL else from_state_k * remaining
            u_s = beta_s * (v_s - held) if DELTA else beta_s * v_s
            tl.store(y + (at * H + head) * P + p, y_s + u_s * tl.sum(k_s * q_s), mask=p < P)

            # append; this slot is none that a program of this launch may read
            tl.store(v_ptr + (start_slot * H + head) * P + p, v_s, mask=p < P)
            if DELTA:
                tl.store(u_ptr + (start_slot * H + head) * P + p, u_s, mask=p < P)
            if p_tile == 0:
                append_shared(k_s, g_s, beta_s, k_ptr, g_ptr, beta_ptr, start_slot, head, n, H, G, N, CHANNEL)


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
) -> Tensor:
    """One step of t new tokens for some rows of a cache: flush where it is due, append, and read the outputs.

    Args:
        q: (rows of the call, t, ngroups, d_state), the read keys.
        records: of the new tokens, in the dtypes of ``ring``.
        checkpoint: (batch, nheads, headdim, d_state), changed in place for rows that flush.
        ring: Records with axis 1 = slot; token i stands in slot i % slots. The new records go beyond the committed ones.
        u: (batch, slots, nheads, headdim) fp32 or fp64, the write vectors of a delta rule by the same rule, else None.
        flushing: (batch,) bool, rows that fold their committed records first.
        seqlen, flushed: (batch,) int64, tokens committed and tokens inside the checkpoint; not changed.
        rows: (rows of the call,) int, cache row of each, -1 for off; None is all rows in order.
        length: (rows of the call,) int64, real tokens of each; None is all t.
        tiling: how the work is cut; None chooses by shape.

    Returns:
        (rows of the call, t, nheads, headdim), fp32 or fp64; not written where there is no real token.
    Cost: one state read, and one written for rows that flush; every tensor may have any row stride.
    """
    batch, t, ngroups, d_state = q.shape
    slots, nheads, headdim = ring.v.shape[1:]
    y = torch.empty(batch, t, nheads, headdim, dtype=checkpoint.dtype, device=q.device)
    q, k, v, g, beta = (_by_token(x) for x in (q, *records))
    tensors = (y, checkpoint, q, k, v, g, beta, *ring, ring.v if u is None else u, rows, length, flushing, seqlen, flushed)
    strides = (
        *(x.stride(1) for x in (q, k, v, g, beta)),
        *(x.stride(0) for x in (checkpoint, *ring, ring.v if u is None else u)),
    )
    sizes = nheads, ngroups, headdim, d_state, slots
    rule = recurrence.decay == "channel", recurrence.delta, _wide(checkpoint)
    block_n = triton.next_power_of_2(d_state)
    tiling = tiling or choose_tiling(batch, nheads, headdim, d_state, recurrence)
    if t > 1:
        flush(flushing, checkpoint, ring, seqlen, flushed, recurrence=recurrence, tiling=tiling)
        grid = (batch * nheads * triton.cdiv(headdim, tiling.fold_p),)
        tokens_kernel[grid](
            *tensors, *strides, t, *sizes, triton.next_power_of_2(t), _records_at_once(slots - t), tiling.fold_p,
            block_n, *rule, num_warps=1,
        )  # fmt: skip
        return y
    pieces = batch * nheads * triton.cdiv(headdim, tiling.fold_p)
    flushers = min(pieces, tiling.flushers)
    grid = (flushers + batch * nheads * triton.cdiv(headdim, tiling.block_p),)
    token_kernel[grid](
        *tensors, batch, flushers, *strides, *sizes, min(256, triton.next_power_of_2(batch)),
        min(tiling.records, _records_at_once(slots - t)), tiling.block_p, tiling.read_p, tiling.fold_p, tiling.together,
        tiling.abreast, block_n, min(tiling.lanes, block_n), *rule, num_warps=1,
    )  # fmt: skip
    return y


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
    block_n = triton.next_power_of_2(d_state)
    grid = (batch * nheads * triton.cdiv(headdim, tiling.fold_p),)
    flush_kernel[grid](
        which, checkpoint, *ring, seqlen, flushed, checkpoint.stride(0), *(x.stride(0) for x in ring),
        nheads, ring.k.shape[2], headdim, d_state, ring.v.shape[1], tiling.together, tiling.fold_p, tiling.abreast,
        block_n, min(tiling.lanes, block_n), recurrence.decay == "channel", recurrence.delta, _wide(checkpoint),
        num_warps=1,
    )  # fmt: skip


def _records_at_once(capacity: int) -> int:
    """Records in one block of ``from_records``: as many as can be live, up to 16."""
    return min(16, triton.next_power_of_2(capacity))


def _wide(checkpoint: Tensor) -> tl.dtype:
    """The dtype that everything is summed in."""
    return tl.float64 if checkpoint.dtype == torch.float64 else tl.float32


def _by_token(x: Tensor) -> Tensor:
    """(rows, t, ...) such that heads and features are dense and one stride leads from token to token; x if it is."""
    dense = x[0, 0].is_contiguous() and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if dense else x.contiguous()
