"""A step of one token that reads states in a format: what ``token_kernel`` does, by products on tensor cores."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.launching import padded, pieces, registers, strides, token_strides
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import choose_copy_tiling
from replayssm.ops.triton_overlap import beside, end_after_last
from replayssm.ops.triton_records import append_shared, from_records

# Axes: H value heads, G key groups, P headdim, N d_state; n and p are indices of keys and of rows of a state. A name
# ending in _ptr points at the row of the cache that the program works on.


@triton.jit
def copy_kernel(
    y, planes, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    q_token, k_token, v_token, g_token, beta_token, plane_strides, k_stride, v_stride, g_stride, beta_stride, u_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # A program owns BLOCK_P rows of a state. Rows that flush are answered by who folds them.
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    at = (tl.program_id(0) // (H * TILES)).to(tl.int64)
    row = at
    if rows is not None:
        row = tl.load(rows + at).to(tl.int64)
    reads = row >= 0
    if length is not None:
        reads = reads & (tl.load(length + at) > 0)
    start = tl.load(seqlen + row, mask=reads, other=0)
    first = tl.load(flushed + row, mask=reads, other=0)
    if reads & (tl.load(flushing + row, mask=reads, other=1) == 0):
        head, first_p = tl.program_id(0) // TILES % H, tl.program_id(0) % TILES * BLOCK_P
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        slot = (start % SLOTS).to(tl.int32)
        n = tl.arange(0, BLOCK_N)
        p = first_p + tl.arange(0, BLOCK_P)
        group = head // (H // G) * N
        q_now = tl.load(q_new + at * q_token + group + n, mask=n < N, other=0.0).to(tl.float32)
        k_now = tl.load(k_new + at * k_token + group + n, mask=n < N, other=0.0).to(tl.float32)
        v_now = tl.load(v_new + at * v_token + head * P + p, mask=p < P, other=0.0).to(tl.float32)
        beta_now = tl.load(beta_new + at * beta_token + head)
        if CHANNEL:
            g_now = tl.load(g_new + at * g_token + head * N + n, mask=n < N, other=0.0)
        else:
            g_now = tl.load(g_new + at * g_token + head)
        for_q, for_k, elapsed = from_records(
            q_now, k_now, g_now, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, slot, (start - first).to(tl.int32), head, n, p,
            H, G, P, N, SLOTS, BLOCK_R, CHANNEL, DELTA, tl.float32,
        )  # fmt: skip
        remaining = tl.exp(elapsed)
        column = tl.arange(0, 2 if DELTA else 1)  # q and k are columns of one product
        x = tl.where(column[:, None] == 0, q_now, k_now)
        if CHANNEL:
            held = HELD(planes, plane_strides, row, head, first_p, x * remaining, P, N, BLOCK_P, BLOCK_N)
        else:
            held = HELD(planes, plane_strides, row, head, first_p, x, P, N, BLOCK_P, BLOCK_N) * remaining
        u_now = v_now
        if DELTA:
            held_q, held_k = tl.split(held)
            for_q += held_q
            u_now -= for_k + held_k
        else:
            for_q += tl.sum(held, axis=1)
        u_now *= beta_now
        tl.store(y + (at * H + head) * P + p, for_q + u_now * tl.sum(k_now * q_now), mask=p < P)
        # this slot is none that a program of this launch may read
        tl.store(v_ptr + (slot * H + head) * P + p, v_now, mask=p < P)
        if DELTA:
            tl.store(u_ptr + (slot * H + head) * P + p, u_now, mask=p < P)
        if first_p == 0:
            append_shared(k_now, g_now, beta_now, k_ptr, g_ptr, beta_ptr, slot, head, n, H, G, N, CHANNEL)
    end_after_last()


def read(
    y: Tensor,
    q: Tensor,
    records: Records,
    planes: tuple[Tensor, ...],
    held: Any,
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    *,
    rows: Tensor | None,
    length: Tensor | None,
    recurrence: Recurrence,
) -> None:
    """Append one token and read its output into y for rows that do not flush; see ``triton_tokens.read``.

    The launch before it must be the one that stores those that flush: it begins beside that.
    """
    batch, _, ngroups, d_state = q.shape
    slots, nheads, headdim = ring.v.shape[1:]
    new = q, *records
    cached = *ring, ring.v if u is None else u  # without a delta rule u is never looked at
    cut = choose_copy_tiling(batch, nheads, headdim, recurrence, held.__module__.rpartition(".")[2])
    copy_kernel[(batch * nheads * pieces(headdim, cut.block_p),)](
        y, planes, *new, *cached, rows, length, flushing, seqlen, flushed,
        *token_strides(*new), strides(0, *planes), *strides(0, *cached), nheads, ngroups, headdim, d_state, slots,
        min(cut.records, padded(slots - 1)), cut.block_p, max(16, padded(d_state)),
        recurrence.decay == "channel", recurrence.delta, held, num_warps=1, **registers(cut.registers), **beside(),
    )  # fmt: skip
