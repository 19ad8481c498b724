"""nvfp4 for kernels: codes become fp16 two at a time, and tensor cores multiply them; see ``cache.formats.nvfp4``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_nvfp4
from replayssm.ops.triton_codes import SHRUNK, as_codes, as_fp16, from_e2m1


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_nvfp4(tile, None, planes, p, P, N)


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    BLOCKS: tl.constexpr = (N + 15) // 16
    p = first_p + tl.arange(0, ROWS)[:, None]
    word, block = tl.arange(0, KEYS // 8), tl.arange(0, KEYS // 16)
    codes = (planes[0] + row * strides[0] + head * (P * BLOCKS * 8)).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.load(codes + p * (2 * BLOCKS) + word, mask=(p < P) & (word < 2 * BLOCKS), other=0)
    scale = planes[1] + row * strides[1] + (head * P + p) * BLOCKS + block
    scales = tl.load(scale, mask=(p < P) & (block < BLOCKS), other=0)
    tile = from_e2m1(words, scales, ROWS, KEYS, 2)
    peak = tl.load(planes[2] + row * strides[2] + head) * SHRUNK
    x16, scale_x = as_fp16(x)
    return tl.dot(tile, as_codes(tl.trans(x16), KEYS, x.shape[0]), input_precision="ieee") * (scale_x * peak)
