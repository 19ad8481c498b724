"""Matrix products on tensor cores that lose nothing which fp32 holds, and pieces of a state as an operand of them.

A float is three pieces of 8 bits, and the products of pieces are exact. (TF32 would round; in fp64 products are IEEE.)

A thread loads 4 neighbouring keys of a state, 4 threads to 16 keys. As an operand of a product it must hold pairs: keys
2c, 2c + 1 and 2c + 8, 2c + 9 for thread c of 4. A sum over keys does not care which is which, so its 4 keys are called
by these numbers (``load_piece``), and the keys of the other operand too (``as_the_state``): nothing moves between
threads.
"""

import triton
import triton.language as tl

# Axes: P headdim, N d_state; p and n are indices of rows and keys of a state.


@triton.jit
def _pieces(x):
    """x fp32 as the sum of three bf16, by cutting its digits."""
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    middle = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    return high, middle, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def times(a, b, found):
    """found + a (m, k) @ b (k, n), as exact as fp32 or fp64; where found is fp32, a or b may be bf16, or both fp16."""
    if a.dtype == tl.float64 or (a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16):
        return tl.dot(a, b, found, input_precision="ieee", out_dtype=found.dtype)
    elif b.dtype == tl.bfloat16:  # smallest first
        a1, a2, a3 = _pieces(a)
        found = tl.dot(a3, b, found, input_precision="ieee")
        found = tl.dot(a2, b, found, input_precision="ieee")
        return tl.dot(a1, b, found, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        b1, b2, b3 = _pieces(b)
        found = tl.dot(a, b3, found, input_precision="ieee")
        found = tl.dot(a, b2, found, input_precision="ieee")
        return tl.dot(a, b1, found, input_precision="ieee")
    else:  # what is left out is below 2^-24 of the product
        a1, a2, a3 = _pieces(a)
        b1, b2, b3 = _pieces(b)
        found = tl.dot(a3, b1, found, input_precision="ieee")
        found = tl.dot(a1, b3, found, input_precision="ieee")
        found = tl.dot(a2, b2, found, input_precision="ieee")
        found = tl.dot(a2, b1, found, input_precision="ieee")
        found = tl.dot(a1, b2, found, input_precision="ieee")
        return tl.dot(a1, b1, found, input_precision="ieee")


@triton.jit
def times_state(tile, x, found, KEYS: tl.constexpr, ATONCE: tl.constexpr):
    """found + tile (p, KEYS) @ x (KEYS, columns), some keys at a time: few registers hold pieces of floats then."""
    if KEYS > ATONCE:
        HALF: tl.constexpr = KEYS // 2
        low, high = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1)))
        x_low, x_high = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
        found = times_state(low, x_low, found, HALF, ATONCE)
        return times_state(high, x_high, found, HALF, ATONCE)
    elif x.dtype == tl.bfloat16:
        return times(tile, x, found)
    else:  # six products each; tensor cores cut off what does not fit beside the sum so far, plain cores round
        return found + times(tile, x, tl.zeros(found.shape, found.dtype))


@triton.jit
def state_pointers(
    state_ptr, first_p, first_n, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """(KEYS / 16, ROWS, 16): where rows of a state from first_p on lie, keys from first_n on."""
    p = first_p + tl.arange(0, ROWS)[None, :, None]
    n = first_n + tl.arange(0, KEYS // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    return state_ptr + p * N + n, p, n


@triton.jit
def load_piece(
    state_ptr, first_p, first_n, P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """(ROWS, KEYS) of a state; keys in the order of ``as_the_state``."""
    pointers, p, n = state_pointers(state_ptr, first_p, first_n, N, ROWS, KEYS)
    if P % ROWS == 0 and N % KEYS == 0:
        piece = tl.load(pointers)
    else:
        piece = tl.load(pointers, mask=(p < P) & (n < N), other=0.0)
    piece = tl.permute(tl.reshape(piece, (KEYS // 16, ROWS, 4, 2, 2)), (1, 0, 3, 2, 4))
    return tl.reshape(piece, (ROWS, KEYS))


@triton.jit
def store_piece(
    piece, state_ptr, first_p, first_n, P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """What ``load_piece`` loads, back."""
    pointers, p, n = state_pointers(state_ptr, first_p, first_n, N, ROWS, KEYS)
    piece = tl.permute(tl.reshape(piece, (ROWS, KEYS // 16, 2, 4, 2)), (1, 0, 3, 2, 4))
    piece = tl.reshape(piece, (KEYS // 16, ROWS, 16))
    if P % ROWS == 0 and N % KEYS == 0:
        tl.store(pointers, piece)
    else:
        tl.store(pointers, piece, mask=(p < P) & (n < N))


@triton.jit
def as_the_state(x, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """x (n, columns) with keys in the order of ``load_piece``."""
    x = tl.permute(tl.reshape(x, (KEYS // 16, 4, 2, 2, COLUMNS)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (KEYS, COLUMNS))


@triton.jit
def inverse(over_k, beta, count, TOKENS: tl.constexpr, WIDE: tl.constexpr):
    """(s, i) such that writes = (values - what they find, times beta) (p, s) @ it: it undoes what tokens take back.

    over_k (i, s) is what token s finds of a write of token i < s; only the first count tokens are real. beta (s,).
    """
    s = tl.arange(0, TOKENS)
    taken_back = tl.trans(tl.where(s[:, None] < s, over_k, 0.0) * beta)  # (s, i)
    found = tl.zeros((TOKENS, TOKENS), WIDE) + tl.where(s[:, None] == s, 1.0, 0.0)
    for i in range(1, count):
        taken = tl.sum(tl.where(s[:, None] == i, taken_back, 0.0), axis=0)
        found -= tl.where(s == i, tl.sum(found * taken, axis=1)[:, None], 0.0)
    return found
