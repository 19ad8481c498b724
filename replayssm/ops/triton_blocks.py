"""Heads in fewer bits under scales, in kernels: the planes that ``cache.blocks`` gives, bit for bit.

``write_`` functions round the fp32 tile of a head into its planes; ``read_`` functions return what these hold.
``words`` are random ones for each number, or None for the nearest. Divisions are rounded as IEEE's. Planes are pointers
at those of the row and head.
"""

import triton
import triton.language as tl

from replayssm.ops.triton_rounding import (
    from_e2m1,
    from_e4m3,
    largest,
    nonzero,
    over,
    round_up_bf16,
    to_e2m1,
    to_e4m3,
    to_integer,
)

INT8_BLOCK, FP4_BLOCK = tl.constexpr(32), tl.constexpr(16)

# Axes: P headdim, N d_state. A tile of the state is (ABREAST, deep, outer, LANES), as in triton_fold, and holds zeros
# behind P and N; p (ABREAST, deep) are the indices of its rows. In blocks it is (ABREAST, deep, blocks, block).


@triton.jit
def of_head(planes, strides, row, head):
    """Planes of a head; strides are those of a row and of a head, plane by plane."""
    found = (planes[0] + row * strides[0] + head * strides[1],)
    for i in tl.static_range(1, len(planes)):
        found = found + (planes[i] + row * strides[2 * i] + head * strides[2 * i + 1],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def in_blocks(x, BLOCK: tl.constexpr):
    """(ABREAST, deep, a, b) -> (ABREAST, deep, a b / BLOCK, BLOCK), neighbours in a row stay neighbours."""
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] * x.shape[3] // BLOCK, BLOCK))


@triton.jit
def _as_tile(x, n):
    """(ABREAST, deep, blocks, block) in the shape of keys n, (ABREAST, deep, outer, LANES)."""
    return tl.reshape(x, (x.shape[0], x.shape[1], n.shape[2], n.shape[3]))


@triton.jit
def _places(p, pointer, A: tl.constexpr, B: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of (ABREAST, deep, A, B) lie in rows of WIDTH, and which of them exist."""
    column = tl.arange(0, A)[:, None] * B + tl.arange(0, B)
    row = p[:, :, None, None]
    return pointer + row * WIDTH + column, (row < P) & (column < WIDTH)


@triton.jit
def write_rows(values, pointer, p, P: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of WIDTH elements, from (ABREAST, deep, a, b)."""
    WHOLE: tl.constexpr = p.shape[0] * p.shape[1] == P and values.shape[2] * values.shape[3] == WIDTH
    at, exists = _places(p, pointer, values.shape[2], values.shape[3], P, WIDTH)
    if WHOLE:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=exists)


@triton.jit
def read_rows(pointer, p, A: tl.constexpr, B: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr):
    """(ABREAST, deep, A, B) of rows of WIDTH elements, zeros behind them."""
    WHOLE: tl.constexpr = p.shape[0] * p.shape[1] == P and A * B == WIDTH
    at, exists = _places(p, pointer, A, B, P, WIDTH)
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=exists, other=0)


@triton.jit
def _write_row_scales(scale, pointer, p, P: tl.constexpr):
    tl.store(pointer + p, scale, mask=p < P)


@triton.jit
def _read_row_scales(pointer, p, P: tl.constexpr):
    return tl.load(pointer + p, mask=p < P, other=1.0)[:, :, None, None]


@triton.jit
def write_block_scales(scales, pointer, p, P: tl.constexpr, BLOCKS: tl.constexpr):
    """Scales (ABREAST, deep, blocks)."""
    write_rows(scales[:, :, None, :], pointer, p, P, BLOCKS)


@triton.jit
def read_block_scales(pointer, p, COUNT: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr):
    """(ABREAST, deep, COUNT)"""
    scales = read_rows(pointer, p, 1, COUNT, P, BLOCKS)
    return tl.reshape(scales, (scales.shape[0], scales.shape[1], COUNT))


@triton.jit
def write_fp8_rows(tile, words, planes, p, P: tl.constexpr, N: tl.constexpr):
    """E4M3 codes, and a scale for each row."""
    scale = nonzero(tl.div_rn(largest(largest(tile, 3), 2), 448.0))
    codes = to_e4m3(over(tile, scale[:, :, None, None]), words)
    write_rows(codes, planes[0], p, P, N)
    _write_row_scales(scale, planes[1], p, P)


@triton.jit
def read_fp8_rows(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    """(ABREAST, deep, outer, LANES)"""
    return from_e4m3(read_rows(planes[0], p, n.shape[2], n.shape[3], P, N)) * _read_row_scales(planes[1], p, P)


@triton.jit
def write_int16_rows(tile, words, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Whole numbers, and a scale for each row."""
    scale = nonzero(tl.div_rn(largest(largest(tile, 3), 2), 32767.0))
    codes = to_integer(over(tile, scale[:, :, None, None]), 32767, words, 24)
    write_rows(codes.to(tl.int16), planes[0], p, P, N)
    _write_row_scales(scale, planes[1], p, P)


@triton.jit
def read_int16_rows(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    """(ABREAST, deep, outer, LANES)"""
    return read_rows(planes[0], p, n.shape[2], n.shape[3], P, N).to(tl.float32) * _read_row_scales(planes[1], p, P)


@triton.jit
def write_int8_blocks(tile, words, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Whole numbers, and a scale for each block of 32, rounded up to bf16."""
    BLOCKS: tl.constexpr = (N + INT8_BLOCK - 1) // INT8_BLOCK
    x = in_blocks(tile, INT8_BLOCK)
    if words is not None:
        words = in_blocks(words, INT8_BLOCK)
    scale = nonzero(round_up_bf16(tl.div_rn(largest(x, 3), 127.0)).to(tl.float32))
    codes = to_integer(over(x, scale[:, :, :, None]), 127, words)
    write_rows(codes.to(tl.int8), planes[0], p, P, BLOCKS * INT8_BLOCK)
    write_block_scales(scale.to(tl.bfloat16), planes[1], p, P, BLOCKS)


@triton.jit
def read_int8_blocks(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    """(ABREAST, deep, outer, LANES)"""
    BLOCKS: tl.constexpr = (N + INT8_BLOCK - 1) // INT8_BLOCK
    COUNT: tl.constexpr = n.shape[2] * n.shape[3] // INT8_BLOCK
    codes = read_rows(planes[0], p, COUNT, INT8_BLOCK, P, BLOCKS * INT8_BLOCK)
    scales = read_block_scales(planes[1], p, COUNT, P, BLOCKS)
    return _as_tile(codes.to(tl.float32) * scales.to(tl.float32)[:, :, :, None], n)


@triton.jit
def write_nvfp4(tile, words, planes, p, P: tl.constexpr, N: tl.constexpr):
    """E2M1 codes, E4M3 scales for each block of 16, and a scale of the head."""
    BLOCKS: tl.constexpr = (N + FP4_BLOCK - 1) // FP4_BLOCK
    x = in_blocks(tile, FP4_BLOCK)
    if words is not None:
        words = in_blocks(words, FP4_BLOCK)
    block = largest(x, 3)
    head = nonzero(tl.div_rn(of_the_head(block), 448.0 * 6.0))
    scales = e4m3_scales(block, 6.0, head)
    codes = to_e2m1(over(x, by_block(scales, head)), words)
    write_rows(packed(codes), planes[0], p, P, BLOCKS * FP4_BLOCK // 2)
    write_block_scales(scales, planes[1], p, P, BLOCKS)
    tl.store(planes[2], head)


@triton.jit
def read_nvfp4(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    """(ABREAST, deep, outer, LANES)"""
    BLOCKS: tl.constexpr = (N + FP4_BLOCK - 1) // FP4_BLOCK
    COUNT: tl.constexpr = n.shape[2] * n.shape[3] // FP4_BLOCK
    codes = unpacked(read_rows(planes[0], p, COUNT, FP4_BLOCK // 2, P, BLOCKS * FP4_BLOCK // 2))
    scales = read_block_scales(planes[1], p, COUNT, P, BLOCKS)
    return _as_tile(from_e2m1(codes) * by_block(scales, tl.load(planes[2])), n)


@triton.jit
def of_the_head(blocks):
    """The largest of (ABREAST, deep, blocks), a scalar."""
    return largest(largest(largest(blocks, 2), 1), 0)


@triton.jit
def e4m3_scales(block, most, head):
    """Codes of the scales of blocks (ABREAST, deep, blocks) whose largest number becomes most; not below 2^-9."""
    wanted = over(over(block, tl.full((), most, tl.float32)), head)
    return to_e4m3(tl.where(wanted < 0.001953125, 0.001953125, wanted), None)


@triton.jit
def by_block(scales, head):
    """The whole scale of each block (ABREAST, deep, blocks, 1)."""
    return (from_e4m3(scales) * head)[:, :, :, None]


@triton.jit
def packed(codes):
    """4-bit codes (ABREAST, deep, blocks, block), two a byte: the even one in the low half."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1], codes.shape[2], codes.shape[3] // 2, 2)))
    return low | high << 4


@triton.jit
def unpacked(codes):
    """What ``packed`` was given."""
    pairs = tl.join(codes & 15, codes >> 4)
    return tl.reshape(pairs, (codes.shape[0], codes.shape[1], codes.shape[2], codes.shape[3] * 2))
