"""fp8 for kernels: codes become fp16, and tensor cores multiply them; see ``cache.formats.fp8``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_fp8_rows
from replayssm.ops.triton_codes import as_fp16, e4m3_as_fp16


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_fp8_rows(tile, None, planes, p, P, N)


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    p, n = first_p + tl.arange(0, ROWS), tl.arange(0, KEYS)
    codes = planes[0] + row * strides[0] + (head * P + p[:, None]) * N + n
    tile = e4m3_as_fp16(tl.load(codes, mask=(p[:, None] < P) & (n < N), other=0))
    scale = tl.load(planes[1] + row * strides[1] + head * P + p, mask=p < P, other=0.0) * 2.0**8
    x16, scale_x = as_fp16(x)
    return tl.dot(tile, tl.trans(x16), input_precision="ieee") * scale_x * scale[:, None]
