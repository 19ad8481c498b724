"""A step of several tokens: appends, and the outputs of all of them from one read of the state."""

import triton
import triton.language as tl

from replayssm.ops.triton_answers import answer

# Axes: T new tokens, H value heads, G key groups, P headdim, N d_state. A name ending in _ptr points at the row of the
# cache that the program works on.


@triton.jit
def tokens_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    REAL_T: tl.constexpr, BLOCK_T: tl.constexpr, RECORDS: tl.constexpr, BLOCK_P: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
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
        state_ptr = state + row * state_stride + head * P * N
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        if tl.load(flushing + row) != 0:  # they have been folded
            count = 0
        if new > 0:
            answer(
                y + at * T * (H * P), state_ptr, q_new + at * T * q_token, k_new + at * T * k_token,
                v_new + at * T * v_token, g_new + at * T * g_token, beta_new + at * T * beta_token,
                k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                new, (start % SLOTS).to(tl.int32), count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
                H, G, P, N, SLOTS, REAL_T, BLOCK_T, RECORDS, BLOCK_P, KEYS, STAGES, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
