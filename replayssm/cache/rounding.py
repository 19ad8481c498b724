"""Rounding a number to a narrow one, to the nearest or stochastically, on the bits of fp32.

Stochastic rounding goes up with the probability of what is cut off, so that its mean is the number itself: a decay that
is smaller than half a step then still has its effect on average. Random words come from ``philox``; a word is spent on
one number, its low bits: 13 for fp16, 24 for int16, 16 for the others. ``words=None`` is to the nearest, ties to even.

Numbers beyond the largest finite value become that; NaN and infinity stay what they are in floats, and are 0 in
integers and in E2M1, whose scale then says so.
"""

import torch
from torch import Tensor

E4M3_MOST = 448.0
E2M1_MOST = 6.0


def to_fp16(x: Tensor, words: Tensor) -> Tensor:
    """fp32 -> fp16, stochastically; subnormal numbers keep their steps of 2^-24."""
    a, exponent, mantissa = _parts(x)
    random = words & 0x1FFF
    normal = (((a + random) >> 13) - (112 << 10)).clamp(max=0x7BFF)
    shift = (126 - exponent).clamp(min=14, max=40)  # at 40 nothing can be carried up any more
    code = torch.where(exponent >= 113, normal, (mantissa + (random << (shift - 13))) >> shift)
    rounded = _signed16(torch.where(exponent == 0, 0, code), x).view(torch.float16)
    return torch.where(exponent == 255, x.half(), rounded)


def to_bf16(x: Tensor, words: Tensor) -> Tensor:
    """fp32 -> bf16, stochastically."""
    a, exponent, _ = _parts(x)
    code = ((a + (words & 0xFFFF)) >> 16).clamp(max=0x7F7F)
    return torch.where(exponent == 255, x.bfloat16(), _signed16(code, x).view(torch.bfloat16))


def to_e4m3(x: Tensor, words: Tensor | None) -> Tensor:
    """fp32 -> the uint8 code of FP8 E4M3, which has no infinity: that becomes NaN."""
    if words is None:
        finite = x.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)  # the cast alone makes NaN of 465
        code = finite.view(torch.uint8)
        return torch.where(x.isfinite(), code, 0x7F)
    a, exponent, mantissa = _parts(x)
    random = words & 0xFFFF
    normal = (((a + (random << 4)) >> 20) - (120 << 3)).clamp(max=0x7E)
    shift = (141 - exponent).clamp(min=21, max=40)
    code = torch.where(exponent >= 121, normal, (mantissa + (random << (shift - 16))) >> shift)
    code = torch.where(exponent == 255, 0x7F, code)
    return (code | torch.where(x.signbit(), 0x80, 0)).to(torch.uint8)


def from_e4m3(code: Tensor) -> Tensor:
    """The numbers of uint8 codes, fp32."""
    return code.view(torch.float8_e4m3fn).float()


def to_integer(x: Tensor, most: int, words: Tensor | None, bits: int = 16) -> Tensor:
    """Whole numbers between -most and most, as floats.

    Args:
        bits: of a word that are spent.
    """
    rounded = x.round() if words is None else (x + (words & (1 << bits) - 1) * 2.0**-bits).floor()
    return rounded.clamp(-most, most).nan_to_num(0)


def to_e2m1(x: Tensor, words: Tensor | None) -> Tensor:
    """fp32 -> the uint8 code of FP4 E2M1: a sign above the place in 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    a = x.abs().clamp(max=E2M1_MOST)
    if words is not None:
        step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
        a = (a / step + (words & 0xFFFF) * 2.0**-16).floor() * step
    # half-way goes to the even code: up at 0.75, 1.75 and 3.5, down at the others
    above = torch.stack([a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5])
    return above.sum(0, dtype=torch.uint8) | torch.where(x.signbit(), 8, 0).to(torch.uint8)


def from_e2m1(code: Tensor) -> Tensor:
    """The numbers of uint8 codes, fp32: shifted into place, a code is the fp16 number that is 2^14 times smaller."""
    code = code.int()
    return _as16((code & 8) << 12 | (code & 7) << 9).view(torch.float16).float() * 2.0**14


def round_up_bf16(x: Tensor) -> Tensor:
    """The smallest bf16 number that is at least x; x is not negative, or NaN."""
    a = x.contiguous().view(torch.int32).long()
    return torch.where(x.isfinite(), _as16((a + 0xFFFF) >> 16).view(torch.bfloat16), x.bfloat16())


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of fp32 numbers, as int64: the bits without sign, the exponent's, and the mantissa with its leading one."""
    a = x.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    return a, a >> 23, a & 0x7FFFFF | 0x800000


def _signed16(code: Tensor, x: Tensor) -> Tensor:
    return _as16(torch.where(x.signbit(), code - 0x8000, code))


def _as16(code: Tensor) -> Tensor:
    """The low 16 bits, as int16."""
    return ((code + 0x8000 & 0xFFFF) - 0x8000).to(torch.int16)
