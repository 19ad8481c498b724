"""Rounding to narrow numbers and random words in kernels: the bits that ``cache.rounding`` and ``cache.philox`` give.

What these do in 64 bits is done in 32 here. ``words`` None is to the nearest, as there.
"""

import triton
import triton.language as tl

# Axes: P headdim, N d_state. A tile of the state is (ABREAST, deep, outer, LANES), as in triton_fold.

E2M1_MOST = tl.constexpr(6.0)
_ROUNDS = tl.constexpr(10)  # of Philox; and what it multiplies by, and adds to its key
_LEFT, _RIGHT = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_BUMP0, _BUMP1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_INFINITY = tl.constexpr(0x7F800000)  # as bits; NaN is above


@triton.jit
def _philox(seed, c0, c1, c2, c3):
    """Philox4x32-10 as in ``cache.philox``; products of 64 bits, which are one instruction for both halves."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        left, right = c0.to(tl.uint64) * _LEFT, c2.to(tl.uint64) * _RIGHT
        c0, c1 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, right.to(tl.uint32)
        c2, c3 = (left >> 32).to(tl.uint32) ^ c3 ^ k1, left.to(tl.uint32)
        k0, k1 = tl.add(k0, _BUMP0, sanitize_overflow=False), tl.add(k1, _BUMP1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def state_words(seed, position, layer, head, p, P: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """(ABREAST, deep, BLOCK_N / 4, 4) uint32: a word for every number of rows p (ABREAST, deep), key by key."""
    group = (head * P + p[:, :, None]) * ((N + 3) // 4) + tl.arange(0, BLOCK_N // 4)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = _philox(seed, group.to(tl.uint32), low, tl.cast(layer, tl.uint32), high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (words.shape[0], words.shape[1], BLOCK_N // 4, 4))


@triton.jit
def _magnitude(x):
    """The bits of fp32 x without its sign."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _negative(x):
    """1 where the sign bit is set, uint32."""
    return x.to(tl.uint32, bitcast=True) >> 31


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest magnitude of fp32 x along an axis; NaN if there is one."""
    return tl.max(_magnitude(x).to(tl.int32, bitcast=True), axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def nonzero(scale):
    """1 for a scale of 0."""
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def power_of_two(x):
    """The power of two below x fp32, which is not negative, and one over it."""
    exponent = tl.minimum(tl.maximum(x.to(tl.uint32, bitcast=True) >> 23, 16), 238)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def over(x, scale):
    """x / scale, which is finite and above 0, rounded as IEEE's division; one reciprocal a scale, and no branches.

    A fused multiply-add gives the exact remainder of a quotient; two corrections by it end at the rounded quotient
    (Markstein, IBM J. Res. Dev. 34, 1990). Powers of two keep remainders away from subnormal numbers.
    """
    _, inverse = power_of_two(scale)
    scale *= inverse
    reciprocal = 1.0 / scale
    reciprocal = tl.fma(tl.fma(reciprocal, -scale, 1.0), reciprocal, reciprocal)
    # of x and the reciprocal the negatives, so that a zero keeps its sign
    x, reciprocal = x * -inverse, -reciprocal
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(quotient, scale, x), reciprocal, quotient)
    return tl.fma(tl.fma(quotient, scale, x), reciprocal, quotient)


@triton.jit
def _carried(a, words, SMALLEST: tl.constexpr, CUT: tl.constexpr, BITS: tl.constexpr):
    """Codes of magnitudes a in a format that cuts CUT bits, those that the random words of BITS bits carry up.

    SMALLEST is the exponent of its smallest normal number. Below, a loses one bit more for each exponent.
    """
    FIRST: tl.constexpr = SMALLEST - 1 << 23
    normal = (tl.maximum(a, FIRST) - FIRST) >> (CUT - BITS)
    below = SMALLEST - tl.minimum(a >> 23, SMALLEST)
    subnormal = (a & 0x7FFFFF | 0x800000) >> tl.minimum(below + (CUT - BITS), 31)
    return (tl.where(below == 0, normal, subnormal) + words) >> BITS


@triton.jit
def to_fp16(x, words):
    """fp32 -> fp16, stochastically."""
    a = _magnitude(x)
    code = tl.minimum(_carried(a, words & 0x1FFF, 113, 13, 13), 0x7BFF)
    code = tl.where(a >= _INFINITY, tl.where(a > _INFINITY, 0x7E00, 0x7C00), code)
    return (code | _negative(x) << 15).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def to_bf16(x, words):
    """fp32 -> bf16, stochastically."""
    a = _magnitude(x)
    code = tl.minimum((a + (words & 0xFFFF)) >> 16, 0x7F7F)
    code = tl.where(a >= _INFINITY, tl.where(a > _INFINITY, 0x7FC0, 0x7F80), code)
    return (code | _negative(x) << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_e4m3(x, words):
    """fp32 -> the uint8 code of FP8 E4M3; on bits, because no conversion of all GPUs has it."""
    a, sign = _magnitude(x), _negative(x) << 7
    if words is None:
        # beside 2^14 a float holds steps of 2^-9, those of subnormal numbers
        small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
        normal = (a + 0x7FFFF + (a >> 20 & 1)) >> 20
        normal = tl.maximum(normal, 120 << 3) - (120 << 3)
        code = tl.minimum(tl.where(a >= 121 << 23, normal, small), 0x7E)
        return tl.where(a >= _INFINITY, 0x7F, code | sign).to(tl.uint8)
    else:
        code = tl.minimum(_carried(a, words & 0xFFFF, 121, 20, 16), 0x7E)
        return (tl.where(a >= _INFINITY, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """The numbers of uint8 codes, fp32: shifted into place, a code is the fp16 number that is 2^8 times smaller."""
    bits = code.to(tl.uint16)
    x = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def to_integer(x, MOST: tl.constexpr, words, BITS: tl.constexpr = 16):
    """Whole numbers between -MOST and MOST, as fp32."""
    if words is None:
        rounded = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23, beside which a float holds whole numbers
    else:
        rounded = tl.floor(x + (words & ((1 << BITS) - 1)).to(tl.float32) * (1.0 / (1 << BITS)))
    rounded = tl.maximum(tl.minimum(rounded, MOST), -MOST)
    return tl.where(x == x, rounded, 0.0)


@triton.jit
def to_e2m1(x, words):
    """fp32 -> the uint8 code of FP4 E2M1."""
    a = tl.minimum(tl.abs(x), E2M1_MOST)
    if words is not None:
        step = tl.where(a < 2, 0.5, tl.where(a < 4, 1.0, 2.0))
        steps = tl.where(a < 2, 2.0, tl.where(a < 4, 1.0, 0.5))  # in 1
        a = tl.floor(a * steps + (words & 0xFFFF).to(tl.float32) * (1.0 / (1 << 16))) * step
    bits = a.to(tl.uint32, bitcast=True)
    small = (a + 4194304.0).to(tl.uint32, bitcast=True) & 3  # beside 2^22 a float holds halves
    normal = tl.maximum((bits + 0x1FFFFF + (bits >> 22 & 1)) >> 22, 252) - 252
    code = tl.where(a >= 1, normal, small)
    return (tl.where(x == x, code, 0) | _negative(x) << 3).to(tl.uint8)


@triton.jit
def from_e2m1(code):
    """The numbers of uint8 codes, fp32: shifted into place, a code is the fp16 number that is 2^14 times smaller."""
    bits = code.to(tl.uint16)
    return ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def round_up_bf16(x):
    """The smallest bf16 number that is at least x; x is not negative, or NaN."""
    a = x.to(tl.uint32, bitcast=True)
    code = tl.where(x == x, (a + 0xFFFF) >> 16, 0x7FC0)
    return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)
