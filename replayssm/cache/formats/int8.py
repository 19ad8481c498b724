"""int8: whole numbers under a bf16 scale for each 32; 8.5 bits a number, and a quarter of fp8's error.

Planes: codes int8 (..., headdim, d_state, filled up to blocks of 32); scales bf16 (..., headdim, blocks), the largest
number of the block over 127, rounded up.
"""

import torch
from torch import Tensor

from replayssm.cache.blocks import INT8_BLOCK, from_int8_blocks, int8_blocks


def alloc(checkpoint: Tensor) -> tuple[Tensor, ...]:
    """Zeros, for a copy of ``checkpoint``."""
    *lead, d_state = checkpoint.shape
    blocks = -(-d_state // INT8_BLOCK)
    codes = checkpoint.new_zeros((*lead, blocks * INT8_BLOCK), dtype=torch.int8)
    return codes, checkpoint.new_zeros((*lead, blocks), dtype=torch.bfloat16)


def quantize(checkpoint: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Round to the nearest."""
    for plane, values in zip(planes, int8_blocks(checkpoint), strict=True):
        plane.copy_(values)


def dequantize(planes: tuple[Tensor, ...]) -> Tensor:
    """The numbers, with zeros behind d_state."""
    return from_int8_blocks(*planes)
