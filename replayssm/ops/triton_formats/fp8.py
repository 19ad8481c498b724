"""fp8 in kernels; see ``cache.formats.fp8``."""

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import write_fp8_rows


@triton.jit
def quantize(tile, planes, p, P: tl.constexpr, N: tl.constexpr):
    """Round to the nearest."""
    write_fp8_rows(tile, None, planes, p, P, N)
