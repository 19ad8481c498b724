"""Rounding on bits, random words from a counter, codes and their packing: exact, or exhaustively."""

import pytest
import torch
from backends import given
from budgets import assert_mean_of_draws
from draws import DEVICE, draw, seeds
from hypothesis import strategies as st

from replayssm.cache import blocks, rounding
from replayssm.cache.philox import philox, state_words

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of E2M1, by code
LOW = 0xFFFFFFFF


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((LOW, LOW), (LOW, LOW, LOW, LOW), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((1, 0), (2, 3, 4, 0), "e941da94 efd1c11d 27cef87e bb220429"),
    ],
    ids=["zeros", "ones", "small"],
)
def test_philox_gives_the_published_words(key, counter, words):
    def words_of(values):
        return tuple(tensor(value, dtype=torch.int64) for value in values)

    found = philox(words_of(key), words_of(counter))
    assert " ".join(f"{int(word):08x}" for word in found) == words


@given(seed=seeds, position=st.integers(0, 2**40), layer=st.integers(0, 90), row=st.integers(0, 3))
def test_a_rows_words_are_its_own_wherever_it_stands(seed, position, layer, row):
    """And those of a number do not depend on heads beyond its own; d_state 6 leaves a group half used."""
    alone = state_words(tensor(seed, dtype=torch.int64), tensor(position, dtype=torch.int64), layer, (3, 2, 6))
    seeds_, positions = (tensor(*range(4), dtype=torch.int64) for _ in range(2))
    seeds_[row], positions[row] = seed, position
    among = state_words(seeds_, positions, layer, (4, 2, 6))
    assert torch.equal(among[row, :3], alone[0])
    assert ((alone >= 0) & (alone <= LOW)).all()


def test_every_part_of_the_counter_gives_other_words():
    words = [
        state_words(tensor(seed, dtype=torch.int64), tensor(position, dtype=torch.int64), layer, (2, 2, 4))
        for seed, position, layer in [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    ]
    everything = torch.cat([word.flatten() for word in words])
    assert len(everything.unique()) == len(everything)


def numbers_of_every_size(dtype: torch.dtype, lowest: int) -> torch.Tensor:
    """Of both signs, from below the least subnormal number up to some powers of two, and halves and ends of steps."""
    fraction = torch.cat([draw(1, 7).abs().remainder(1), tensor(0, 0.5, 1 - 2.0**-23, dtype=torch.float64)]) + 1
    numbers = fraction.unsqueeze(1) * 2.0 ** torch.arange(lowest, 6, max(2, -lowest // 14), device=DEVICE)
    return torch.cat([numbers.flatten(), -numbers.flatten()]).float()


@pytest.mark.parametrize(
    ("bits", "dtype", "to", "least"),
    [
        (13, torch.float16, lambda x, words: rounding.to_fp16(x, words).double(), 2.0**-24),
        (16, torch.bfloat16, lambda x, words: rounding.to_bf16(x, words).double(), 2.0**-133),
        (16, torch.float8_e4m3fn, lambda x, words: rounding.from_e4m3(rounding.to_e4m3(x, words)).double(), 2.0**-9),
    ],
    ids=["fp16", "bf16", "e4m3"],
)
def test_the_mean_over_all_words_is_the_number(bits, dtype, to, least):
    """To the last of the bits that are spent, subnormal numbers included; only neighbours come out."""
    lowest = {torch.float16: -28, torch.bfloat16: -120, torch.float8_e4m3fn: -13}[dtype]
    words = torch.arange(2**bits, device=DEVICE)
    for x in numbers_of_every_size(dtype, lowest):
        rounded = to(x.expand(len(words)), words + (5 << bits))  # the higher bits are not looked at
        exact = x.double()
        ulp = max(2.0 ** (torch.frexp(exact.abs())[1].item() - 1) * torch.finfo(dtype).eps, least)
        assert abs(rounded.mean() - exact) <= ulp * 2.0**-bits, f"{exact}"
        assert ((rounded - exact).abs() < ulp).all(), f"{exact}"
        assert len(rounded.unique()) <= 2


@pytest.mark.parametrize(("most", "bits"), [(127, 16), (32767, 24)])
def test_whole_numbers_come_out_up_as_often_as_they_are_above(most, bits):
    x = tensor(0.25, -0.25, 3.75, -99.5, 5.0, -7.0, 0.0)
    words = torch.arange(0, 2**bits, 2 ** (bits - 10), device=DEVICE)
    rounded = rounding.to_integer(x.unsqueeze(1).expand(-1, len(words)), most, words, bits)
    assert torch.equal(rounded.mean(1), x)
    assert torch.equal(
        rounding.to_integer(tensor(most + 0.9, -most - 0.9), most, words[-1:], bits), tensor(most, -most)
    )


def test_what_no_float_holds_is_cut_and_what_is_not_finite_stays():
    worst = tensor(1e38, -1e38, torch.inf, -torch.inf, torch.nan)
    words = tensor(*[LOW] * 5, dtype=torch.int64)
    assert rounding.to_fp16(worst, words)[:4].tolist() == [65504, -65504, torch.inf, -torch.inf]
    largest = torch.finfo(torch.float32).max
    assert rounding.to_bf16(tensor(largest), words[:1]).item() == torch.finfo(torch.bfloat16).max
    assert rounding.to_bf16(worst, words)[2:4].tolist() == [torch.inf, -torch.inf]
    for of in (None, words):
        found = rounding.from_e4m3(
            rounding.to_e4m3(torch.cat([worst, tensor(449.0)]), None if of is None else words[:1])
        )
        assert found[:2].tolist() == [448, -448]
        assert found[2:5].isnan().all()
        assert found[5] == 448
    for to in (rounding.to_fp16, rounding.to_bf16):
        assert to(worst, words)[4].isnan()
    assert rounding.to_integer(worst, 127, None).tolist() == [127, -127, 127, -127, 0]
    assert (rounding.to_e2m1(worst, None) & 7).tolist() == [7, 7, 7, 7, 0]


def test_e4m3_to_the_nearest_is_the_cast_of_torch():
    x = torch.cat([numbers_of_every_size(torch.float8_e4m3fn, -14), tensor(448, -448, 0, -0.0, 0.017578125)])
    assert torch.equal(rounding.to_e4m3(x, None), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e2m1_is_the_nearest_of_its_table_with_ties_to_even_codes():
    x = torch.cat([torch.linspace(-7, 7, 5601, device=DEVICE), tensor(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5).repeat(2)])
    x[-7:] *= -1
    codes = rounding.to_e2m1(x, None)
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        distances = [abs(abs(value) - magnitude) for magnitude in MAGNITUDES]
        nearest = [place for place, distance in enumerate(distances) if distance == min(distances)]
        assert code & 7 == min(nearest, key=lambda place: place % 2), f"{value}"
        assert code >> 3 == (value < 0)
    assert rounding.from_e2m1(torch.arange(16, dtype=torch.uint8, device=DEVICE)).tolist() == MAGNITUDES + [
        -m for m in MAGNITUDES
    ]


def test_e2m1_goes_up_as_often_as_a_number_is_above():
    x, words = tensor(0.1, 0.6, 1.9, 2.25, 3.5, 5.0, 5.9, -3.25, 6.0, 9.0), torch.arange(2**16, device=DEVICE)
    numbers = rounding.from_e2m1(rounding.to_e2m1(x.unsqueeze(1).expand(-1, len(words)), words))
    step = tensor(0.5, 0.5, 0.5, 1, 1, 2, 2, 1, 1, 1)
    assert ((numbers.double().mean(1) - x.clamp(max=6)).abs() <= step * 2.0**-16 + 1e-7).all()


def test_packing_keeps_every_byte():
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = blocks.unpacked(every)
    assert codes[:6].tolist() == [0, 0, 1, 0, 2, 0]  # the even number is in the low half
    assert torch.equal(blocks.packed(codes), every)


def test_a_scale_in_bf16_is_rounded_up_and_no_further():
    x = torch.cat([draw(1, 200, dtype=torch.float32).abs() * 2.0**-k for k in (0, 20, 130)] + [tensor(0, 1, 1.0078125)])
    up = rounding.round_up_bf16(x)
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert (up.float() >= x).all()
    assert (below.float() < x)[x > 0].all()
    odd = rounding.round_up_bf16(tensor(torch.nan, torch.inf))
    assert odd[0].isnan()
    assert odd[1] == torch.inf


@pytest.mark.parametrize(
    ("to", "ulp"), [(rounding.to_fp16, 2.0**-11), (rounding.to_bf16, 2.0**-8)], ids=["fp16", "bf16"]
)
def test_a_slow_decay_is_not_swallowed(to, ulp):
    """0.9999 to the 5000th, rounded each time: to the nearest nothing ever happens."""
    lanes, steps, generator = 2048, 5000, torch.Generator().manual_seed(1)
    x, nearest = torch.ones(lanes, device=DEVICE), tensor(1)
    for _ in range(steps):
        x = to(x * 0.9999, torch.randint(2**16, (lanes,), generator=generator).to(DEVICE)).float()
        nearest = (nearest * 0.9999).to(torch.float16 if to is rounding.to_fp16 else torch.bfloat16).float()
    assert nearest.item() == 1
    # each time a lane loses x / 10000, a fraction f of a step, with a variance of f (1 - f) steps squared
    loss = 0.9999 ** torch.arange(steps, dtype=torch.float64) / 1e4 / ulp
    assert_mean_of_draws(x, 0.9999**steps, (loss * (1 - loss)).sum().item() * ulp**2, "0.9999^5000")
