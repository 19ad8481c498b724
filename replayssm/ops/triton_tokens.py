"""A step of several tokens in one launch: flush, append, and the outputs of all of them from one read of the state.

The products with the state and with the records are matrix products on tensor cores, and lose nothing that fp32 holds:
a float is three pieces of 8 bits, and the products of pieces are exact. (TF32 would round; in fp64 products are IEEE.)
"""

import triton
import triton.language as tl

from replayssm.ops.triton_fold import fold, nth_to_flush

# Axes: T new tokens, R records, H value heads, G key groups, P headdim, N d_state; i, s and t are indices of new tokens,
# p of rows of a state. A name ending in _ptr points at the row of the cache that the program works on, one ending in
# _new at the first new token of the row of the call.
#
# A thread loads 4 neighbouring keys of a state, 4 threads to 16 keys. As an operand of a product it must hold pairs: keys
# 2c, 2c + 1 and 2c + 8, 2c + 9 for thread c of 4. A sum over keys does not care which is which, so its 4 keys are called
# by these numbers (``_load_piece``), and the keys of the other operand too (``_as_the_state``): nothing moves.


@triton.jit
def _pieces(x):
    """x fp32 as the sum of three bf16, by cutting its digits."""
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    bits = (x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)
    middle = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    bits = (bits.to(tl.float32, bitcast=True) - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)
    return high, middle, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _times(a, b):
    """a (m, k) @ b (k, n), as exact as fp32 is, or fp64; one or both may be bf16, or both fp16, where that is fp32."""
    if a.dtype == tl.float64 or (a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16):
        return tl.dot(a, b, input_precision="ieee")
    elif b.dtype == tl.bfloat16:  # smallest first
        a1, a2, a3 = _pieces(a)
        found = tl.dot(a3, b, input_precision="ieee")
        found = tl.dot(a2, b, found, input_precision="ieee")
        return tl.dot(a1, b, found, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        b1, b2, b3 = _pieces(b)
        found = tl.dot(a, b3, input_precision="ieee")
        found = tl.dot(a, b2, found, input_precision="ieee")
        return tl.dot(a, b1, found, input_precision="ieee")
    else:  # what is left out is below 2^-24 of the product
        a1, a2, a3 = _pieces(a)
        b1, b2, b3 = _pieces(b)
        found = tl.dot(a3, b1, input_precision="ieee")
        found = tl.dot(a1, b3, found, input_precision="ieee")
        found = tl.dot(a2, b2, found, input_precision="ieee")
        found = tl.dot(a2, b1, found, input_precision="ieee")
        found = tl.dot(a1, b2, found, input_precision="ieee")
        return tl.dot(a1, b1, found, input_precision="ieee")


@triton.jit
def _since(g, i, t):
    """(i, t): the log decay after token i up to token t, from g (t,); sums of what lies between lose nothing."""
    return tl.cumsum(tl.where(t > i[:, None], g, 0.0), axis=1)


@triton.jit
def _by_channel(
    keys, q_new, k_new, g_new, q_token, k_token, g_token, new, group, head,
    T: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Key products of new tokens i with q and k of tokens t, decayed by channel: (i, t) each."""
    n = tl.arange(0, BLOCK_N)
    i = tl.arange(0, TOKENS)
    t = tl.arange(0, BLOCK_T)
    over_q = tl.zeros((TOKENS, BLOCK_T), WIDE)
    over_k = tl.zeros((TOKENS, TOKENS), WIDE)
    since = tl.zeros((TOKENS, BLOCK_N), WIDE)  # log decay after each of them, up to the token at hand
    for s in tl.static_range(T):
        real = (n < N) & (s < new)
        q = tl.load(q_new + s * q_token + group + n, mask=real, other=0.0).to(WIDE)
        k = tl.load(k_new + s * k_token + group + n, mask=real, other=0.0).to(WIDE)
        g = tl.load(g_new + s * g_token + head * N + n, mask=real, other=0.0)
        since = tl.where((i < s)[:, None], since + g, 0.0)
        decayed = keys * tl.exp(since)
        over_q = tl.where(t == s, tl.sum(decayed * q, axis=1)[:, None], over_q)
        over_k = tl.where(i == s, tl.sum(decayed * k, axis=1)[:, None], over_k)
    return over_q, over_k


@triton.jit
def _solved(over_k, beta, new, TOKENS: tl.constexpr, WIDE: tl.constexpr):
    """(s, i) such that writes = corrected values (p, s) @ it: the transposed inverse of a unit lower triangular matrix.

    over_k (i, s) are the key products of token i with the key of a later token s, beta (s,).
    """
    s = tl.arange(0, TOKENS)
    by_row = tl.trans(over_k * beta)  # (s, i): what token s takes back of the write of token i
    solved = tl.zeros((TOKENS, TOKENS), WIDE) + tl.where(s[:, None] == s, 1.0, 0.0)
    for i in range(1, new):
        taken = tl.sum(tl.where(s[:, None] == i, by_row, 0.0), axis=0)
        solved -= tl.where(s == i, tl.sum(solved * taken, axis=1)[:, None], 0.0)
    return solved


@triton.jit
def _among_records(
    x_q, x_k, k_ptr, g_ptr, start_slot, count, head,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Key products of the live records, newest first, with x_q (n, t) and x_k (n, i), decayed up to the step; and
    the log decay since the checkpoint."""
    n = tl.arange(0, BLOCK_N)
    block = tl.arange(0, BLOCKS)[:, None, None]
    over_q = tl.zeros((BLOCKS, BLOCK_R, BLOCK_T), WIDE)
    over_k = tl.zeros((BLOCKS, BLOCK_R, TOKENS), WIDE)
    oldest = start_slot - count
    oldest = tl.where(oldest < 0, oldest + SLOTS, oldest)
    if CHANNEL:
        elapsed = tl.zeros((BLOCK_N,), WIDE)
        before = tl.load(g_ptr + (oldest * H + head) * N + n, mask=(count > 0) & (n < N), other=0.0)
    else:
        elapsed = tl.full((), 0.0, WIDE)
        before = tl.load(g_ptr + oldest * H + head, mask=count > 0, other=0.0)
    for i in tl.range(0, (count + BLOCK_R - 1) // BLOCK_R, num_stages=1 if CHANNEL else 2):
        age = i * BLOCK_R + tl.arange(0, BLOCK_R)
        live = age < count
        slot = start_slot - 1 - age
        slot = tl.where(slot < 0, slot + SLOTS, slot)
        later = tl.where(slot + 1 == SLOTS, 0, slot + 1)
        has_later = (age > 0) & live
        keys = tl.load(
            k_ptr + (slot[:, None] * G + head // (H // G)) * N + n, mask=live[:, None] & (n < N), other=0.0
        )  # fmt: skip
        if CHANNEL:
            at_n = (later[:, None] * H + head) * N + n
            g = tl.load(g_ptr + at_n, mask=has_later[:, None] & (n < N), other=0.0)
            decayed = keys.to(WIDE) * tl.exp(elapsed + tl.cumsum(g, axis=0))
            found_q = _times(decayed, x_q)
            if DELTA:
                found_k = _times(decayed, x_k)
        else:
            g = tl.load(g_ptr + later * H + head, mask=has_later, other=0.0)
            weight = tl.exp(elapsed + tl.cumsum(g, axis=0))[:, None]
            found_q = _times(keys, x_q) * weight
            if DELTA:
                found_k = _times(keys, x_k) * weight
        elapsed += tl.sum(g, axis=0)
        over_q = tl.where(block == i, found_q[None], over_q)
        if DELTA:
            over_k = tl.where(block == i, found_k[None], over_k)
    over_q = tl.reshape(over_q, (BLOCKS * BLOCK_R, BLOCK_T))
    over_k = tl.reshape(over_k, (BLOCKS * BLOCK_R, TOKENS))
    return over_q, over_k, elapsed + before


@triton.jit
def _load_piece(
    state_ptr, first_p, P: tl.constexpr, N: tl.constexpr, PIECE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(PIECE, BLOCK_N) of a state from row first_p on; keys in the order of ``_as_the_state``."""
    block = tl.arange(0, BLOCK_N // 16)[:, None, None]
    p = first_p + tl.arange(0, PIECE)[None, :, None]
    n = block * 16 + tl.arange(0, 16)[None, None, :]
    if P % PIECE == 0 and N == BLOCK_N:
        rows = tl.load(state_ptr + p * N + n)
    else:
        rows = tl.load(state_ptr + p * N + n, mask=(p < P) & (n < N), other=0.0)
    rows = tl.permute(tl.reshape(rows, (BLOCK_N // 16, PIECE, 4, 2, 2)), (1, 0, 3, 2, 4))
    return tl.reshape(rows, (PIECE, BLOCK_N))


@triton.jit
def _as_the_state(x, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr):
    """x (n, tokens) with keys in the order of ``_load_piece``."""
    x = tl.permute(tl.reshape(x, (BLOCK_N // 16, 4, 2, 2, TOKENS)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (BLOCK_N, TOKENS))


@triton.jit
def _held(tile, x, found, KEYS: tl.constexpr):
    """found + tile (rows, KEYS) @ x (KEYS, tokens), 32 keys at a time: few registers hold pieces of floats then."""
    if KEYS > 32:
        HALF: tl.constexpr = KEYS // 2
        low, high = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1)))
        x_low, x_high = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
        return _held(high, x_high, _held(low, x_low, found, HALF), HALF)
    else:
        return found + _times(tile, x)


@triton.jit
def _answer(
    y_at, state_ptr, q_at, k_at, v_at, g_at, beta_at, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
    new, start_slot, count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr, PIECE: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The outputs of new tokens for BLOCK_P rows of a state, from the state and count live records; append them."""
    group = head // (H // G) * N
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, TOKENS)
    slot_i = start_slot + i
    slot_i = tl.where(slot_i >= SLOTS, slot_i - SLOTS, slot_i)

    # what the new tokens find of each other
    real_t = (t[:, None] < new) & (n < N)
    real = (i[:, None] < new) & (n < N)
    x_q = tl.trans(tl.load(q_at + t[:, None] * q_token + group + n, mask=real_t, other=0.0))
    keys = tl.load(k_at + i[:, None] * k_token + group + n, mask=real, other=0.0)
    x_k = tl.trans(keys)
    writes_beta = tl.load(beta_at + i * beta_token + head, mask=i < new, other=0.0)
    if CHANNEL:
        decay = tl.load(g_at + i[:, None] * g_token + head * N + n, mask=real, other=0.0)
        new_q, new_k = _by_channel(
            keys.to(WIDE), q_at, k_at, g_at, q_token, k_token, g_token, new, group, head,
            T, N, BLOCK_T, BLOCK_N, TOKENS, WIDE,
        )  # fmt: skip
        decay_t = tl.load(g_at + t[:, None] * g_token + head * N + n, mask=real_t, other=0.0)
        x_q = x_q.to(WIDE) * tl.trans(tl.exp(tl.cumsum(decay_t, axis=0)))
        x_k = x_k.to(WIDE) * tl.trans(tl.exp(tl.cumsum(decay, axis=0)))
    else:
        decay = tl.load(g_at + i * g_token + head, mask=i < new, other=0.0)
        decay_t = tl.load(g_at + t * g_token + head, mask=t < new, other=0.0)
        new_q = _times(keys, x_q) * tl.exp(_since(decay_t, i, t))
        new_k = _times(keys, x_k) * tl.exp(_since(decay, i, i))
        reached_q = tl.exp(tl.cumsum(decay_t, axis=0))
        reached_k = tl.exp(tl.cumsum(decay, axis=0))
    new_q = tl.where(i[:, None] <= t, new_q, 0.0)
    if DELTA:
        solved = _solved(tl.where(i[:, None] < i, new_k, 0.0), writes_beta, new, TOKENS, WIDE)
        new_q = _times(solved, new_q)
    if first_p == 0:  # these slots are none that a program of this launch may read
        tl.store(beta_ptr + slot_i * H + head, writes_beta, mask=i < new)
        if CHANNEL:
            tl.store(g_ptr + (slot_i[:, None] * H + head) * N + n, decay, mask=real)
        else:
            tl.store(g_ptr + slot_i * H + head, decay, mask=i < new)
        if head % (H // G) == 0:
            tl.store(k_ptr + slot_i[:, None] * (G * N) + group + n, keys, mask=real)

    # and of the records
    old_q, old_k, elapsed = _among_records(
        x_q, x_k, k_ptr, g_ptr, start_slot, count, head,
        H, G, N, SLOTS, BLOCK_T, TOKENS, BLOCK_R, BLOCKS, BLOCK_N, CHANNEL, DELTA, WIDE,
    )  # fmt: skip
    remaining = tl.exp(tl.where(count > 0, elapsed, 0.0))
    if CHANNEL:
        x_q, x_k = x_q * remaining[:, None], x_k * remaining[:, None]
    elif x_q.dtype != tl.bfloat16:
        x_q, x_k = x_q.to(WIDE), x_k.to(WIDE)
    x_q, x_k = _as_the_state(x_q, BLOCK_N, BLOCK_T), _as_the_state(x_k, BLOCK_N, TOKENS)
    age = tl.arange(0, BLOCKS * BLOCK_R)
    slot = start_slot - 1 - age
    slot = tl.where(slot < 0, slot + SLOTS, slot)
    if not DELTA:
        written = tl.load(beta_ptr + slot * H + head, mask=age < count, other=0.0)
        old_q *= written[:, None]

    for piece in range(BLOCK_P // PIECE):
        begin = first_p + piece * PIECE
        p = begin + tl.arange(0, PIECE)[:, None]
        mine = (i < new) & (p < P)
        value = tl.load(v_at + i * v_token + head * P + p, mask=mine, other=0.0)
        live = (age < count) & (p < P)
        if DELTA:
            old = tl.load(u_ptr + (slot * H + head) * P + p, mask=live, other=0.0)
        else:
            old = tl.load(v_ptr + (slot * H + head) * P + p, mask=live, other=0.0)
            if old.dtype != tl.bfloat16:
                old = old.to(WIDE)
        tile = _load_piece(state_ptr, begin, P, N, PIECE, BLOCK_N)
        for_q = _held(tile, x_q, tl.zeros((PIECE, BLOCK_T), WIDE), BLOCK_N)
        if CHANNEL:
            for_q += _times(old, old_q)
        else:
            for_q = (for_q * remaining + _times(old, old_q)) * reached_q
        corrected = value.to(WIDE)
        if DELTA:
            for_k = _held(tile, x_k, tl.zeros((PIECE, TOKENS), WIDE), BLOCK_N)
            if CHANNEL:
                corrected -= for_k + _times(old, old_k)
            else:
                corrected -= (for_k * remaining + _times(old, old_k)) * reached_k
        corrected *= writes_beta
        for_q += _times(corrected, new_q)
        tl.store(y_at + t * (H * P) + head * P + p, for_q, mask=(t < new) & (p < P))
        tl.store(v_ptr + (slot_i * H + head) * P + p, value, mask=mine)
        if DELTA:
            tl.store(u_ptr + (slot_i * H + head) * P + p, _times(corrected, solved), mask=mine)


@triton.jit
def tokens_kernel(
    y, state, q_new, k_new, v_new, g_new, beta_new, k, v, g, beta, u, rows, length, flushing, seqlen, flushed,
    batch, flushers, q_token, k_token, v_token, g_token, beta_token,
    state_stride, k_stride, v_stride, g_stride, beta_stride, u_stride,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr, PIECE: tl.constexpr, FOLD_P: tl.constexpr, FEW: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The first flushers programs share the rows of the call that flush, BLOCK_P rows of the state of a head at a time;
    # they start first, because they take longest. Every other program has BLOCK_P rows of its own, and reads; it has
    # nothing to do if its row flushes.
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    folds = tl.program_id(0) < flushers
    item = tl.program_id(0)
    sharers = 0
    if folds:
        called, count = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
        # few at a time leave the others room to read, unless there is much to fold
        sharers = tl.minimum(flushers, tl.maximum(FEW, count * (H * TILES) // 2))
        called = tl.where(item < sharers, called, -1)
    else:
        item -= flushers
        called = item // (H * TILES)
        row = called
        if rows is not None:
            row = tl.load(rows + called).to(tl.int32)
        due = tl.load(flushing + row, mask=row >= 0, other=1)
        called = tl.where(due == 0, called, -1)
    while called >= 0:
        at = called.to(tl.int64)
        row = at
        if rows is not None:
            row = tl.load(rows + at).to(tl.int64)
        new = T
        if length is not None:
            new = tl.load(length + at).to(tl.int32)
        head = item // TILES % H
        first_p = item % TILES * BLOCK_P
        first, start = tl.load(flushed + row), tl.load(seqlen + row)
        count = (start - first).to(tl.int32)  # records that the outputs are read from
        state_ptr = state + row * state_stride + head * P * N
        k_ptr, v_ptr, g_ptr = k + row * k_stride, v + row * v_stride, g + row * g_stride
        beta_ptr, u_ptr = beta + row * beta_stride, u + row * u_stride
        if folds:
            for p in range(first_p, first_p + BLOCK_P, FOLD_P):
                fold(
                    state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, start, head, p,
                    H, G, P, N, SLOTS, FOLD_P, ABREAST, BLOCK_N, LANES, CHANNEL, DELTA, WIDE,
                )  # fmt: skip
            count = 0
            tl.debug_barrier()  # other threads of this program read what was stored
        if new > 0:
            _answer(
                y + at * T * (H * P), state_ptr, q_new + at * T * q_token, k_new + at * T * k_token,
                v_new + at * T * v_token, g_new + at * T * g_token, beta_new + at * T * beta_token,
                k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr,
                new, (start % SLOTS).to(tl.int32), count, head, first_p, q_token, k_token, v_token, g_token, beta_token,
                T, H, G, P, N, SLOTS, BLOCK_T, BLOCK_R, BLOCKS, TOKENS, BLOCK_P, PIECE, BLOCK_N, CHANNEL, DELTA, WIDE,
            )  # fmt: skip
        called = -1
        if folds:
            item += sharers
            called, _ = nth_to_flush(item // (H * TILES), flushing, rows, batch, BLOCK_B)
