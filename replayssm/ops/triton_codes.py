"""Numbers of few bits as an operand of tensor cores, and the new tokens' vectors as the other one.

Two codes at a time: shifted into place, an E2M1 code is the fp16 number that is 2^14 times smaller, a whole number of 3
bits one that is smaller by another power of two. Multiplied by the E4M3 scale of their block they come to a common
size, and products of so few bits are exact in fp16. Sums are in fp32.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import is_cuda
from triton.runtime.jit import constexpr_function

from replayssm.ops.triton_rounding import power_of_two

# Axes: P headdim, N d_state; p and n are indices of rows and keys of a state, t of new tokens.

SHRUNK = tl.constexpr(2.0**10)  # numbers come so many times too small, to stay below the largest fp16


@constexpr_function
def speaks_ptx() -> bool:
    """Whether a kernel may say in PTX what a compiler does not see."""
    return not knobs.runtime.interpret and is_cuda()


@triton.jit
def as_fp16(x):
    """x (t, n) over a power of two (t,), fp16 with the largest of each token between 1 and 2; and that power."""
    scale, inverse = power_of_two(tl.max(tl.abs(x.to(tl.float32)), axis=1))
    return (x.to(tl.float32) * inverse[:, None]).to(tl.float16), scale


@triton.jit
def e4m3_as_fp16(code):
    """The numbers of E4M3 codes over 2^8, fp16."""
    code = code.to(tl.uint16)
    return (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _e4m3(code, times: tl.constexpr):
    """The number of an E4M3 code without its sign, times a power of two, fp16."""
    return ((code & 0x7F).to(tl.uint16) << 7).to(tl.float16, bitcast=True) * (times * 2.0**8)


@triton.jit
def _scaled(pair, scale):
    """Two fp16 numbers of a word, times scale."""
    if speaks_ptx():  # they stand in a register as they are multiplied
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 both; mov.b32 both, {$3, $3}; mul.rn.f16x2 both, $2, both; mov.b32 {$0, $1}, both; }",
            "=h,=h,r,h",
            [pair, scale],
            (tl.float16, tl.float16),
            True,
            1,
        )
        return low, high
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low * scale, high * scale


@triton.jit
def _pair(words, magnitude, scale, K: tl.constexpr):
    """Codes K and K + 4 of words of 8, as fp16, times scale; magnitude holds all but the sign of both, in place."""
    if K < 3:
        sign = words << (12 - 4 * K)
    else:
        sign = words
    return _scaled((sign & 0x80008000) | magnitude, scale)


@triton.jit
def _e2m1_pair(words, scale, K: tl.constexpr):
    if K < 3:
        magnitude = words << (9 - 4 * K)
    else:
        magnitude = words >> 3
    return _pair(words, magnitude & 0x0E000E00, scale, K)


@triton.jit
def _if4_pair(words, shift, scale, K: tl.constexpr):
    return _pair(words, ((words >> (4 * K)) & 0x00070007) << shift, scale, K)


@triton.jit
def as_codes(x, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """x (n, columns) with keys in the order of ``_in_turn``: the 8 of a word as pairs K, K + 4, as it is taken apart;
    words of each quarter in turn, as 4 threads hold them.
    """
    QUARTERS: tl.constexpr = 4 if KEYS >= 32 else 1
    x = tl.permute(tl.reshape(x, (QUARTERS, KEYS // 8 // QUARTERS, 2, 4, COLUMNS)), (1, 0, 3, 2, 4))
    return tl.reshape(x, (KEYS, COLUMNS))


@triton.jit
def _in_turn(low, high, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Numbers (ROWS, KEYS / 8, 2, 2), codes 0 to 3 and 4 to 7 of words, as (ROWS, KEYS) for ``as_codes``."""
    QUARTERS: tl.constexpr = 4 if KEYS >= 32 else 1
    numbers = tl.reshape(tl.join(low, high), (ROWS, QUARTERS, KEYS // 8 // QUARTERS, 8))
    return tl.reshape(tl.permute(numbers, (0, 2, 1, 3)), (ROWS, KEYS))


@triton.jit
def _by_word(x, ROWS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr):
    """x (ROWS, WORDS / EACH) of blocks, for each word of them."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, WORDS // EACH, EACH)), (ROWS, WORDS))


@triton.jit
def from_e2m1(words, scales, ROWS: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr):
    """The numbers of words (ROWS, KEYS / 8) of E2M1 codes under the E4M3 scales of blocks of EACH words.

    Returns:
        fp16 (ROWS, KEYS), keys as ``as_codes`` has them; the numbers over SHRUNK.
    """
    scale = _by_word(_e4m3(scales, 2.0**4), ROWS, KEYS // 8, EACH)
    a0, b0 = _e2m1_pair(words, scale, 0)
    a1, b1 = _e2m1_pair(words, scale, 1)
    a2, b2 = _e2m1_pair(words, scale, 2)
    a3, b3 = _e2m1_pair(words, scale, 3)
    low, high = tl.join(tl.join(a0, a2), tl.join(a1, a3)), tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return _in_turn(low, high, ROWS, KEYS)


@triton.jit
def from_if4(words, scales, ROWS: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr):
    """As ``from_e2m1``, where the sign bit of a scale says that its codes are a sign and a whole number."""
    whole = scales >= 128
    # a whole number seven places up, still a subnormal fp16 number, is 2^17 times too small
    shift = _by_word(tl.where(whole, 7, 9), ROWS, KEYS // 8, EACH).to(tl.uint32)
    scale = _by_word(tl.where(whole, _e4m3(scales, 2.0**7), _e4m3(scales, 2.0**4)), ROWS, KEYS // 8, EACH)
    a0, b0 = _if4_pair(words, shift, scale, 0)
    a1, b1 = _if4_pair(words, shift, scale, 1)
    a2, b2 = _if4_pair(words, shift, scale, 2)
    a3, b3 = _if4_pair(words, shift, scale, 3)
    low, high = tl.join(tl.join(a0, a2), tl.join(a1, a3)), tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return _in_turn(low, high, ROWS, KEYS)


@triton.jit
def _taken_apart(words):
    """Bytes 0 and 2, and bytes 1 and 3, of words of 4 signed bytes: pairs of fp16 numbers, 1024 + 128 more."""
    if speaks_ptx():
        return tl.inline_asm_elementwise(
            "{ .reg .b32 up; xor.b32 up, $2, 0x80808080; prmt.b32 $0, up, 0x64646464, 0x4240; "
            "prmt.b32 $1, up, 0x64646464, 0x4341; }",
            "=&r,=r,r",
            [words],
            (tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        return (words & 0x00FF00FF) ^ 0x64806480, ((words >> 8) & 0x00FF00FF) ^ 0x64806480


@triton.jit
def _bytes(pair, scale):
    """The two bytes of a pair as fp16 times scale."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return (low - 1152.0) * scale, (high - 1152.0) * scale


@triton.jit
def from_int8(words, scales, ROWS: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr):
    """The numbers of words (ROWS, KEYS / 4) of 4 signed bytes under the fp16 scales of blocks of EACH words.

    Returns:
        fp16 (ROWS, KEYS), keys as ``as_bytes`` has them.
    """
    scale = _by_word(scales, ROWS, KEYS // 4, EACH)
    even, odd = _taken_apart(words)
    a0, b0 = _bytes(even, scale)
    a1, b1 = _bytes(odd, scale)
    return tl.reshape(tl.join(tl.join(a0, a1), tl.join(b0, b1)), (ROWS, KEYS))


@triton.jit
def as_bytes(x, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """x (n, columns) with keys in the order of ``from_int8``: of each 4 as 0, 2, 1, 3."""
    x = tl.permute(tl.reshape(x, (KEYS // 4, 2, 2, COLUMNS)), (0, 2, 1, 3))
    return tl.reshape(x, (KEYS, COLUMNS))
