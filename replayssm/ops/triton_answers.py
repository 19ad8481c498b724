"""The outputs of several new tokens from one read of a state, as matrix products; and the appends."""

import triton
import triton.language as tl

from replayssm.ops.triton_products import as_the_state, inverse, load_piece, times, times_state

# Axes: T new tokens, R records, H value heads, G key groups, P headdim, N d_state; i and t are indices of new tokens, r
# of records, newest first, p and n of rows and keys of a state. A name ending in _ptr points at the row of the cache
# that the program works on, one ending in _at at the first new token of the row of the call.


@triton.jit
def _by_channel(
    keys, x_q, g, g_next, over_q, over_k, BLOCK_T: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Key products (i, t) of new tokens i with x_q and keys of later tokens t, decayed by channel, added to others.

    keys, x_q, g and g_next, the decay after each token, are (t, n). Blocks of 2 HALF tokens: from the first half of a
    block to the second one decays are products of two, up to its middle and from there, both at most 1. Then blocks of
    half the size, down to single tokens.
    """
    if HALF > 0:
        t = tl.arange(0, BLOCK_T)
        place = tl.arange(0, HALF)[None, :, None]
        g_half = tl.reshape(g, (BLOCK_T // HALF, HALF, KEYS))
        after_half = tl.where(place < HALF - 1, tl.reshape(g_next, (BLOCK_T // HALF, HALF, KEYS)), 0.0)
        up_to = tl.exp(tl.reshape(tl.cumsum(after_half, axis=1, reverse=True), (BLOCK_T, KEYS)))
        since = tl.exp(tl.reshape(tl.cumsum(g_half, axis=1), (BLOCK_T, KEYS)))
        across = (t[:, None] // (2 * HALF) == t // (2 * HALF)) & (t[:, None] // HALF < t // HALF)
        none = tl.zeros((BLOCK_T, BLOCK_T), g.dtype)
        over_q += tl.where(across, times(keys * up_to, tl.trans(x_q * since), none), 0.0)
        over_k += tl.where(across, times(keys * up_to, tl.trans(keys * since), none), 0.0)
        return _by_channel(keys, x_q, g, g_next, over_q, over_k, BLOCK_T, KEYS, HALF // 2)
    else:
        return over_q, over_k


@triton.jit
def _filled(x, WIDE: tl.constexpr):
    """x (rows, 8) with a column of zeros after each: tensor cores sum over 16 columns at least."""
    if x.shape[1] < 16:
        return tl.reshape(tl.join(x, tl.zeros(x.shape, WIDE)), (x.shape[0], 16))
    else:
        return x


@triton.jit
def answer(
    y_at, planes, plane_strides, row, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
    new, start_slot, count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    REAL_T: tl.constexpr, BLOCK_T: tl.constexpr, RECORDS: tl.constexpr, BLOCK_P: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The outputs of new tokens for BLOCK_P rows of a state, from the state and count live records; append them.

    HELD multiplies rows of a state in a format with the tokens' vectors; None: planes hold it in fp32 or fp64.
    """
    group = head // (H // G) * N
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, RECORDS)
    slot_t = start_slot + t
    slot_t = tl.where(slot_t >= SLOTS, slot_t - SLOTS, slot_t)
    slot = start_slot - 1 - r
    slot = tl.where(slot < 0, slot + SLOTS, slot)
    live = r < count
    later = tl.where(slot + 1 == SLOTS, 0, slot + 1)
    oldest = start_slot - count
    oldest = tl.where(oldest < 0, oldest + SLOTS, oldest)

    # Products over keys, some keys at a time: of q and k of the new tokens with the state, with records, and with k of
    # the new tokens.
    none = tl.zeros((BLOCK_T, BLOCK_T), WIDE)
    state_q, state_k = tl.zeros((BLOCK_P, BLOCK_T), WIDE), tl.zeros((BLOCK_P, BLOCK_T), WIDE)
    old_q, old_k = tl.zeros((RECORDS, BLOCK_T), WIDE), tl.zeros((RECORDS, BLOCK_T), WIDE)
    new_q, new_k, same_q = none, none, none
    for first_n in tl.range(0, N, KEYS, num_stages=STAGES):
        n = first_n + tl.arange(0, KEYS)
        real = (t[:, None] < new) & (n < N)
        if HELD is None:
            state_ptr = planes[0] + row * plane_strides[0] + head * P * N
            tile = load_piece(state_ptr, first_p, first_n, P, N, BLOCK_P, KEYS)
        x_q = tl.load(q_at + t[:, None] * q_token + group + n, mask=real, other=0.0)
        x_k = tl.load(k_at + t[:, None] * k_token + group + n, mask=real, other=0.0)
        old = tl.load(k_ptr + slot[:, None] * (G * N) + group + n, mask=live[:, None] & (n < N), other=0.0)
        if (first_p == 0) & (head % (H // G) == 0):  # these slots are none that a program of this launch may read
            tl.store(k_ptr + slot_t[:, None] * (G * N) + group + n, x_k, mask=real)
        same_q = times(x_k, tl.trans(x_q), same_q)
        if CHANNEL:
            new_g = g_at + t[:, None] * g_token + head * N + n
            g_t = tl.load(new_g, mask=real, other=0.0)
            g_next = tl.load(new_g + g_token, mask=(t[:, None] + 1 < new) & (n < N), other=0.0)
            g_r = tl.load(
                g_ptr + (later[:, None] * H + head) * N + n, mask=(live & (r > 0))[:, None] & (n < N), other=0.0
            )  # fmt: skip
            before = tl.load(g_ptr + (oldest * H + head) * N + n, mask=(count > 0) & (n < N), other=0.0)
            if first_p == 0:
                tl.store(g_ptr + (slot_t[:, None] * H + head) * N + n, g_t, mask=real)
            x_q, x_k = x_q.to(WIDE), x_k.to(WIDE)
            new_q, new_k = _by_channel(x_k, x_q, g_t, g_next, new_q, new_k, BLOCK_T, KEYS, REAL_T // 2)
            reached = tl.exp(tl.cumsum(g_t, axis=0))
            x_q, x_k = x_q * reached, x_k * reached
            old = old.to(WIDE) * tl.exp(tl.cumsum(g_r, axis=0))
        elif DELTA:
            new_k = times(x_k, tl.trans(x_k), new_k)
        old_q = times(old, tl.trans(x_q), old_q)
        if DELTA:
            old_k = times(old, tl.trans(x_k), old_k)
        if CHANNEL:
            remaining = tl.exp(tl.sum(g_r, axis=0) + before)
            x_q, x_k = x_q * remaining, x_k * remaining
        if HELD is not None:  # all keys at once
            if DELTA:
                x = tl.reshape(tl.permute(tl.join(x_q, x_k), (0, 2, 1)), (2 * BLOCK_T, KEYS))
                both = HELD(planes, plane_strides, row, head, first_p, x, P, N, BLOCK_P, KEYS)
                state_q, state_k = tl.split(tl.reshape(both, (BLOCK_P, BLOCK_T, 2)))
            else:
                state_q = HELD(planes, plane_strides, row, head, first_p, x_q, P, N, BLOCK_P, KEYS)
        else:
            if x_q.dtype != tl.bfloat16:
                x_q, x_k = x_q.to(WIDE), x_k.to(WIDE)
            state_q = times_state(tile, as_the_state(tl.trans(x_q), KEYS, BLOCK_T), state_q, KEYS, 16)
            if DELTA:
                state_k = times_state(tile, as_the_state(tl.trans(x_k), KEYS, BLOCK_T), state_k, KEYS, 16)

    # decays of a head, which are the same for all keys
    beta_t = tl.load(beta_at + t * beta_token + head, mask=t < new, other=0.0)
    if CHANNEL:
        new_q = tl.where(t[:, None] == t, same_q, new_q)
    else:
        g_t = tl.load(g_at + t * g_token + head, mask=t < new, other=0.0)
        g_r = tl.load(g_ptr + later * H + head, mask=live & (r > 0), other=0.0)
        before = tl.load(g_ptr + oldest * H + head, mask=count > 0, other=0.0)
        since = tl.exp(tl.cumsum(tl.where(t > t[:, None], g_t, 0.0), axis=1))  # sums of what lies between lose nothing
        reached = tl.exp(tl.cumsum(g_t, axis=0))
        weight = tl.exp(tl.cumsum(g_r, axis=0))[:, None]
        remaining = tl.exp(tl.sum(g_r, axis=0) + before)
        new_q = tl.where(t[:, None] <= t, same_q * since, 0.0)
        old_q *= weight * reached
        state_q *= remaining * reached
        if DELTA:
            new_k *= since
            old_k *= weight * reached
            state_k *= remaining * reached
    if first_p == 0:
        tl.store(beta_ptr + slot_t * H + head, beta_t, mask=t < new)
        if not CHANNEL:
            tl.store(g_ptr + slot_t * H + head, g_t, mask=t < new)

    # what these found, times what was written
    p = first_p + tl.arange(0, BLOCK_P)[:, None]
    mine = (t < new) & (p < P)
    value = tl.load(v_at + t * v_token + head * P + p, mask=mine, other=0.0)
    at_r = (slot * H + head) * P + p
    if DELTA:
        written = tl.load(u_ptr + at_r, mask=live & (p < P), other=0.0)
    else:
        written = tl.load(v_ptr + at_r, mask=live & (p < P), other=0.0)
        if written.dtype != tl.bfloat16:
            written = written.to(WIDE)
        old_q *= tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)[:, None]
    state_q = times(written, old_q, state_q)
    u = value.to(WIDE)
    if DELTA:
        u = _filled((u - times(written, old_k, state_k)) * beta_t, WIDE)
        solved = inverse(new_k, beta_t, new, BLOCK_T, WIDE)
        u = times(u, tl.trans(_filled(tl.trans(solved), WIDE)), tl.zeros((BLOCK_P, BLOCK_T), WIDE))
        tl.store(u_ptr + (slot_t * H + head) * P + p, u, mask=mine)
    else:
        u *= beta_t
    y = times(_filled(u, WIDE), tl.trans(_filled(tl.trans(new_q), WIDE)), state_q)
    tl.store(y_at + t * (H * P) + head * P + p, y, mask=mine)
    tl.store(v_ptr + (slot_t * H + head) * P + p, value, mask=mine)
