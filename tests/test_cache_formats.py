"""Caches in every format: what they hold, what they report, what they refuse."""

import pytest
import torch
from budgets import assert_same_bits, rms
from draws import DEVICE, draw
from format_caches import KINDS, READ, assert_copies_follow, checkpoint_planes, new_cache
from passthrough import ChannelDelta, HeadDelta, HeadPlain
from programs import BATCH
from refusals import refused
from torch import Tensor

from replayssm import ReplayStateCache
from replayssm.cache.checkpoint import FORMATS, NAMES
from replayssm.cache.philox import state_words
from replayssm.cache.selection import Selection
from replayssm.cache.stored_state import expect_runnable

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("checkpoint", "read_format"), [("int8_sr", "lr_if4")])
def test_a_step_is_one_graph_of_torch_compile(checkpoint, read_format):
    torch._dynamo.reset()
    layer = HeadDelta()
    plain, cache = (new_cache(layer, checkpoint, read_format, window=2) for _ in range(2))
    compiled = torch.compile(lambda x, state: layer(x, state), fullgraph=True, backend="eager")
    for number in range(4):
        x = draw(number, BATCH, 1, layer.features, dtype=torch.float32)
        with torch.no_grad():
            assert_same_bits(compiled(x, cache[0]), layer(x, plain[0]), f"step {number}")
        for each in (plain, cache):
            each.commit()
    for name, plane in checkpoint_planes(plain).items():
        assert_same_bits(checkpoint_planes(cache)[name], plane, name)


@every_kind
@pytest.mark.parametrize("checkpoint", NAMES)
def test_what_is_stored_is_near_the_exact_state(kind, checkpoint):
    """After one flush of an exact state: what a number loses is within a step of its format."""
    layer = KINDS[kind]()
    exact, cache = (new_cache(layer, name, None, window=4, step_tokens=4) for name in ("fp32", checkpoint))
    x = draw(1, BATCH, 4, layer.features, dtype=torch.float32)
    for each in (exact, cache):
        with torch.no_grad():
            layer(x, each[0])
        each.commit()
        each.flush()
    state, kept = exact[0].checkpoint, cache[0].checkpoint
    steps = {"fp32": 0, "fp16_sr": 2**-10, "bf16_sr": 2**-7, "int16_sr": 1 / 32767, "int8_sr": 1 / 126}
    of_largest = {**steps, "fp8_sr": 32 / 448, "nvfp4_sr": 2 / 6 * 1.0625 + 1 / 16}[checkpoint]
    largest = state.abs().amax((-1, -2), keepdim=True)
    assert ((kept - state).abs() <= of_largest * largest + torch.finfo(torch.float32).eps * largest).all()
    assert (rms(kept - state) > 0) == (checkpoint != "fp32")


@pytest.mark.parametrize("read_format", READ)
def test_a_write_to_the_checkpoint_makes_its_copy(read_format):
    layer = HeadPlain()
    cache = new_cache(layer, "fp32", read_format, window=4)
    states = draw(5, BATCH, 4, 5, 7, dtype=torch.float32)
    cache[0].checkpoint = states
    assert_same_bits(cache[0].checkpoint, states)
    assert_copies_follow(cache, "assigned")
    assert rms(cache[0].stored.copy.load() - states) < 0.2 * rms(states)
    cache[0].tensors()["checkpoint"].mul_(2)
    cache[0].rebuild_copy()
    assert_copies_follow(cache, "rebuilt")
    assert rms(cache[0].stored.copy.load() - 2 * states) < 0.2 * rms(states)
    with refused(ValueError, "checkpoint must be (3, 4, 5, 7)", "(2, 4, 5, 7)", cache=cache):
        cache[0].checkpoint = states[:2]


@pytest.mark.parametrize("checkpoint", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_is_reported_and_stays_in_its_head(checkpoint, value):
    layer = HeadDelta()
    clean, cache = (new_cache(layer, checkpoint, "lr_if4", window=2) for _ in range(2))
    row, head = 1, 2
    for number in range(6):
        x = draw(number, BATCH, 1, layer.features, dtype=torch.float32)
        with torch.no_grad():
            expected = layer(x, clean[0])
            if number == 1:
                x[row, 0, 4 * 7 + head * 5] = value  # of v
            found = layer(x, cache[0])
        others = torch.ones(BATCH, 1, 4, 5, dtype=torch.bool)
        others[row, :, head] = False
        assert_same_bits(found.unflatten(-1, (4, 5))[others], expected.unflatten(-1, (4, 5))[others], f"step {number}")
        for each in (clean, cache):
            each.commit()
    clean.check()
    with pytest.raises(
        RuntimeError, match=r"ReplayStateCache\.check: 0: 1 states .* NaN or infinity.* reset the cache"
    ):
        cache.check()
    cache.reset(row)
    cache.check()


@pytest.mark.parametrize("checkpoint", ["fp16_sr", "bf16_sr"])
def test_numbers_that_were_cut_are_counted(checkpoint):
    cache = new_cache(HeadPlain(), checkpoint, None, window=2)
    states = draw(1, BATCH, 4, 5, 7, dtype=torch.float32)
    cache[0].checkpoint = states
    cache.check()
    largest = torch.finfo(torch.float32).max
    states[0, 0, 0, :3] = torch.tensor([largest, -largest, 1.0])
    cache[0].checkpoint = states
    with pytest.raises(RuntimeError, match="2 numbers of the checkpoint were cut"):
        cache.check()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            ({"checkpoint": name}, ["checkpoint must", f"'{name}'", f"{name}_sr", "swallows"])
            for name in ("fp8", "int8")
        ),
        ({"checkpoint": "fp16"}, ["checkpoint must", "'fp16'", "fp16_sr", "swallows"]),
        ({"checkpoint": None}, ["checkpoint must", "None"]),
        ({"read_format": "int4"}, ["read_format must", "'int4'", *READ]),
        ({"read_format": "fp16_sr"}, ["read_format must", "'fp16_sr'"]),
    ],
    ids=str,
)
def test_formats_that_are_none_are_refused(arguments, words):
    with refused(NotImplementedError, "ReplayStateCache", *words):
        ReplayStateCache([HeadPlain()], 1, **arguments)


@pytest.mark.parametrize(("checkpoint", "read_format"), [("fp16_sr", None), ("fp32", "nvfp4")], ids=str)
def test_formats_are_refused_where_they_cannot_run(checkpoint, read_format):
    """Not by kernels in fp64, nor on a device without FP8; sizes can be asked for all the same."""
    pytest.importorskip("triton")
    asked = dict(checkpoint=checkpoint, read_format=read_format)
    with refused(NotImplementedError, "LayerState", repr(checkpoint), repr(read_format), "backend='torch'"):
        ReplayStateCache([HeadPlain(dtype=torch.float64)], 1, backend="triton", **asked)
    with pytest.raises(NotImplementedError, match=r"on mps; got .*cpu and cuda"):
        expect_runnable("here", checkpoint, read_format, torch.device("mps"))
    assert ReplayStateCache.estimate([HeadPlain()], 2, backend="triton", **asked)["checkpoint"] > 0


@pytest.mark.parametrize("checkpoint", NAMES)
@pytest.mark.parametrize("read_format", [None, *READ])
def test_bytes_are_counted_to_the_last(checkpoint, read_format):
    layers = [HeadPlain(40, 48), ChannelDelta()]
    settings = dict(window=5, step_tokens=2, checkpoint=checkpoint, read_format=read_format, backend="torch")
    cache = ReplayStateCache(layers, 3, **settings)
    assert ReplayStateCache.estimate(layers, 3, **settings) == cache.nbytes_by_part | {"total": cache.nbytes}
    parts = {"checkpoint": 0, "copy": 0}
    for state in (cache[0], cache[1]):
        parts["checkpoint"] += sum(plane.nbytes for plane in state.stored.checkpoint.planes)
        parts["copy"] += 0 if read_format is None else sum(plane.nbytes for plane in state.stored.copy.planes)
    assert cache.nbytes_by_part["checkpoint"] == parts["checkpoint"]
    assert cache.nbytes_by_part.get("copy", 0) == parts["copy"]
    before = {name: tensor.data_ptr() for name, tensor in cache.tensors().items()}
    with torch.no_grad():
        for t in (3, 1, 2, 1, 2, 2):
            for place, layer in enumerate(layers):
                layer(draw(t, 3, t, layer.features, dtype=torch.float32), cache[place])
            cache.commit()
    cache.reorder(torch.tensor([2, 0, 0], device=DEVICE))
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors().items()} == before


def test_an_fp64_layer_keeps_its_sums_in_fp64():
    layer = HeadDelta(dtype=torch.float64)
    cache = ReplayStateCache([layer], 2, window=2, checkpoint="int16_sr", read_format="lr_if4", backend="torch")
    with torch.no_grad():
        for number in range(5):
            y = layer(draw(number, 2, 1, layer.features), cache[0])
            cache.commit()
    assert y.dtype == cache[0].checkpoint.dtype == cache[0].state().dtype == torch.float64


def test_window_0_reads_the_exact_state_at_every_step():
    """Every row folds at every step, so the copy is never read."""
    layer = HeadPlain()
    plain, cache = (new_cache(layer, "fp32", name, window=0) for name in (None, "nvfp4"))
    for number in range(4):
        x = draw(number, BATCH, 1, layer.features, dtype=torch.float32)
        with torch.no_grad():
            assert_same_bits(layer(x, cache[0]), layer(x, plain[0]), f"step {number}")
        for each in (plain, cache):
            each.commit()


def test_a_selection_writes_its_rows_alone():
    cached, values = draw(1, 4, 2), draw(2, 4, 2)
    which = torch.tensor([True, False, True, False], device=DEVICE)
    for selection in (Selection(which), masked_selection(which)):
        target = cached.clone()
        selection.write(target, selection.take(values))
        assert_same_bits(target, torch.where(which.unsqueeze(1), values, cached))
    assert Selection(which & False).none == (DEVICE.type == "cpu")  # elsewhere to look would be to wait
    assert not Selection().none


def masked_selection(which: Tensor) -> Selection:
    selection = Selection()
    selection.mask = which
    return selection


@every_kind
@pytest.mark.parametrize("checkpoint", NAMES)
def test_rows_that_have_nothing_to_fold_keep_their_bits(kind, checkpoint):
    """To round again what is stored would be a random walk: not in a scan without a token, nor where nothing waits."""
    layer = KINDS[kind]()

    def planes(cache: ReplayStateCache, row: int) -> list[Tensor]:
        return [tensor[row].clone() for tensor in cache[0].stored.tensors().values()]

    cache = new_cache(layer, checkpoint, "nvfp4", window=0)
    mask = torch.ones(BATCH, 4, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        layer(draw(1, BATCH, 9, layer.features, dtype=torch.float32), cache[0])
        cache.commit()
        scanned = planes(cache, 1)
        mask[1] = 0
        layer(draw(2, BATCH, 4, layer.features, dtype=torch.float32), cache[0], attention_mask=mask)
        cache.commit()
        layer(draw(3, 2, 4, layer.features, dtype=torch.float32), cache[0], rows=torch.tensor([2, 0], device=DEVICE))
        cache.commit()
        layer(draw(4, BATCH, 1, layer.features, dtype=torch.float32), cache[0])  # flushes, and finds no record
        cache.commit()
        cache.flush([0, 2])
    for found, expected in zip(planes(cache, 1), scanned, strict=True):
        assert_same_bits(found, expected)
    with torch.no_grad():
        layer(draw(5, BATCH, 1, layer.features, dtype=torch.float32), cache[0])
        cache.commit()
    assert any(not torch.equal(found, before) for found, before in zip(planes(cache, 1), scanned, strict=True))


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_the_words_are_those_of_the_rows_stream_its_last_token_and_the_layer(checkpoint):
    """Of a scan and of a flush of rows of different lengths, in the second layer of a cache, far into a stream."""
    layers, seeds = [HeadPlain(), HeadDelta()], torch.tensor([2**40 + 5, -3, 7], device=DEVICE)
    exact, cache = (
        ReplayStateCache(layers, BATCH, window=4, step_tokens=2, checkpoint=name, seed=seeds, backend="torch")
        for name in ("fp32", checkpoint)
    )
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], device=DEVICE)
    # what the second layer is stored as, from what it is: the same, because only the first flush rounds
    for t, attention_mask in ((5, mask), (2, None)):
        for each in (exact, cache):
            with torch.no_grad():
                for place, layer in enumerate(layers):
                    x = draw(t, BATCH, t, layer.features, dtype=torch.float32)
                    layer(x, each[place], attention_mask=attention_mask)
            each.commit()
        if t == 2:
            exact[1].checkpoint = cache[1].checkpoint
            state = exact[1].state()
            cache.flush()
        else:
            state = exact[1].checkpoint
        last = torch.tensor([4, 2, 3], device=DEVICE) + (2 if t == 2 else 0)
        words = state_words(seeds, last, 1, (4, 5, 7))
        for plane, expected in zip(
            cache[1].stored.checkpoint.planes, FORMATS[checkpoint].encode(state, words), strict=True
        ):
            assert_same_bits(plane, expected.contiguous(), f"after {t} tokens")
