"""int8 in kernels; see ``cache.formats.int8``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_int8_blocks


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_int8_blocks(tile, None, planes, p, P, N)
