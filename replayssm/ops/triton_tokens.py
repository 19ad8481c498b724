"""A step of several tokens: appends, and the outputs of all of them from one read of the state."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.launching import by_token, padded, pieces, registers, strides, token_strides, wide
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import choose_tokens_tiling
from replayssm.ops.triton_answers import answer
from replayssm.ops.triton_overlap import beside, end_after_last

# Axes: T new tokens, H value heads, G key groups, P headdim, N d_state. A name ending in _ptr points at the row of the
# cache that the program works on.


@triton.jit
def tokens_kernel(
    y, planes, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    q_token, k_token, v_token, g_token, beta_token, plane_strides, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    REAL_T: tl.constexpr, BLOCK_T: tl.constexpr, RECORDS: tl.constexpr, BLOCK_P: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    # A program owns BLOCK_P rows of a state of one row of the call.
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    at = (tl.program_id(0) // (H * TILES)).to(tl.int64)
    row = at
    if rows is not None:
        row = tl.load(rows + at).to(tl.int64)
    if row >= 0:
        new = T
        if length is not None:
            new = tl.load(length + at).to(tl.int32)
        head = tl.program_id(0) // TILES % H
        first_p = tl.program_id(0) % TILES * BLOCK_P
        first, start = tl.load(flushed + row), tl.load(seqlen + row)
        count = (start - first).to(tl.int32)  # records that the outputs are read from
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        if tl.load(flushing + row) != 0:
            if HELD is None:  # they have been folded
                count = 0
            else:  # and answered, from more bits than a copy has
                new = 0
        if new > 0:
            answer(
                y + at * T * (H * P), planes, plane_strides, row, q_new + at * T * q_token, k_new + at * T * k_token,
                v_new + at * T * v_token, g_new + at * T * g_token, beta_new + at * T * beta_token,
                k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                new, (start % SLOTS).to(tl.int32), count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
                H, G, P, N, SLOTS, REAL_T, BLOCK_T, RECORDS, BLOCK_P, KEYS, STAGES, CHANNEL, DELTA, WIDE, HELD,
            )  # fmt: skip
    if HELD is not None:
        end_after_last()


def read(
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
    dtype: torch.dtype,
    y: Tensor | None = None,
) -> Tensor:
    """Append new tokens and read their outputs from a state; arguments as for ``triton_decode.replay``.

    Args:
        planes: of the states, cache row first.
        held: of their format's module in ``triton_formats``, with which the launch begins beside the one before it, as
            ``triton_copies.read`` does; None: (batch, nheads, headdim, d_state) as they are.
        flushing: rows whose records are in the state already; with a format, rows that are left alone.
        dtype: of sums and outputs.
        y: for the outputs, if it is there already.
    """
    batch, t, ngroups, d_state = q.shape
    slots, nheads, headdim = ring.v.shape[1:]
    if y is None:
        y = torch.empty(batch, t, nheads, headdim, dtype=dtype, device=q.device)
    new = tuple(by_token(x) for x in (q, *records))
    cached = *ring, ring.v if u is None else u  # without a delta rule u is never looked at
    cut = choose_tokens_tiling(batch, nheads, headdim, recurrence)
    block_t, block_n = padded(t), max(16, padded(d_state))
    tokens_kernel[(batch * nheads * pieces(headdim, cut.block_p),)](
        y, planes, *new, *cached, rows, length, flushing, seqlen, flushed,
        *token_strides(*new), strides(0, *planes), *strides(0, *cached), t, nheads, ngroups, headdim, d_state, slots,
        block_t, max(8, block_t), max(16, padded(slots - t)), cut.block_p,
        min(cut.keys, block_n) if held is None else block_n, cut.stages, recurrence.decay == "channel",
        recurrence.delta, wide(dtype), held, num_warps=cut.warps, **registers(cut.registers),
        **({} if held is None else beside()),
    )  # fmt: skip
    return y
