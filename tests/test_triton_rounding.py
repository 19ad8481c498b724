"""Rounding and random words in kernels: the bits of plain PyTorch, for numbers of every size and every kind of word."""

import pytest

pytest.importorskip("triton")
import torch
import triton
import triton.language as tl
from budgets import assert_same_bits
from draws import DEVICE

from replayssm.cache import rounding
from replayssm.cache.philox import state_words
from replayssm.ops import triton_rounding

COUNT, BLOCK = 16384, 2048
HALVES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0**-10, 1.5 * 2.0**-9, 464.0, 126.5, 17.0, 19.0, 1.0625]
EDGES = [0.0, -0.0, 2.0**-6, 2.0**-9, 2.0**-24, 2.0**-25, 2.0**-40, 1e-40, 448.0, 449.0, 465.0, 65504.0, 65520.0, 1e38]


@triton.jit
def _as_whole(x, words):
    return triton_rounding.to_integer(x, 127, words)


@triton.jit
def _as_wide_whole(x, words):
    return triton_rounding.to_integer(x, 32767, words, 24)


@triton.jit
def _up(x, words):
    return triton_rounding.round_up_bf16(tl.abs(x))


@triton.jit
def _through_e4m3(x, words):
    return triton_rounding.from_e4m3(triton_rounding.to_e4m3(x, words))


@triton.jit
def _through_e2m1(x, words):
    return triton_rounding.from_e2m1(triton_rounding.to_e2m1(x, words))


ROUND = {
    "fp16": (triton_rounding.to_fp16, rounding.to_fp16),
    "bf16": (triton_rounding.to_bf16, rounding.to_bf16),
    "e4m3": (triton_rounding.to_e4m3, rounding.to_e4m3),
    "e2m1": (triton_rounding.to_e2m1, rounding.to_e2m1),
    "int8": (_as_whole, lambda x, words: rounding.to_integer(x, 127, words)),
    "int16": (_as_wide_whole, lambda x, words: rounding.to_integer(x, 32767, words, 24)),
    "a scale": (_up, lambda x, words: rounding.round_up_bf16(x.abs())),
    "e4m3 and back": (_through_e4m3, lambda x, words: rounding.from_e4m3(rounding.to_e4m3(x, words))),
    "e2m1 and back": (_through_e2m1, lambda x, words: rounding.from_e2m1(rounding.to_e2m1(x, words))),
}
ONLY_STOCHASTIC = ("fp16", "bf16", "int16")


@triton.jit
def round_all(out, x, words, BLOCK: tl.constexpr, TO: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    drawn = None
    if words is not None:
        drawn = tl.load(words + i).to(tl.uint32)
    tl.store(out + i, TO(tl.load(x + i), drawn))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("name", ROUND)
def test_rounding_gives_the_bits_of_plain_pytorch(name, stochastic):
    """Any bits as numbers, numbers near the formats' own, their halves and ends; words with their lowest bits set."""
    if not stochastic and name in ONLY_STOCHASTIC:
        pytest.skip("there is no such rounding to the nearest")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, generator=generator) * 2.0 ** torch.randint(-40, 12, (COUNT,), generator=generator)
    x[: COUNT // 4] = torch.randint(-(2**31), 2**31, (COUNT // 4,), generator=generator).int().view(torch.float32)
    few = torch.tensor([*HALVES, *EDGES, torch.inf])
    x[-2 * len(few) :] = torch.cat([few, -few])
    words = torch.randint(0, 2**32, (COUNT,), generator=generator)
    words[::3] |= 0xFFFFFF  # the largest draws decide about the smallest numbers
    x, words = x.to(DEVICE), words.to(DEVICE) if stochastic else None
    of_kernel, of_torch = ROUND[name]
    expected = of_torch(x, words)
    got = torch.empty_like(expected)
    round_all[(COUNT // BLOCK,)](got, x, words, BLOCK, of_kernel)
    if expected.is_floating_point():  # which NaN it is is left open, and so is the sign of a whole zero
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = (torch.where(y.isnan() | (y == 0), 0, y) for y in (got, expected))
    assert_same_bits(got, expected, name)


@triton.jit
def divide_all(out, x, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, triton_rounding.over(tl.load(x + i), tl.load(scale + i)))


@pytest.mark.parametrize("kind", ["any", "near a rounding boundary", "zero"])
def test_a_division_is_rounded_as_ieee_does(kind):
    """Scales of every size; any quotients, quotients half-way between floats, and zeros, which keep their sign."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(1, 0x7F800000 - 1, (COUNT,), generator=generator).int()
    scale = bits.view(torch.float32).clamp(1e-36, 1e36)
    ratio = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    if kind != "any":  # the float next to a product of the scale and the middle of two floats
        ratio = ratio.float().double() * (1 + 2.0**-24)
    x = (scale.double() * ratio).float()
    if kind == "zero":
        x = torch.where(x < 0, -0.0, 0.0)
    x, scale = x.to(DEVICE), scale.to(DEVICE)
    got = torch.empty_like(x)
    divide_all[(COUNT // BLOCK,)](got, x, scale, BLOCK)
    assert_same_bits(got, x / scale, kind)


@triton.jit
def draw_all(
    out, seed, position, layer, head, P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    p = tl.arange(0, ROWS)[None, :]
    words = triton_rounding.state_words(tl.load(seed), tl.load(position), layer, head, p, P, N, KEYS)
    n = tl.arange(0, KEYS // 4)[:, None] * 4 + tl.arange(0, 4)
    row = p[:, :, None, None]
    tl.store(out + row * N + n, words.to(tl.int64), mask=(row < P) & (n < N))


@pytest.mark.parametrize(("seed", "position", "layer"), [(3, 4, 5), (-1, 2**40 + 7, 1), (2**63 - 5, 2**32 - 1, 16)])
def test_words_are_those_of_plain_pytorch(seed, position, layer):
    nheads, headdim, d_state = 3, 5, 10
    streams, positions = (torch.tensor([x], device=DEVICE) for x in (seed, position))
    expected = state_words(streams, positions, layer, (nheads, headdim, d_state))[0]
    for head in range(nheads):
        got = torch.empty_like(expected[head])
        draw_all[(1,)](got, streams, positions, layer, head, headdim, d_state, 8, 16)
        assert_same_bits(got, expected[head].contiguous(), f"words of head {head}")
