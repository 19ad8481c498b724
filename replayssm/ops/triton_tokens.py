"""Replay of several new tokens in one launch."""

import triton
import triton.language as tl

from replayssm.ops.triton_records import append_shared, from_records

# Axes: T new tokens, R records, H value heads, G key groups, P headdim, N d_state; a tile of the state is (p, n).
# One program owns (row of the call, value head, BLOCK_P rows of the state) and reads that tile once for all tokens.


@triton.jit
def tokens_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    called = (tl.program_id(0) // (H * TILES)).to(tl.int64)
    row = called
    if rows is not None:
        row = tl.load(rows + called).to(tl.int64)
    new = T
    if length is not None:
        new = tl.load(length + called).to(tl.int32)
    if row >= 0:
        head = tl.program_id(0) // TILES % H
        group = head // (H // G)
        p_tile = tl.program_id(0) % TILES
        p = p_tile * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        t = tl.arange(0, BLOCK_T)
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        start = tl.load(seqlen + row)
        start_slot = (start % SLOTS).to(tl.int32)
        count = (start - tl.load(flushed + row)).to(tl.int32)  # live records
        if tl.load(flushing + row) != 0:  # they have been folded
            count = 0
        tile = tl.load(
            state + row * state_stride + (head * P + p[:, None]) * N + n, mask=(p[:, None] < P) & (n < N), other=0.0
        )  # fmt: skip
        k_all = tl.load(
            k_new + (called * T + t[:, None]) * k_token + group * N + n, mask=(t[:, None] < T) & (n < N), other=0.0
        ).to(WIDE)  # fmt: skip
        u_all = tl.zeros((BLOCK_T, BLOCK_P), WIDE)
        if CHANNEL:
            since = tl.zeros((BLOCK_T, BLOCK_N), WIDE)  # log decay of the new tokens after each of them
            ahead = tl.zeros((BLOCK_N,), WIDE)  # and of all so far
        else:
            since = tl.zeros((BLOCK_T,), WIDE)
            ahead = tl.full((), 0.0, WIDE)
        for s in range(0, new):
            at = called * T + s
            q_s = tl.load(q_new + at * q_token + group * N + n, mask=n < N, other=0.0).to(WIDE)
            k_s = tl.load(k_new + at * k_token + group * N + n, mask=n < N, other=0.0).to(WIDE)
            v_s = tl.load(v_new + at * v_token + head * P + p, mask=p < P, other=0.0).to(WIDE)
            beta_s = tl.load(beta_new + at * beta_token + head)
            earlier = t < s
            if CHANNEL:
                g_s = tl.load(g_new + at * g_token + head * N + n, mask=n < N, other=0.0)
                ahead += g_s
                since = tl.where(earlier[:, None], since + g_s, 0.0)
                decayed = k_all * tl.exp(since)
                over_q = tl.sum(decayed * q_s, axis=1)
                over_k = tl.sum(decayed * k_s, axis=1)
            else:
                g_s = tl.load(g_new + at * g_token + head)
                ahead += g_s
                since = tl.where(earlier, since + g_s, 0.0)
                over_q = tl.sum(k_all * q_s, axis=1) * tl.exp(since)
                over_k = tl.sum(k_all * k_s, axis=1) * tl.exp(since)
            y_s, held, elapsed = from_records(
                q_s, k_s, ahead, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, start_slot, count, head, n, p,
                H, G, P, N, SLOTS, BLOCK_R, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
            y_s += tl.sum(tile * (q_s * tl.exp(elapsed)), axis=1)
            y_s += tl.sum(u_all * tl.where(earlier, over_q, 0.0)[:, None], axis=0)
            u_s = beta_s * v_s
            if DELTA:
                held += tl.sum(tile * (k_s * tl.exp(elapsed)), axis=1)
                held += tl.sum(u_all * tl.where(earlier, over_k, 0.0)[:, None], axis=0)
                u_s = beta_s * (v_s - held)
            u_all = tl.where((t == s)[:, None], u_s[None, :], u_all)
            tl.store(y + (at * H + head) * P + p, y_s + u_s * tl.sum(k_s * q_s, axis=0), mask=p < P)

            # append; these slots are none that a program of this launch may read
            slot = start_slot + s
            slot = tl.where(slot >= SLOTS, slot - SLOTS, slot)
            tl.store(v_ptr + (slot * H + head) * P + p, v_s, mask=p < P)
            if DELTA:
                tl.store(u_ptr + (slot * H + head) * P + p, u_s, mask=p < P)
            if p_tile == 0:
                append_shared(k_s, g_s, beta_s, k_ptr, g_ptr, beta_ptr, slot, head, n, H, G, N, CHANNEL)
