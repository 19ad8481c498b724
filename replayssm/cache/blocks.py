"""Numbers in fewer bits under scales: what checkpoint formats and read formats are made of.

Every function takes (..., headdim, d_state) in fp32, and random words of that shape or None for the nearest; it returns
planes that stand for it, whose leading axes are the same. Blocks lie along d_state, which is filled up with zeros to
whole blocks: ``from_`` functions return these as well. Divisions are those of IEEE, by the scale as it is stored.

NaN or infinity makes a scale so that all numbers under it come back as NaN or infinity, and none outside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.cache.rounding import (
    E2M1_MOST,
    E4M3_MOST,
    from_e2m1,
    from_e4m3,
    round_up_bf16,
    to_e2m1,
    to_e4m3,
    to_integer,
)

INT8_BLOCK, FP4_BLOCK = 32, 16  # numbers that share a scale
FP4_PEAK = E4M3_MOST * E2M1_MOST  # the largest number over a head's own scale


def fp8_rows(x: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 codes uint8 (..., headdim, d_state), and the scale of each row fp32 (..., headdim)."""
    scale = nonzero(peak_over(x, -1, E4M3_MOST))
    return to_e4m3(x / scale.unsqueeze(-1), words), scale


def from_fp8_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers of ``fp8_rows``."""
    return from_e4m3(codes) * scale.unsqueeze(-1)


def int16_rows(x: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Whole numbers int16 (..., headdim, d_state), and the scale of each row fp32 (..., headdim)."""
    scale = nonzero(peak_over(x, -1, 32767))
    return to_integer(x / scale.unsqueeze(-1), 32767, words, bits=24).to(torch.int16), scale


def from_int16_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers of ``int16_rows``."""
    return codes.float() * scale.unsqueeze(-1)


def int8_blocks(x: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Whole numbers int8 (..., headdim, filled), and the scale of each block bf16 (..., headdim, blocks), rounded up.

    bf16 and not fp16: states of amplitude 1e-6 would vanish under an fp16 scale.
    """
    x = in_blocks(x, INT8_BLOCK)
    words = None if words is None else in_blocks(words, INT8_BLOCK)
    scale = nonzero(round_up_bf16(peak_over(x, -1, 127)))
    codes = to_integer(x / scale.float().unsqueeze(-1), 127, words)
    return codes.to(torch.int8).flatten(-2), scale


def from_int8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers of ``int8_blocks``."""
    return (codes.unflatten(-1, (-1, INT8_BLOCK)).float() * scale.float().unsqueeze(-1)).flatten(-2)


def nvfp4(x: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 under two scales, E4M3 of a block and fp32 of a head; 4.5 bits a number.

    Returns:
        Packed codes uint8 (..., headdim, filled / 2), E4M3 scales uint8 (..., headdim, blocks), and (...,) fp32.
    """
    head = nonzero(peak_over(x, (-1, -2), FP4_PEAK))
    x = in_blocks(x, FP4_BLOCK)
    words = None if words is None else in_blocks(words, FP4_BLOCK)
    scales = e4m3_scales(peak_over(x, -1, E2M1_MOST), head)
    codes = to_e2m1(x / by_block(scales, head), words)
    return packed(codes.flatten(-2)), scales, head


def from_nvfp4(codes: Tensor, scales: Tensor, head: Tensor) -> Tensor:
    """The numbers of ``nvfp4``."""
    blocks = from_e2m1(unpacked(codes)).unflatten(-1, (-1, FP4_BLOCK))
    return (blocks * by_block(scales, head)).flatten(-2)


def peak_over(x: Tensor, axes: int | tuple[int, ...], most: float) -> Tensor:
    """The largest magnitude along the axes over ``most``, rounded as IEEE's division on every device."""
    peak = x.abs().amax(axes)
    return peak / torch.full(
        (), most, dtype=x.dtype, device=x.device
    )  # of a plain number a GPU takes the reciprocal instead


def in_blocks(x: Tensor, block: int) -> Tensor:
    """(..., d_state) -> (..., blocks, block), with zeros behind d_state."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def e4m3_scales(wanted: Tensor, head: Tensor) -> Tensor:
    """Codes uint8 (..., headdim, blocks) of the scales ``wanted`` of blocks, over those of their heads (...,).

    None is below 2^-9, the least number above 0.
    """
    return to_e4m3((wanted / head[..., None, None]).clamp(min=2.0**-9), None)


def by_block(scales: Tensor, head: Tensor) -> Tensor:
    """The whole scale of each block (..., headdim, blocks, 1), of E4M3 codes and the scales (...,) of their heads."""
    return (from_e4m3(scales) * head[..., None, None]).unsqueeze(-1)


def packed(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: the even one in the low half, the odd one in the high half."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpacked(codes: Tensor) -> Tensor:
    """What ``packed`` was given."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def nonzero(scale: Tensor) -> Tensor:
    """1 for a scale of 0: there is nothing under it but zeros, or less than the scale can hold."""
    return torch.where(scale == 0, 1, scale)
