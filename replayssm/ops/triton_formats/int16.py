"""int16 checkpoints for kernels: nothing is lost beside the format's own rounding; see ``cache.checkpoint``."""

import triton
import triton.language as tl

from replayssm.ops.triton_products import times


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    p, n = first_p + tl.arange(0, ROWS), tl.arange(0, KEYS)
    codes = planes[0] + row * strides[0] + (head * P + p[:, None]) * N + n
    tile = tl.load(codes, mask=(p[:, None] < P) & (n < N), other=0).to(tl.float32)
    scale = tl.load(planes[1] + row * strides[1] + head * P + p, mask=p < P, other=0.0)[:, None]
    if x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
    none = tl.zeros((ROWS, x.shape[0]), tl.float32)
    return times(tile, tl.trans(x), none) * scale
