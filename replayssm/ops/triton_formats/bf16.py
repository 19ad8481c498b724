"""bf16 in kernels; see ``cache.formats.bf16``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_rows


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_rows(tile.to(tl.bfloat16), planes[0], p, P, N)
