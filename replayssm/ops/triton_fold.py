"""The flush: the recurrence over committed records, on a piece of the state that stays in registers."""

import triton
import triton.language as tl

# Axes: H value heads, G key groups, P headdim, N d_state. A tile of the state is (ABREAST, deep, outer, LANES): row p =
# deep * ABREAST + abreast, key n = outer * LANES + lane. The threads of a warp lie along abreast and lanes, eight to a
# row, so that a sum over keys stays mostly in one thread. Keys are loaded once for every row abreast, hence in the
# layout of the tile: nothing is moved between threads to multiply them. With a decay per channel, which takes
# exponentials, or with several warps they are loaded once for the program instead, and moved to that layout after it.
# A name ending in _ptr points at the row of the cache that the program works on, state_ptr at the head of it.


@triton.jit
def tile_keys(ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """(ABREAST, 1, outer, LANES): n, the same for every row."""
    n = (tl.arange(0, BLOCK_N // LANES) * LANES)[None, None, :, None] + tl.arange(0, LANES)[None, None, None, :]
    return tl.broadcast_to(n, (ABREAST, 1, BLOCK_N // LANES, LANES))


@triton.jit
def four_a_thread(pointer, natural):
    """The pointer itself, known to be aligned to 4 elements only.

    Of 16-bit keys a thread would else load eight, which is another layout than that of the state's tiles, and every
    product of the two would first move a tile between threads. natural is never negative; the compiler cannot know.
    """
    return pointer + tl.minimum(natural, 0) * 4


@triton.jit
def tile_rows(first, ROWS: tl.constexpr, ABREAST: tl.constexpr):
    """(ABREAST, deep): p of ROWS rows from first on."""
    return first + tl.arange(0, ROWS // ABREAST)[None, :] * ABREAST + tl.arange(0, ABREAST)[:, None]


@triton.jit
def within(also, index, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """A mask: also, and the index in range, which is left out where the sizes are such (WHOLE) that it always is."""
    if WHOLE:
        return also
    else:
        return also & (index < SIZE)


@triton.jit
def load_tile(state_ptr, p, n, P: tl.constexpr, N: tl.constexpr, WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr):
    """(ABREAST, deep, outer, LANES)"""
    pointer = state_ptr + p[:, :, None, None] * N + n
    if WHOLE_P and WHOLE_N:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=(p[:, :, None, None] < P) & (n < N), other=0.0)


@triton.jit
def load_rows(state_ptr, p, n, P: tl.constexpr, N: tl.constexpr):
    """A tile whose first row is a multiple of its rows."""
    ROWS: tl.constexpr = p.shape[0] * p.shape[1]
    return load_tile(state_ptr, p, n, P, N, (ROWS + P - 1) // ROWS * ROWS == P, n.shape[2] * n.shape[3] == N)


@triton.jit
def over_keys(x):
    """Sum (ABREAST, deep, outer, LANES) -> (ABREAST, deep)."""
    return tl.sum(tl.sum(x, axis=2), axis=2)


@triton.jit
def as_keys(x, OUTER: tl.constexpr, LANES: tl.constexpr):
    """(BLOCK_N,) -> (1, 1, outer, LANES)"""
    return tl.reshape(x[None, None, :], (1, 1, OUTER, LANES))


@triton.jit
def nth_to_flush(wanted, flushing, rows, batch, BLOCK_B: tl.constexpr):
    """The row of the call that is the wanted-th, from 0, of those to flush (-1 if there is none), and their number."""
    found = -1
    count = 0
    for first in range(0, batch, BLOCK_B):
        called = first + tl.arange(0, BLOCK_B)
        row = called
        if rows is not None:
            row = tl.load(rows + called, mask=called < batch, other=-1)
        due = tl.load(flushing + row, mask=(called < batch) & (row >= 0), other=0).to(tl.int32)
        place = count + tl.cumsum(due, axis=0) - 1
        found += tl.sum(tl.where((place == wanted) & (due != 0), called + 1, 0), axis=0)
        count += tl.sum(due, axis=0)
    return found, count


@triton.jit
def _record(
    k_ptr, v_ptr, g_ptr, beta_ptr, slot, real, head, n, p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CHANNEL: tl.constexpr, WHOLE_P: tl.constexpr, WHOLE_N: tl.constexpr,
):  # fmt: skip
    """k, v, g and beta as they stand in a slot; if it is not real zeros, which change nothing."""
    k = tl.load(k_ptr + (slot * G + head // (H // G)) * N + n, mask=within(real, n, N, WHOLE_N), other=0.0)
    v = tl.load(v_ptr + (slot * H + head) * P + p, mask=within(real, p, P, WHOLE_P), other=0.0)
    if CHANNEL:
        g = tl.load(g_ptr + (slot * H + head) * N + n, mask=within(real, n, N, WHOLE_N), other=0.0)
    else:
        g = tl.load(g_ptr + slot * H + head, mask=real, other=0.0)
    return k, v, g, tl.load(beta_ptr + slot * H + head, mask=real, other=0.0)


@triton.jit
def _apply_two(
    tile, k0, v0, g0, beta0, k1, v1, g1, beta1,
    OUTER: tl.constexpr, LANES: tl.constexpr, ONCE: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The state after two more tokens; what it holds for both keys is summed at once. With ONCE keys are (n,)."""
    k0, v0, k1, v1 = k0.to(WIDE), v0.to(WIDE), k1.to(WIDE), v1.to(WIDE)
    first, second = tl.exp(g0), tl.exp(g1)
    both = first * second
    if CHANNEL:
        found0, found1 = as_keys(k0 * first, OUTER, LANES), as_keys(k1 * both, OUTER, LANES)
        k0, k1, both = as_keys(k0 * second, OUTER, LANES), as_keys(k1, OUTER, LANES), as_keys(both, OUTER, LANES)
    elif ONCE:
        k0, k1 = as_keys(k0, OUTER, LANES), as_keys(k1, OUTER, LANES)
    if DELTA:
        if CHANNEL:
            held0, held1, overlap = over_keys(tile * found0), over_keys(tile * found1), over_keys(k0 * k1)
        else:
            held0, held1 = over_keys(tile * k0) * first, over_keys(tile * k1) * both
            overlap = over_keys(k0 * k1) * second
        u0 = beta0 * (v0 - held0)
        u1 = beta1 * (v1 - held1 - overlap * u0)
    else:
        u0, u1 = beta0 * v0, beta1 * v1
    if not CHANNEL:
        u0 *= second
    return tile * both + u0[:, :, None, None] * k0 + u1[:, :, None, None] * k1


@triton.jit
def folded(
    planes, k_ptr, v_ptr, g_ptr, beta_ptr, first, last, head, first_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    FOLD_P: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, LOAD: tl.constexpr,
    ONCE: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """FOLD_P rows of the state, which LOAD gets from its planes, after the records of tokens first .. last - 1.

    With ONCE keys are loaded once for the program; a decay by channel and several warps want that.
    """
    WHOLE_P: tl.constexpr = P % FOLD_P == 0
    WHOLE_N: tl.constexpr = N == BLOCK_N
    n_tile = tile_keys(ABREAST, BLOCK_N, LANES)
    if ONCE:
        n = tl.arange(0, BLOCK_N)
    else:
        n = n_tile
    p = tile_rows(first_p, FOLD_P, ABREAST)
    count = (last - first).to(tl.int32)
    k_ptr = four_a_thread(k_ptr, count)
    slot0 = (first % SLOTS).to(tl.int32)
    slot1 = tl.where(slot0 + 1 >= SLOTS, 0, slot0 + 1)
    k0, v0, g0, beta0 = _record(
        k_ptr, v_ptr, g_ptr, beta_ptr, slot0, count > 0, head, n, p, H, G, P, N, CHANNEL, WHOLE_P, WHOLE_N
    )  # fmt: skip
    k1, v1, g1, beta1 = _record(
        k_ptr, v_ptr, g_ptr, beta_ptr, slot1, count > 1, head, n, p, H, G, P, N, CHANNEL, WHOLE_P, WHOLE_N
    )  # fmt: skip
    tile = LOAD(planes, p, n_tile, P, N).to(WIDE)
    while count > 0:
        # two records are on their way while two are applied
        slot0 = tl.where(slot1 + 1 >= SLOTS, 0, slot1 + 1)
        slot1 = tl.where(slot0 + 1 >= SLOTS, 0, slot0 + 1)
        k2, v2, g2, beta2 = _record(
            k_ptr, v_ptr, g_ptr, beta_ptr, slot0, count > 2, head, n, p, H, G, P, N, CHANNEL, WHOLE_P, WHOLE_N
        )  # fmt: skip
        k3, v3, g3, beta3 = _record(
            k_ptr, v_ptr, g_ptr, beta_ptr, slot1, count > 3, head, n, p, H, G, P, N, CHANNEL, WHOLE_P, WHOLE_N
        )  # fmt: skip
        tile = _apply_two(
            tile, k0, v0, g0, beta0, k1, v1, g1, beta1, BLOCK_N // LANES, LANES, ONCE, CHANNEL, DELTA, WIDE
        )
        k0, v0, g0, beta0, k1, v1, g1, beta1 = k2, v2, g2, beta2, k3, v3, g3, beta3
        count -= 2
    return tile


@triton.jit
def fold(
    state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, last, head, first_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    FOLD_P: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fold the records of tokens first .. last - 1 into FOLD_P rows of the state, in place; returns the rows."""
    tile = folded(
        state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, last, head, first_p,
        H, G, P, N, SLOTS, FOLD_P, ABREAST, BLOCK_N, LANES, load_rows, CHANNEL, CHANNEL, DELTA, WIDE,
    )  # fmt: skip
    p, n = tile_rows(first_p, FOLD_P, ABREAST), tile_keys(ABREAST, BLOCK_N, LANES)
    pointer = state_ptr + p[:, :, None, None] * N + n
    if P % FOLD_P == 0 and N == BLOCK_N:
        tl.store(pointer, tile)
    else:
        tl.store(pointer, tile, mask=(p[:, :, None, None] < P) & (n < N))
    return tile
