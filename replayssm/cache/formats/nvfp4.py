"""nvfp4: E2M1 under an E4M3 scale for each 16 and an fp32 scale for each head; 4.5 bits a number.

Planes: codes uint8 (..., headdim, d_state / 2, filled up to blocks of 16), the even number in the low half of a byte;
E4M3 scales uint8 (..., headdim, blocks), the largest number of the block over 6 and over the head's scale; fp32 (...,),
the largest number of the head over 448 * 6.
"""

import torch
from torch import Tensor

from replayssm.cache.blocks import FP4_BLOCK, from_nvfp4, nvfp4


def alloc(checkpoint: Tensor) -> tuple[Tensor, ...]:
    """Zeros, for a copy of ``checkpoint``."""
    *lead, d_state = checkpoint.shape
    blocks = -(-d_state // FP4_BLOCK)
    return (
        checkpoint.new_zeros((*lead, blocks * FP4_BLOCK // 2), dtype=torch.uint8),
        checkpoint.new_zeros((*lead, blocks), dtype=torch.uint8),
        checkpoint.new_zeros(lead[:-1], dtype=torch.float32),
    )


def quantize(checkpoint: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Round to the nearest."""
    for plane, values in zip(planes, nvfp4(checkpoint), strict=True):
        plane.copy_(values)


def dequantize(planes: tuple[Tensor, ...]) -> Tensor:
    """The numbers, with zeros behind d_state."""
    return from_nvfp4(*planes)
