"""lr_if4: a few rank-one terms in FP8, and what they leave in the better of two 4-bit grids for each 32 numbers.

A state is often nearly of low rank: many writes along few directions. The largest terms are taken out first, so that
the 4-bit part holds small numbers. A block of it is in E2M1 or in whole numbers from -7 to 7, which the sign bit of its
E4M3 scale says (the grid is that of arXiv 2603.28765). 4.44 bits a number for 64 x 128, 4.50 for 128 x 128.

Planes, r terms a head: codes uint8 (..., headdim, d_state / 2, filled up to blocks of 32), the even number in the low
half of a byte, its sign in bit 3; scales uint8 (..., headdim, blocks); u uint8 E4M3 (..., r, headdim); v uint8 E4M3
(..., r, d_state); fp32 (..., 1 + 2 r): the head's scale, the r scales of u, the r scales of v.
"""

import torch
from torch import Tensor

from replayssm.cache.blocks import by_block, e4m3_scales, in_blocks, nonzero, packed, peak_over, unpacked
from replayssm.cache.rounding import E2M1_MOST, E4M3_MOST, from_e2m1, from_e4m3, to_e2m1, to_e4m3, to_integer

BLOCK = 32
INTEGERS, INTEGER_FLAG = 7, 0x80  # the largest of the whole numbers, and the bit of a scale that says so
PEAK = 256 * E2M1_MOST  # the largest number over the head's scale: leaves room for the scale of largest / 4
ONE_TERM = 80  # headdim up to which one term is taken out; factors weigh less in larger heads


def alloc(checkpoint: Tensor) -> tuple[Tensor, ...]:
    """Zeros, for a copy of ``checkpoint``."""
    *heads, headdim, d_state = checkpoint.shape
    blocks, terms = -(-d_state // BLOCK), 1 if headdim <= ONE_TERM else 2
    shapes = (headdim, blocks * BLOCK // 2), (headdim, blocks), (terms, headdim), (terms, d_state)
    scales = checkpoint.new_zeros((*heads, 1 + 2 * terms), dtype=torch.float32)
    return *(checkpoint.new_zeros((*heads, *shape), dtype=torch.uint8) for shape in shapes), scales


def quantize(checkpoint: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Take out term after term, then choose scale and grid of each block by its sum of squared errors."""
    codes, scales, us, vs, fp32 = planes
    terms, rest = us.shape[-2], checkpoint
    for term in range(terms):
        v = _direction(rest)
        vs[..., term, :], scale_v = _fp8(v)
        v = from_e4m3(vs[..., term, :]) * scale_v
        length = nonzero((v * v).sum(-1, keepdim=True))
        us[..., term, :], scale_u = _fp8(_times(rest, v) / length)
        u = from_e4m3(us[..., term, :]) * scale_u
        fp32[..., 1 + term], fp32[..., 1 + terms + term] = scale_u.squeeze(-1), scale_v.squeeze(-1)
        rest = rest - u.unsqueeze(-1) * v.unsqueeze(-2)
    head = nonzero(peak_over(rest, (-1, -2), PEAK))
    fp32[..., 0] = head
    blocks = in_blocks(rest, BLOCK)
    code, scale, error = _candidate(blocks, head, E2M1_MOST, whole=False)
    for divisor, whole in ((4.0, False), (float(INTEGERS), True)):
        other = _candidate(blocks, head, divisor, whole=whole)
        better = other[2] < error
        code = torch.where(better.unsqueeze(-1), other[0], code)
        scale, error = torch.where(better, other[1], scale), torch.where(better, other[2], error)
    codes.copy_(packed(code.flatten(-2)))
    scales.copy_(scale)


def dequantize(planes: tuple[Tensor, ...]) -> Tensor:
    """The numbers, with zeros behind d_state."""
    codes, scales, us, vs, fp32 = planes
    terms = us.shape[-2]
    x = _numbers(unpacked(codes).unflatten(-1, (-1, BLOCK)), scales, fp32[..., 0]).flatten(-2)
    scale_u, scale_v = fp32[..., 1:].split(terms, -1)
    u, v = from_e4m3(us) * scale_u.unsqueeze(-1), from_e4m3(vs) * scale_v.unsqueeze(-1)
    for term in range(terms):
        x[..., : v.shape[-1]] += u[..., term, :, None] * v[..., term, None, :]
    return x


def _candidate(blocks: Tensor, head: Tensor, divisor: float, *, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and sum of squared errors of each block, with its largest number over ``divisor`` as the scale."""
    scale = e4m3_scales(peak_over(blocks, -1, divisor), head)
    x = blocks / by_block(scale, head)
    if whole:
        code, scale = _integer_code(x), scale | INTEGER_FLAG
    else:
        code = to_e2m1(x, None)
    return code, scale, _sum_of_squares(_numbers(code, scale, head) - blocks)


def _direction(x: Tensor) -> Tensor:
    """About the first right singular vector (..., d_state): the longest row, after one power iteration."""
    longest = (x * x).sum(-1).argmax(-1)[..., None, None].expand(*x.shape[:-2], 1, x.shape[-1])
    v = _unit(x.gather(-2, longest).squeeze(-2))
    return _unit((x * _times(x, v).unsqueeze(-1)).sum(-2))


def _times(x: Tensor, v: Tensor) -> Tensor:
    """x v, summed head by head: a matrix product may sum in another order for another batch."""
    return (x * v.unsqueeze(-2)).sum(-1)


def _unit(v: Tensor) -> Tensor:
    return v / nonzero((v * v).sum(-1, keepdim=True).sqrt())


def _fp8(v: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes of v (..., n), and their scale (..., 1)."""
    scale = nonzero(peak_over(v, -1, E4M3_MOST)).unsqueeze(-1)
    return to_e4m3(v / scale, None), scale


def _integer_code(x: Tensor) -> Tensor:
    whole = to_integer(x, INTEGERS, None)
    return whole.abs().to(torch.uint8) | torch.where(x.signbit(), 8, 0).to(torch.uint8)


def _numbers(code: Tensor, scale: Tensor, head: Tensor) -> Tensor:
    """Of codes (..., blocks, BLOCK), in the grid that the scale of each block names."""
    whole = (code & 7).float()
    whole = torch.where(code >= 8, -whole, whole)
    grid = torch.where((scale >= INTEGER_FLAG).unsqueeze(-1), whole, from_e2m1(code))
    return grid * by_block(scale & ~INTEGER_FLAG, head)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Over the last axis, halves added to halves: an order that a kernel can follow."""
    x = x * x
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x.squeeze(-1)
