"""A step of several tokens in one launch: flush, append, and the outputs of all of them from one read of the state."""

import triton
import triton.language as tl

from replayssm.ops.triton_answers import answer
from replayssm.ops.triton_fold import fold
from replayssm.ops.triton_fold_products import fold_records

# Axes: T new tokens, H value heads, G key groups, P headdim, N d_state. A name ending in _ptr points at the row of the
# cache that the program works on.


@triton.jit
def tokens_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr, TOKENS: tl.constexpr, RECORDS: tl.constexpr, BLOCK_P: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, FOLD_P: tl.constexpr, AT_ONCE: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
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
        if tl.load(flushing + row) != 0:
            if CHANNEL:
                for p in range(first_p, first_p + BLOCK_P, FOLD_P):
                    fold(
                        state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, start, head, p,
                        H, G, P, N, SLOTS, FOLD_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
                    )  # fmt: skip
            else:
                for folded in range(0, count, AT_ONCE):
                    tl.debug_barrier()
                    fold_records(
                        state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, ((first + folded) % SLOTS).to(tl.int32),
                        tl.minimum(count - folded, AT_ONCE), head, first_p,
                        H, G, P, N, SLOTS, BLOCK_P, FOLD_P, AT_ONCE, BLOCK_N, DELTA, WIDE,
                    )  # fmt: skip
            count = 0
            tl.debug_barrier()  # other threads of this program read what was stored
        if new > 0:
            answer(
                y + at * T * (H * P), state_ptr, q_new + at * T * q_token, k_new + at * T * k_token,
                v_new + at * T * v_token, g_new + at * T * g_token, beta_new + at * T * beta_token,
                k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                new, (start % SLOTS).to(tl.int32), count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
                T, H, G, P, N, SLOTS, BLOCK_T, TOKENS, RECORDS, BLOCK_P, KEYS, STAGES, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
