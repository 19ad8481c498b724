"""fp16 checkpoints for kernels: nothing is lost beside the format's own rounding; see ``cache.checkpoint``."""

import triton
import triton.language as tl

from replayssm.ops.triton_codes import as_fp16


@triton.jit
def _times(tile, x):
    """tile (p, n) @ x (t, n), x as two fp16 numbers."""
    high, scale = as_fp16(x)
    rest, rest_scale = as_fp16(x.to(tl.float32) - high.to(tl.float32) * scale[:, None])
    return (
        tl.dot(tile, tl.trans(rest), input_precision="ieee") * rest_scale
        + tl.dot(tile, tl.trans(high), input_precision="ieee") * scale
    )


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    p, n = first_p + tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    tile = tl.load(planes[0] + row * strides[0] + (head * P + p) * N + n, mask=(p < P) & (n < N), other=0.0)
    return _times(tile, x)
