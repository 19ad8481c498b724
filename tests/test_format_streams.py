"""What formats do to outputs over thousands of tokens of streams as a language model makes them.

Reading a copy costs the same at any length; storing in few bits costs more the longer the text is.
"""

from collections.abc import Callable

import pytest
import torch
from budgets import assert_on_stream
from streams import Stream, errors_by_position, read_errors
from torch import Tensor

from replayssm.cache import blocks, formats
from replayssm.cache.checkpoint import FORMATS
from replayssm.cache.philox import state_words

EARLY, LATE = (0, 512), (2048, 4096)
NEAR, FAR = (1024, 2048), (8192, 16384)
both_kinds = pytest.mark.parametrize("kind", ["mamba2", "gated_deltanet"])


def read(name: str) -> Callable[[Tensor], Tensor]:
    """Copies that steps read."""
    chosen = formats.find(name)

    def copy(states: Tensor) -> Tensor:
        planes = chosen.alloc(states)
        chosen.quantize(states, planes)
        return chosen.dequantize(planes)

    return copy


def stored(name: str, window: int = 16) -> Callable[[Tensor, int], Tensor]:
    """Checkpoints of one row, which flushes at the end of each window."""
    chosen = FORMATS[name]

    def store(states: Tensor, at: int) -> Tensor:
        seed, position = torch.tensor([11]), torch.tensor([window * (at + 1) - 1])
        words = state_words(seed, position, 0, (states.shape[0], states.shape[1], states.shape[2]))
        return chosen.decode(*chosen.encode(states, words[0]))

    return store


def exactly(states: Tensor, at: int) -> Tensor:
    return states


def percent(errors: Tensor) -> float:
    return 100 * errors.mean().item()


@both_kinds
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_reading_costs_the_same_at_any_length_and_storing_does_not(kind, seed):
    """A copy in 4 bits misses as much late as early; a checkpoint in 4 bits misses more and more."""
    stream = Stream(kind, 4096, 8, seed)
    apart = errors_by_position(stream, exactly, read("nvfp4"), [EARLY, LATE])
    shared = errors_by_position(stream, stored("nvfp4_sr"), None, [EARLY, LATE])
    nearest = errors_by_position(
        stream, lambda states, at: blocks.from_nvfp4(*blocks.nvfp4(states)), None, [EARLY, LATE]
    )
    for (early, late), what in (
        (apart, "read nvfp4"),
        (shared, "stored nvfp4_sr"),
        (nearest, "stored nvfp4 to the nearest"),
    ):
        assert_on_stream(percent(late) / percent(early), f"late over early, {what}", kind)
    assert_on_stream(percent(shared[1]) / percent(apart[1]), "stored nvfp4_sr over read nvfp4", kind)
    (low_rank,) = errors_by_position(stream, exactly, read("lr_if4"), [LATE])
    assert_on_stream(percent(low_rank) / percent(apart[1]), "read lr_if4 over read nvfp4", kind)
    for name in ("fp16_sr", "int16_sr"):
        (late,) = errors_by_position(stream, stored(name), None, [LATE])
        assert_on_stream(percent(late), f"stored {name}", kind)


@both_kinds
@pytest.mark.parametrize("flavour", ["default", pytest.param("white", marks=pytest.mark.nightly)])
def test_what_is_of_low_rank_is_read_better(kind, flavour):
    nvfp4, lr_if4, int8, fp8 = (read_errors(kind, flavour, read(name)) for name in ("nvfp4", "lr_if4", "int8", "fp8"))
    gain = (lr_if4 / nvfp4).log().mean().exp().item()
    assert_on_stream(gain, f"read lr_if4 over read nvfp4, {flavour}", kind)
    assert_on_stream((lr_if4 / nvfp4).max().item(), "read lr_if4 over read nvfp4, worst head", kind)
    assert_on_stream((int8 / fp8).log().mean().exp().item(), "read int8 over read fp8", kind)


@pytest.mark.nightly
@both_kinds
def test_so_it_is_over_16384_tokens(kind):
    stream = Stream(kind, 16384, 16, 1)
    near, apart = errors_by_position(stream, exactly, read("nvfp4"), [NEAR, FAR])
    assert_on_stream(percent(apart) / percent(near), "far over near, read nvfp4", kind)
    assert_on_stream(percent(apart), "far, read nvfp4", kind)
    (halved,) = errors_by_position(stream, stored("fp16_sr"), read("nvfp4"), [FAR])
    assert_on_stream(percent(halved) / percent(apart), "read nvfp4, stored fp16_sr over fp32", kind)
    early, shared = errors_by_position(stream, stored("nvfp4_sr"), None, [EARLY, FAR])
    assert_on_stream(percent(shared) / percent(early), "far over near, stored nvfp4_sr", kind)
    assert_on_stream(percent(shared) / percent(apart), "far, stored nvfp4_sr over read nvfp4", kind)
    for name in ("fp16_sr", "int16_sr"):
        (far,) = errors_by_position(stream, stored(name), None, [FAR])
        assert_on_stream(percent(far), f"far, stored {name}", kind)


@pytest.mark.nightly
def test_a_state_that_is_stored_every_token_needs_stochastic_rounding():
    stream = Stream("mamba2", 8192, 16, 1, window=1)
    for name, store in (
        ("stored fp16 to the nearest", lambda states, at: states.half().float()),
        ("stored fp16_sr", stored("fp16_sr", window=1)),
    ):
        (errors,) = errors_by_position(stream, store, None, [(4096, 8192)])
        assert_on_stream(100 * errors.max().item(), f"window 1, {name}, worst head", "mamba2")
