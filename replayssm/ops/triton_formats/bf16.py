"""bf16 for kernels: nothing is lost beside the format's own rounding; see ``cache.formats.bf16``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_rows
from replayssm.ops.triton_products import times


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_rows(tile.to(tl.bfloat16), planes[0], p, P, N)


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    p, n = first_p + tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    tile = tl.load(planes[0] + row * strides[0] + (head * P + p) * N + n, mask=(p < P) & (n < N), other=0.0)
    if x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
    none = tl.zeros((ROWS, x.shape[0]), tl.float32)
    return times(tile, tl.trans(x), none)
