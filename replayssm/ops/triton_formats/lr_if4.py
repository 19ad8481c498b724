"""lr_if4 for kernels: the 4-bit part as nvfp4's, the terms by their products; see ``cache.formats.lr_if4``.

Sums over rows and keys, and of squared errors, run in another order than in plain PyTorch: now and then a code is
another one.
"""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import (
    by_block,
    e4m3_scales,
    in_blocks,
    of_the_head,
    packed,
    write_block_scales,
    write_rows,
)
from replayssm.ops.triton_codes import SHRUNK, as_codes, as_fp16, from_if4
from replayssm.ops.triton_rounding import from_e2m1, from_e4m3, largest, nonzero, over, to_e2m1, to_e4m3, to_integer

BLOCK, INTEGERS, ONE_TERM = tl.constexpr(32), tl.constexpr(7), tl.constexpr(80)

# Axes: P headdim, N d_state; p and n are indices of rows and keys. In blocks a tile is (ABREAST, deep, blocks, BLOCK),
# a vector of keys (blocks, BLOCK) and one of rows (ABREAST, deep).


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Take out term after term, then choose scale and grid of each block by its sum of squared errors."""
    TERMS: tl.constexpr = 1 if P <= ONE_TERM else 2
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    rest = in_blocks(tile, BLOCK)
    n = tl.arange(0, rest.shape[2])[:, None] * BLOCK + tl.arange(0, BLOCK)
    for term in range(TERMS):  # not unrolled: each needs nearly all registers
        v = _direction(rest, p)
        scale_v = nonzero(tl.div_rn(_over_all(v), 448.0))
        code_v = to_e4m3(over(v, scale_v), None)
        v = from_e4m3(code_v) * scale_v
        u = _times(rest, v)
        u = over(u, nonzero(_sum(v * v)))
        scale_u = nonzero(tl.div_rn(_over_all(u), 448.0))
        code_u = to_e4m3(over(u, scale_u), None)
        rest -= (from_e4m3(code_u) * scale_u)[:, :, None, None] * v
        tl.store(planes[2] + term * P + p, code_u, mask=p < P)
        tl.store(planes[3] + term * N + n, code_v, mask=n < N)
        tl.store(planes[4] + 1 + term, scale_u)
        tl.store(planes[4] + 1 + TERMS + term, scale_v)
    block = largest(rest, 3)
    head = nonzero(tl.div_rn(of_the_head(block), 256.0 * 6.0))
    tl.store(planes[4], head)
    scales = e4m3_scales(block, 6.0, head)
    error = tl.full(block.shape, float("inf"), tl.float32)
    for candidate in range(2):  # in E2M1 the largest number becomes 6 or 4
        other = e4m3_scales(block, 6.0 - 2.0 * candidate, head)
        other_error = _error(rest, other, head, False)
        scales = tl.where(other_error < error, other, scales)
        error = tl.minimum(error, other_error)
    other = e4m3_scales(block, 7.0, head)
    whole = _error(rest, other, head, True) < error
    scales = tl.where(whole, other, scales)
    x = _over_scale(rest, scales, head)
    codes = tl.where(whole[:, :, :, None], _integer_code(x), to_e2m1(x, None))
    write_rows(packed(codes), planes[0], p, P, BLOCKS * BLOCK // 2)
    write_block_scales(tl.where(whole, scales | 0x80, scales), planes[1], p, P, BLOCKS)


@triton.jit
def _direction(x, p):
    """About the first right singular vector (blocks, BLOCK): the longest row, the first of several, after one step."""
    length = largest(tl.sum(tl.sum(x * x, axis=3), axis=2)[:, :, None], 2).to(tl.int32, bitcast=True)
    longest = tl.max(tl.max(length, axis=1), axis=0)
    first = tl.min(tl.min(tl.where(length == longest, p, 1 << 30), axis=1), axis=0)
    row = tl.sum(tl.sum(tl.where((p == first)[:, :, None, None], x, 0.0), axis=1), axis=0)
    held = _times(x, _unit(row))
    return _unit(tl.sum(tl.sum(x * held[:, :, None, None], axis=1), axis=0))


@triton.jit
def _times(x, v):
    return tl.sum(tl.sum(x * v, axis=3), axis=2)


@triton.jit
def _sum(v):
    return tl.sum(tl.sum(v, axis=1), axis=0)


@triton.jit
def _over_all(v):
    """The largest magnitude of a vector in two axes."""
    return largest(largest(v, 1), 0)


@triton.jit
def _unit(v):
    return over(v, nonzero(tl.sqrt_rn(_sum(v * v))))


@triton.jit
def _over_scale(x, scales, head):
    return over(x, by_block(scales, head))


@triton.jit
def _error(x, scales, head, WHOLE: tl.constexpr):
    """The sum of squared errors of each block under these scales, in one of the grids."""
    over = _over_scale(x, scales, head)
    if WHOLE:
        number = to_integer(over, INTEGERS, None)
    else:
        number = from_e2m1(to_e2m1(over, None))
    error = number * by_block(scales, head) - x
    return tl.sum(error * error, axis=3)


@triton.jit
def _integer_code(x):
    """The sign above the magnitude of the nearest whole number."""
    sign = x.to(tl.uint32, bitcast=True) >> 31 << 3
    return (tl.abs(to_integer(x, INTEGERS, None)).to(tl.uint32) | sign).to(tl.uint8)


@triton.jit
def _of_terms(
    us, vs, factors, p, x, P: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """What the terms of one head hold for x (t, KEYS): (ROWS, t)."""
    n = tl.arange(0, KEYS)
    found = tl.zeros((p.shape[0], x.shape[0]), tl.float32)
    for term in tl.static_range(TERMS):
        u = from_e4m3(tl.load(us + term * P + p, mask=p < P, other=0)) * tl.load(factors + 1 + term)
        v = from_e4m3(tl.load(vs + term * N + n, mask=n < N, other=0)) * tl.load(factors + 1 + TERMS + term)
        found += u[:, None] * tl.sum(x.to(tl.float32) * v, axis=1)
    return found


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    BLOCKS: tl.constexpr = (N + 31) // 32
    TERMS: tl.constexpr = 1 if P <= 80 else 2
    p = first_p + tl.arange(0, ROWS)
    word, block = tl.arange(0, KEYS // 8), tl.arange(0, KEYS // 32 if KEYS >= 32 else 1)
    codes = (planes[0] + row * strides[0] + head * (P * BLOCKS * 16)).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.load(codes + p[:, None] * (4 * BLOCKS) + word, mask=(p[:, None] < P) & (word < 4 * BLOCKS), other=0)
    scale = planes[1] + row * strides[1] + (head * P + p[:, None]) * BLOCKS + block
    scales = tl.load(scale, mask=(p[:, None] < P) & (block < BLOCKS), other=0)
    tile = from_if4(words, scales, ROWS, KEYS, 4 if KEYS >= 32 else KEYS // 8)
    us, vs = planes[2] + row * strides[2] + head * (TERMS * P), planes[3] + row * strides[3] + head * (TERMS * N)
    factors = planes[4] + row * strides[4] + head * (1 + 2 * TERMS)
    peak = tl.load(factors) * SHRUNK
    x16, scale_x = as_fp16(x)
    found = tl.dot(tile, as_codes(tl.trans(x16), KEYS, x.shape[0]), input_precision="ieee") * (scale_x * peak)
    found += _of_terms(us, vs, factors, p, x, P, N, KEYS, TERMS)
    return found
