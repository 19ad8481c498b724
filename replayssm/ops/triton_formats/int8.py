"""int8 for kernels: codes and scales become fp16, and tensor cores multiply them; see ``cache.formats.int8``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_int8_blocks
from replayssm.ops.triton_codes import as_bytes, as_fp16, from_int8
from replayssm.ops.triton_rounding import power_of_two


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_int8_blocks(tile, None, planes, p, P, N)


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package. Numbers of a row are rounded to 11 bits, the largest of its scales being one of them."""
    BLOCKS: tl.constexpr = (N + 31) // 32
    p = first_p + tl.arange(0, ROWS)[:, None]
    word, block = tl.arange(0, KEYS // 4), tl.arange(0, KEYS // 32 if KEYS >= 32 else 1)
    codes = (planes[0] + row * strides[0] + head * (P * BLOCKS * 32)).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.load(codes + p * (8 * BLOCKS) + word, mask=(p < P) & (word < 8 * BLOCKS), other=0)
    scale = planes[1] + row * strides[1] + (head * P + p) * BLOCKS + block
    scales = tl.load(scale, mask=(p < P) & (block < BLOCKS), other=0.0).to(tl.float32)
    by_row, inverse = power_of_two(tl.max(scales, axis=1))
    tile = from_int8(words, (scales * inverse[:, None]).to(tl.float16), ROWS, KEYS, 8 if KEYS >= 32 else KEYS // 4)
    x16, scale_x = as_fp16(x)
    return tl.dot(tile, as_bytes(tl.trans(x16), KEYS, x.shape[0]), input_precision="ieee") * scale_x * by_row[:, None]
