"""bf16: half the bytes of an fp32 checkpoint, no scales; 16 bits a number.

Planes: bf16 (..., headdim, d_state).
"""

import torch
from torch import Tensor


def alloc(checkpoint: Tensor) -> tuple[Tensor, ...]:
    """Zeros, for a copy of ``checkpoint``."""
    return (torch.zeros_like(checkpoint, dtype=torch.bfloat16),)


def quantize(checkpoint: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Round to the nearest."""
    planes[0].copy_(checkpoint)


def dequantize(planes: tuple[Tensor, ...]) -> Tensor:
    """The numbers."""
    return planes[0].float()
