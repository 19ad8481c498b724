"""The flush: records folded into the state, sixteen at a time, as matrix products."""

import triton
import triton.language as tl

# Axes: H value heads, G key groups, P headdim, N d_state, R records; s and i are two indices of records.
# A name ending in _ptr points at the row of the cache that the program works on, state_ptr at the head of it.
R = tl.constexpr(16)  # the least that a matrix product takes


@triton.jit
def _load_keys(pointer, slot, live, n, G: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr):
    """(R, n): keys of the records in these slots, zeros where they are not live."""
    return tl.load(pointer + slot[:, None] * (G * N) + n, mask=live[:, None] & (n < N), other=0.0).to(WIDE)


@triton.jit
def _overlaps(
    key_ptr, g_ptr, g, beta, slot, live, head,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, FOLD_N: tl.constexpr,
    CHANNEL: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A (s, i) = beta_s <k_i e^(G_s - G_i), k_s> for i < s, else 0."""
    i = tl.arange(0, R)
    earlier = i[:, None] > i[None, :]
    over = tl.zeros((R, R), WIDE)
    for first_n in range(0, N, FOLD_N):
        n = first_n + tl.arange(0, FOLD_N)
        keys = _load_keys(key_ptr, slot, live, n, G, N, WIDE)
        if CHANNEL:
            since = tl.zeros((R, FOLD_N), WIDE)  # log decay after each record, up to record s
            for s in range(1, R):
                slot_s = tl.sum(tl.where(i == s, slot, 0), axis=0)
                real = (n < N) & (tl.sum(tl.where(i == s, live.to(tl.int32), 0), axis=0) != 0)
                k_s = tl.load(key_ptr + slot_s * (G * N) + n, mask=real, other=0.0).to(WIDE)
                g_s = tl.load(g_ptr + (slot_s * H + head) * N + n, mask=real, other=0.0)
                since = tl.where((i < s)[:, None], since + g_s, 0.0)
                row = tl.sum(keys * tl.exp(since) * k_s, axis=1)
                over += tl.where(i[:, None] == s, row[None, :], 0.0)
        else:
            over = tl.dot(keys, tl.trans(keys), acc=over, input_precision=PRECISION, out_dtype=WIDE)
    if not CHANNEL:
        over *= tl.exp(tl.cumsum(tl.where(earlier, g[:, None], 0.0), axis=0))
    return tl.where(earlier, over, 0.0) * beta[:, None]


@triton.jit
def fold(
    state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, last, head, first_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_P: tl.constexpr, FOLD_P: tl.constexpr, FOLD_N: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the records of tokens first .. last - 1 into rows first_p .. first_p + BLOCK_P - 1 of the state, in place.

    The state is walked FOLD_P rows and FOLD_N keys at a time, so that few registers are needed: once to solve for the
    writes (delta rules), once to add them. docs/math.md, section 2: U = B (I + A)^-T with B = beta (V - S_c K).
    """
    i = tl.arange(0, R)
    key_ptr = k_ptr + head // (H // G) * N
    for block in range(first, last, R):
        token = block + i
        live = token < last
        slot = (token % SLOTS).to(tl.int32)
        later = ((token + 1) % SLOTS).to(tl.int32)
        has_later = (token + 1 < last) & (i < R - 1)
        beta = tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)
        g = beta
        if not CHANNEL:
            g = tl.load(g_ptr + slot * H + head, mask=live, other=0.0)
            g_later = tl.load(g_ptr + later * H + head, mask=has_later, other=0.0)
            through = tl.exp(tl.cumsum(g, axis=0))
            after = tl.exp(tl.cumsum(g_later, axis=0, reverse=True))
            whole = tl.exp(tl.sum(g, axis=0))
        if DELTA:
            over = _overlaps(
                key_ptr, g_ptr, g, beta, slot, live, head, H, G, N, FOLD_N, CHANNEL, WIDE, PRECISION
            )  # fmt: skip
        for piece in range(0, BLOCK_P, FOLD_P):
            p = first_p + piece + tl.arange(0, FOLD_P)
            u = tl.load(
                v_ptr + (slot[None, :] * H + head) * P + p[:, None], mask=live[None, :] & (p[:, None] < P), other=0.0
            ).to(WIDE)  # fmt: skip
            if DELTA:
                held = tl.zeros((FOLD_P, R), WIDE)
                for first_n in range(0, N, FOLD_N):
                    n = first_n + tl.arange(0, FOLD_N)
                    keys = _load_keys(key_ptr, slot, live, n, G, N, WIDE)
                    if CHANNEL:
                        at = g_ptr + (slot[:, None] * H + head) * N + n
                        keys *= tl.exp(tl.cumsum(tl.load(at, mask=live[:, None] & (n < N), other=0.0), axis=0))
                    tile = tl.load(state_ptr + p[:, None] * N + n, mask=(p[:, None] < P) & (n < N), other=0.0)
                    held = tl.dot(tile, tl.trans(keys), acc=held, input_precision=PRECISION, out_dtype=WIDE)
                u -= held if CHANNEL else held * through[None, :]
            u *= beta[None, :]
            if DELTA:
                for s in range(1, R):
                    row = tl.sum(tl.where(i[:, None] == s, over, 0.0), axis=0)
                    u -= tl.where(i[None, :] == s, tl.sum(u * row[None, :], axis=1)[:, None], 0.0)
            if not CHANNEL:
                u *= after[None, :]
            for first_n in range(0, N, FOLD_N):
                n = first_n + tl.arange(0, FOLD_N)
                inside = (p[:, None] < P) & (n < N)
                keys = _load_keys(key_ptr, slot, live, n, G, N, WIDE)
                tile = tl.load(state_ptr + p[:, None] * N + n, mask=inside, other=0.0)
                if CHANNEL:
                    at = g_ptr + (slot[:, None] * H + head) * N + n
                    at_later = g_ptr + (later[:, None] * H + head) * N + n
                    tile *= tl.exp(tl.sum(tl.load(at, mask=live[:, None] & (n < N), other=0.0), axis=0))[None, :]
                    g_later = tl.load(at_later, mask=has_later[:, None] & (n < N), other=0.0)
                    keys *= tl.exp(tl.cumsum(g_later, axis=0, reverse=True))
                else:
                    tile *= whole
                tile = tl.dot(u, keys, acc=tile, input_precision=PRECISION, out_dtype=WIDE)
                tl.store(state_ptr + p[:, None] * N + n, tile, mask=inside)
        tl.debug_barrier()  # other threads of this program read what was stored
