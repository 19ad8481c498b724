"""Every checkpoint and read format on states alone: its error, its bits, its zeros, and what it may depend on.

Read formats are found by listing their folder, so one that is added is tested without further work.
"""

import pytest
import torch
from backends import given
from budgets import FORMAT_ERROR, STOCHASTIC, assert_same_bits, assert_within, rms
from draws import DEVICE, draw, seeds
from hypothesis import strategies as st
from torch import Tensor

import replayssm
from replayssm.cache import blocks, formats
from replayssm.cache.checkpoint import FORMATS, Checkpoint
from replayssm.cache.read_copy import ReadCopy
from replayssm.cache.selection import Selection

READ = formats.names()
# rounded to the nearest: there is no such checkpoint, but the codes are there to compare with
NEAREST = {
    "fp16_sr": lambda x: x.half().float(),
    "bf16_sr": lambda x: x.bfloat16().float(),
    "int16_sr": lambda x: blocks.from_int16_rows(*blocks.int16_rows(x)),
    "int8_sr": lambda x: blocks.from_int8_blocks(*blocks.int8_blocks(x)),
    "fp8_sr": lambda x: blocks.from_fp8_rows(*blocks.fp8_rows(x)),
    "nvfp4_sr": lambda x: blocks.from_nvfp4(*blocks.nvfp4(x)),
}
# of a number of a head of 64 x 128 and of 128 x 128, with scales and factors, without the fp32 scales of a head
BITS = {
    "bf16": (16, 16),
    "fp8": (8.25, 8.25),
    "int8": (8.5, 8.5),
    "nvfp4": (4.5, 4.5),
    "lr_if4": (4 + 8 / 32 + 8 / 64 + 8 / 128, 4 + 8 / 32 + 16 / 128 + 16 / 128),
    "fp16_sr": (16, 16),
    "bf16_sr": (16, 16),
    "int16_sr": (16.25, 16.25),
    "int8_sr": (8.5, 8.5),
    "fp8_sr": (8.25, 8.25),
    "nvfp4_sr": (4.5, 4.5),
}
both_kinds = pytest.mark.parametrize("name", [*READ, *FORMATS])
shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 5, 40, 81]), st.sampled_from([1, 7, 33, 48])
)


def planes_of(name: str, states: Tensor, seed: int = 0) -> tuple[Tensor, ...]:
    """What is kept of states (rows, nheads, headdim, d_state)."""
    if name in READ:
        copy = ReadCopy(name, tuple(states.shape), torch.float32, DEVICE)
        copy.make(states, Selection())
        return copy.planes
    return stored(name, states, seed).planes


def stored(name: str, states: Tensor, seed: int = 0) -> Checkpoint:
    checkpoint = Checkpoint(name, tuple(states.shape), torch.float32, DEVICE)
    streams = torch.arange(len(states), device=DEVICE) + seed
    checkpoint.save(states, Selection(), seed=streams, position=streams * 7, layer=1)
    return checkpoint


def read_back(name: str, states: Tensor, seed: int = 0) -> Tensor:
    if name not in READ:
        return stored(name, states, seed).load(Selection()).contiguous()
    return formats.find(name).dequantize(planes_of(name, states))[..., : states.shape[-1]].contiguous()


@both_kinds
def test_the_error_on_normal_numbers_is_the_measured_one(name):
    states = draw(0, 1, 64, 64, 128, dtype=torch.float32)
    error = rms(read_back(name, states) - states) / rms(states)
    assert_within(100 * error, FORMAT_ERROR[name], f"error of {name} in percent")
    if name in FORMATS:
        nearest = rms(NEAREST[name](states) - states) / rms(states)
        assert_within(error / nearest, STOCHASTIC, f"error of {name} over the nearest")


@both_kinds
def test_a_number_takes_as_many_bits_as_promised(name):
    for headdim, bits in zip((64, 128), BITS[name], strict=True):
        planes = planes_of(name, torch.zeros(2, 3, headdim, 128, device=DEVICE))
        assert all(len(plane) == 2 for plane in planes), "the cache row comes first"
        heads = sum(
            plane.nbytes for plane in planes if plane.dtype == torch.float32 and plane.ndim < 4 and "fp8" not in name
        )
        heads = 0 if name == "int16_sr" else heads
        assert 8 * (sum(plane.nbytes for plane in planes) - heads) == bits * 2 * 3 * headdim * 128


@both_kinds
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 40, 33), (1, 2, 81, 48)], ids=str)
def test_zeros_stay_zeros_and_are_what_a_format_begins_with(name, shape):
    zeros = torch.zeros(shape, device=DEVICE)
    assert torch.equal(read_back(name, zeros), zeros)
    if name in READ:
        assert torch.equal(ReadCopy(name, shape, torch.float32, DEVICE).load(), zeros)
    else:
        assert torch.equal(Checkpoint(name, shape, torch.float32, DEVICE).load(Selection()), zeros)


@both_kinds
@given(shape=shapes, seed=seeds, power=st.integers(-25, 20))
def test_a_state_and_one_a_power_of_two_larger_are_read_alike(name, shape, seed, power):
    """From 1e-7 to 1e6; plain fp16 has no scale and is told by its range."""
    states = draw(seed, *shape, dtype=torch.float32)
    states[0] *= 1e-3
    if name == "fp16_sr":
        power = power % 8
        states = states.sign() * states.abs().clamp(min=2.0**-14)
    assert torch.equal(read_back(name, states * 2.0**power), read_back(name, states) * 2.0**power)


@both_kinds
@given(shape=shapes, seed=seeds, data=st.data())
def test_a_head_is_kept_by_itself(name, shape, seed, data):
    """The bits of a row do not depend on the other rows or their number, and NaN or infinity stays in its head."""
    states = draw(seed, *shape, dtype=torch.float32)
    row, head = (data.draw(st.integers(0, size - 1)) for size in shape[:2])
    planes = planes_of(name, states)
    if name in READ:
        alone = planes_of(name, states[row : row + 1])
    else:
        alone = Checkpoint(name, (1, *shape[1:]), torch.float32, DEVICE)
        stream = torch.tensor([row], device=DEVICE)
        alone.save(states[row : row + 1], Selection(), seed=stream, position=stream * 7, layer=1)
        alone = alone.planes
    for plane, other in zip(planes, alone, strict=True):
        assert_same_bits(plane[row : row + 1].contiguous(), other, name)
    before = read_back(name, states)
    states[row, head, data.draw(st.integers(0, shape[2] - 1)), data.draw(st.integers(0, shape[3] - 1))] = data.draw(
        st.sampled_from([torch.nan, torch.inf, -torch.inf])
    )
    after = read_back(name, states)
    assert not after[row, head].isfinite().all(), "it must not be hidden"
    after[row, head] = before[row, head]
    assert_same_bits(after, before, name)


@given(shape=shapes, seed=seeds)
@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_what_was_read_is_read_again(name, shape, seed):
    """Up to the last place of a scale, which is a quotient of two rounded numbers."""
    once = read_back(name, draw(seed, *shape, dtype=torch.float32))
    again = read_back(name, once)
    assert ((again - once).abs() <= 4 * torch.finfo(torch.float32).eps * once.abs()).all()


def test_lr_if4_takes_out_what_is_of_low_rank():
    """A state of one term is left to FP8, and one of two where the head is large enough for two."""
    for headdim, terms in ((40, 1), (81, 2)):
        states = torch.einsum("bhrp,bhrn->bhpn", draw(1, 2, 3, terms, headdim), draw(2, 2, 3, terms, 48)).float()
        error = rms(read_back("lr_if4", states) - states) / rms(states)
        # what FP8 leaves of two factors, 2.7 % each and of each term, under a grid that misses 9 % of it
        assert error < 0.027 * (2 * terms) ** 0.5 * 0.15
        assert rms(read_back("nvfp4", states) - states) / rms(states) > 0.05


def test_int8_blocks_keep_small_states():
    states = draw(1, 1, 2, 40, 64, dtype=torch.float32)
    for amplitude in (1e-6, 1e-20, 1e-30):
        error = rms(read_back("int8", states * amplitude) - states * amplitude) / (rms(states) * amplitude)
        assert_within(100 * error, FORMAT_ERROR["int8"], f"error at {amplitude}")


def test_other_streams_positions_and_layers_round_otherwise():
    states = draw(1, 1, 2, 8, 16, dtype=torch.float32)
    found = []
    for seed, position, layer in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        checkpoint = Checkpoint("fp16_sr", tuple(states.shape), torch.float32, DEVICE)
        stream, token = (torch.tensor([value], device=DEVICE) for value in (seed, position))
        checkpoint.save(states, Selection(), seed=stream, position=token, layer=layer)
        found.append(checkpoint.planes[0])
    for i, plane in enumerate(found):
        assert all(not torch.equal(plane, other) for other in found[:i])


HALVES = '''
"""A format in one file: every number halved in its exponent alone, as fp16."""
import torch

def alloc(checkpoint):
    return (torch.zeros_like(checkpoint, dtype=torch.float16),)

def quantize(checkpoint, planes):
    planes[0].copy_(checkpoint / 2)

def dequantize(planes):
    return planes[0].float() * 2
'''


def test_a_new_read_format_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    assert "halves" in formats.names()
    layer = replayssm.ReplayMamba2(8, 2, 3, 5, device=DEVICE)
    outputs: dict[str | None, list[Tensor]] = {None: [], "halves": []}
    for read_format in (None, "halves"):
        cache = replayssm.ReplayStateCache(layer, 2, window=2, read_format=read_format, backend="torch")
        with torch.no_grad():
            for token in draw(1, 9, 2, 1, 8, dtype=torch.float32):
                outputs[read_format].append(layer(token, cache[0]))
                cache.commit()
        assert cache.nbytes_by_part.get("copy", 0) == (2 * 2 * 3 * 5 * 2 if read_format else 0)
    exact, read = (torch.cat(found) for found in outputs.values())
    assert 0 < rms(read - exact) < torch.finfo(torch.float16).eps * rms(exact)
