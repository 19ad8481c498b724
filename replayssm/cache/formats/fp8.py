"""fp8: E4M3 under an fp32 scale for each row; 8.25 bits a number where d_state is 128.

Planes: codes uint8 (..., headdim, d_state); scales fp32 (..., headdim), the largest number of the row over 448.
"""

import torch
from torch import Tensor

from replayssm.cache.blocks import fp8_rows, from_fp8_rows


def alloc(checkpoint: Tensor) -> tuple[Tensor, ...]:
    """Zeros, for a copy of ``checkpoint``."""
    codes = torch.zeros_like(checkpoint, dtype=torch.uint8)
    return codes, checkpoint.new_zeros(checkpoint.shape[:-1], dtype=torch.float32)


def quantize(checkpoint: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Round to the nearest."""
    for plane, values in zip(planes, fp8_rows(checkpoint), strict=True):
        plane.copy_(values)


def dequantize(planes: tuple[Tensor, ...]) -> Tensor:
    """The numbers."""
    return from_fp8_rows(*planes)
