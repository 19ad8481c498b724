"""nvfp4 in kernels; see ``cache.formats.nvfp4``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_nvfp4


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_nvfp4(tile, None, planes, p, P, N)
