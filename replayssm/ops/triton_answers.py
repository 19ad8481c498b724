"""The outputs of several new tokens from one read of a state, as matrix products; and the appends."""

import triton
import triton.language as tl

from replayssm.ops.triton_products import as_the_state, inverse, load_piece, times, times_state

# Axes: T new tokens, R records, H value heads, G key groups, P headdim, N d_state; i, s and t are indices of new tokens,
# r of records, newest first, p and n of rows and keys of a state. A name ending in _ptr points at the row of the cache
# that the program works on, one ending in _at at the first new token of the row of the call.


@triton.jit
def _since(g, i, t):
    """(i, t): the log decay after token i up to token t, from g (t,); sums of what lies between lose nothing."""
    return tl.cumsum(tl.where(t > i[:, None], g, 0.0), axis=1)


@triton.jit
def _by_channel(
    keys, q_at, k_at, g_at, q_token, k_token, g_token, new, first_n, group, head, over_q, over_k,
    T: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Key products (i, t) of new tokens i with q and k of tokens t, decayed by channel, added to those of other keys."""
    n = first_n + tl.arange(0, KEYS)
    i = tl.arange(0, TOKENS)
    t = tl.arange(0, BLOCK_T)
    since = tl.zeros((TOKENS, KEYS), WIDE)  # log decay after each of them, up to the token at hand
    for s in tl.static_range(T):
        real = (n < N) & (s < new)
        q = tl.load(q_at + s * q_token + group + n, mask=real, other=0.0).to(WIDE)
        k = tl.load(k_at + s * k_token + group + n, mask=real, other=0.0).to(WIDE)
        g = tl.load(g_at + s * g_token + head * N + n, mask=real, other=0.0)
        since = tl.where((i < s)[:, None], since + g, 0.0)
        decayed = keys * tl.exp(since)
        over_q += tl.where(t == s, tl.sum(decayed * q, axis=1)[:, None], 0.0)
        over_k += tl.where(i == s, tl.sum(decayed * k, axis=1)[:, None], 0.0)
    return over_q, over_k


@triton.jit
def answer(
    y_at, state_ptr, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
    new, start_slot, count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr, TOKENS: tl.constexpr, RECORDS: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The outputs of new tokens for BLOCK_P rows of a state, from the state and count live records; append them."""
    group = head // (H // G) * N
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, TOKENS)
    r = tl.arange(0, RECORDS)
    slot_i = start_slot + i
    slot_i = tl.where(slot_i >= SLOTS, slot_i - SLOTS, slot_i)
    slot = start_slot - 1 - r
    slot = tl.where(slot < 0, slot + SLOTS, slot)
    live = r < count
    later = tl.where(slot + 1 == SLOTS, 0, slot + 1)
    oldest = start_slot - count
    oldest = tl.where(oldest < 0, oldest + SLOTS, oldest)

    # Products over keys, some keys at a time: of q and k of the new tokens with the state, with records, and with k of
    # the new tokens.
    state_q, state_k = tl.zeros((BLOCK_P, BLOCK_T), WIDE), tl.zeros((BLOCK_P, TOKENS), WIDE)
    old_q, old_k = tl.zeros((RECORDS, BLOCK_T), WIDE), tl.zeros((RECORDS, TOKENS), WIDE)
    new_q, new_k = tl.zeros((TOKENS, BLOCK_T), WIDE), tl.zeros((TOKENS, TOKENS), WIDE)
    for first_n in tl.range(0, N, KEYS, num_stages=STAGES):
        n = first_n + tl.arange(0, KEYS)
        tile = load_piece(state_ptr, first_p, first_n, P, N, BLOCK_P, KEYS)
        x_q = tl.load(q_at + t[:, None] * q_token + group + n, mask=(t[:, None] < new) & (n < N), other=0.0)
        keys = tl.load(k_at + i[:, None] * k_token + group + n, mask=(i[:, None] < new) & (n < N), other=0.0)
        old = tl.load(k_ptr + slot[:, None] * (G * N) + group + n, mask=live[:, None] & (n < N), other=0.0)
        x_q, x_k = tl.trans(x_q), tl.trans(keys)
        if CHANNEL:
            g_t = tl.load(g_at + t[:, None] * g_token + head * N + n, mask=(t[:, None] < new) & (n < N), other=0.0)
            g_i = tl.load(g_at + i[:, None] * g_token + head * N + n, mask=(i[:, None] < new) & (n < N), other=0.0)
            g_r = tl.load(
                g_ptr + (later[:, None] * H + head) * N + n, mask=(live & (r > 0))[:, None] & (n < N), other=0.0
            )  # fmt: skip
            before = tl.load(g_ptr + (oldest * H + head) * N + n, mask=(count > 0) & (n < N), other=0.0)
            new_q, new_k = _by_channel(
                keys.to(WIDE), q_at, k_at, g_at, q_token, k_token, g_token, new, first_n, group, head, new_q, new_k,
                T, N, BLOCK_T, KEYS, TOKENS, WIDE,
            )  # fmt: skip
            x_q = x_q.to(WIDE) * tl.trans(tl.exp(tl.cumsum(g_t, axis=0)))
            x_k = x_k.to(WIDE) * tl.trans(tl.exp(tl.cumsum(g_i, axis=0)))
            old = old.to(WIDE) * tl.exp(tl.cumsum(g_r, axis=0))
            if first_p == 0:  # these slots are none that a program of this launch may read
                mine = (i[:, None] < new) & (n < N)
                tl.store(g_ptr + (slot_i[:, None] * H + head) * N + n, g_i, mask=mine)
        else:
            new_q = times(keys, x_q, new_q)
            if DELTA:
                new_k = times(keys, x_k, new_k)
        old_q = times(old, x_q, old_q)
        if DELTA:
            old_k = times(old, x_k, old_k)
        if CHANNEL:
            remaining = tl.exp(tl.sum(g_r, axis=0) + before)[:, None]
            x_q, x_k = x_q * remaining, x_k * remaining
        elif x_q.dtype != tl.bfloat16:
            x_q, x_k = x_q.to(WIDE), x_k.to(WIDE)
        state_q = times_state(tile, as_the_state(x_q, KEYS, BLOCK_T), state_q, KEYS, 16)
        if DELTA:
            state_k = times_state(tile, as_the_state(x_k, KEYS, TOKENS), state_k, KEYS, 16)
        if (first_p == 0) & (head % (H // G) == 0):
            tl.store(k_ptr + slot_i[:, None] * (G * N) + group + n, keys, mask=(i[:, None] < new) & (n < N))

    # decays of a head, which are the same for all keys
    beta_i = tl.load(beta_at + i * beta_token + head, mask=i < new, other=0.0)
    if not CHANNEL:
        g_t = tl.load(g_at + t * g_token + head, mask=t < new, other=0.0)
        g_i = tl.load(g_at + i * g_token + head, mask=i < new, other=0.0)
        g_r = tl.load(g_ptr + later * H + head, mask=live & (r > 0), other=0.0)
        before = tl.load(g_ptr + oldest * H + head, mask=count > 0, other=0.0)
        reached_q, reached_k = tl.exp(tl.cumsum(g_t, axis=0)), tl.exp(tl.cumsum(g_i, axis=0))
        weight = tl.exp(tl.cumsum(g_r, axis=0))[:, None]
        remaining = tl.exp(tl.sum(g_r, axis=0) + before)
        new_q *= tl.exp(_since(g_t, i, t))
        old_q *= weight * reached_q
        state_q *= remaining * reached_q
        if DELTA:
            new_k *= tl.exp(_since(g_i, i, i))
            old_k *= weight * reached_k
            state_k *= remaining * reached_k
    new_q = tl.where(i[:, None] <= t, new_q, 0.0)
    if first_p == 0:
        tl.store(beta_ptr + slot_i * H + head, beta_i, mask=i < new)
        if not CHANNEL:
            tl.store(g_ptr + slot_i * H + head, g_i, mask=i < new)

    # what these found, times what was written
    p = first_p + tl.arange(0, BLOCK_P)[:, None]
    mine = (i < new) & (p < P)
    value = tl.load(v_at + i * v_token + head * P + p, mask=mine, other=0.0)
    at_r = (slot * H + head) * P + p
    if DELTA:
        written = tl.load(u_ptr + at_r, mask=live & (p < P), other=0.0)
    else:
        written = tl.load(v_ptr + at_r, mask=live & (p < P), other=0.0)
        if written.dtype != tl.bfloat16:
            written = written.to(WIDE)
        old_q *= tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)[:, None]
    state_q = times(written, old_q, state_q)
    corrected = value.to(WIDE)
    if DELTA:
        corrected -= times(written, old_k, state_k)
        corrected *= beta_i
        u = times(corrected, inverse(new_k, beta_i, new, TOKENS, WIDE), tl.zeros((BLOCK_P, TOKENS), WIDE))
        tl.store(u_ptr + (slot_i * H + head) * P + p, u, mask=mine)
    else:
        u = corrected * beta_i
    tl.store(y_at + t * (H * P) + head * P + p, times(u, new_q, state_q), mask=(t < new) & (p < P))
    tl.store(v_ptr + (slot_i * H + head) * P + p, value, mask=mine)
