"""Arguments of a step and of the cache: what can be seen to be wrong is refused, what cannot be seen is reported."""

import pytest
import torch
from backends import both_backends
from budgets import assert_e64
from draws import DEVICE, draw, on_the_host
from geometries import CASES, G, M, R
from refusals import assert_unchanged, refused, snapshot
from running import running, step, tensor

import replayssm.cache.kept
import replayssm.cache.selection
import replayssm.cache.state_cache
import replayssm.cache.step
from replayssm import ReplayStateCache


def test_layers_may_come_from_an_iterator_and_nothing_else_than_layers():
    layers = [M.build(), G.build()]
    sizes = [ReplayStateCache(given, 2).nbytes for given in (layers, iter(layers))]
    assert sizes[0] == sizes[1] == ReplayStateCache.estimate(iter(layers), 2)["total"] > 0
    for given, named in ((5, "got int with int"), ("name", "got str with str"), ([layers[0], None], "with NoneType")):
        with refused(ValueError, "model must", named):
            ReplayStateCache(given, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 2}, ["window must", "step_tokens=3", "got 2"]),
        ({"window": 1}, ["window must", "got 1"]),
        ({"window": -1}, ["window must", "got -1"]),
        ({"window": 4.0}, ["window must", "got 4.0"]),
        ({"window": True, "step_tokens": 1}, ["window must", "got True"]),
        ({"window": "most"}, ["window must", "most"]),
        ({"window": 2**63}, ["window must", "64 bits"]),
        ({"window": 2**63 - 1}, ["window + step_tokens must", "64 bits", f"got {2**63 + 2}"]),
        ({"window": 0, "step_tokens": 2**62}, ["window + step_tokens must", f"got {2**63}"]),
        ({"window": "auto", "step_tokens": 2**62}, ["window + step_tokens must", f"got {2**63}"]),
        ({"step_tokens": 0}, ["step_tokens must", "got 0"]),
        ({"step_tokens": 2**63}, ["step_tokens must", "64 bits"]),
        ({"step_tokens": 2.0}, ["step_tokens must", "got 2.0"]),
        ({"batch": 0}, ["batch must", "got 0"]),
        ({"batch": 2**63}, ["batch must", "64 bits"]),
        ({"max_seqlen": 0}, ["max_seqlen must", "got 0"]),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, ["seed must", "(2,)"]),
        ({"seed": torch.zeros(3)}, ["seed must", "float32"]),
        ({"seed": 0.5}, ["seed must", "0.5"]),
        ({"seed": 2**63}, ["seed must", "64 bits"]),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(arguments, words):
    settings = {"batch": 3, "step_tokens": 3, **arguments}
    batch = settings.pop("batch")
    with refused(ValueError, "ReplayStateCache", *words):
        ReplayStateCache([M.build()], batch, **settings)


@pytest.mark.parametrize(
    ("model", "words"),
    [(None, ["NoneType"]), ("tiny", ["str"]), ([R.build(), 5], ["list", "int"]), ({1: R.build()}, ["dict", "int"])],
    ids=["none", "name", "list", "dict"],
)
def test_what_is_no_model_is_refused(model, words):
    with refused(ValueError, "ReplayStateCache", "model must", *words):
        ReplayStateCache(model, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"checkpoint": "fp3_sr"}, ["checkpoint", "'fp32'", "'nvfp4_sr'", "fp3_sr"]),
        ({"read_format": "fp3"}, ["read_format", "None", "'lr_if4'", "fp3"]),
        ({"backend": "cuda"}, ["backend", "'auto'", "'torch'", "'triton'", "cuda"]),
    ],
    ids=str,
)
def test_what_does_not_exist_is_refused_with_what_does(arguments, words):
    with refused(NotImplementedError, "ReplayStateCache", *words):
        ReplayStateCache([M.build()], 1, **arguments)


def test_a_ring_that_kernels_cannot_address_is_refused():
    """On meta, where it takes no memory; plain PyTorch can."""
    for layer in (
        replayssm.ReplayMamba2(8, 64, 2**7, 3, device="meta"),
        replayssm.ReplayGatedDeltaNet(8, 64, 3, 2**7, device="meta"),
    ):
        settings = dict(step_tokens=2, device="meta")
        slots = 2**31 // (64 * 2**7)
        ReplayStateCache([layer], 1, window=slots - 3, backend="triton", **settings)
        with refused(ValueError, "LayerState (0)", "window must", str(2**31 - 1), f"{slots} slots", str(2**31)):
            ReplayStateCache([layer], 1, window=slots - 2, backend="triton", **settings)
        ReplayStateCache([layer], 1, window=slots - 2, backend="torch", **settings)


def test_a_module_of_another_model_has_no_state():
    cache, _ = running(M.build())
    with refused(ValueError, "ReplayStateCache.state_of", "module must", cache=cache):
        cache.state_of(M.build())


@pytest.mark.parametrize("geometry", CASES, ids=lambda g: g.kind)
def test_a_layer_that_was_widened_after_its_cache_was_built_is_refused(geometry):
    """Its records would be rounded to the cache's precision without a word."""
    layer = geometry.build(torch.float32)
    cache = ReplayStateCache([layer], 3)
    layer.double()
    with refused(ValueError, "float64", "float32", cache=cache):
        layer(geometry.input(3, 2), cache[0])
    layer.float()
    step(cache, [layer], geometry.input(3, 2, dtype=torch.float32))


def test_a_layer_given_twice_is_refused():
    layer = M.build()
    with refused(ValueError, "ReplayStateCache", "twice"):
        ReplayStateCache([layer, layer], 1)


def test_window_auto_is_16_or_the_step_where_that_is_larger():
    layer = R.build()
    for step_tokens, window in ((1, 16), (16, 16), (20, 20)):
        cache = ReplayStateCache([layer], 1, window="auto", step_tokens=step_tokens)
        assert cache.window == window
        assert cache[0].ring.v.shape[1] == window + step_tokens


@pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)
def test_a_step_under_autograd_is_refused(geometry):
    layer = geometry.build()
    cache, x = running(layer)
    with refused(RuntimeError, "torch.no_grad()", cache=cache), torch.enable_grad():
        layer(x, cache[0])
    layer.requires_grad_(False)
    with refused(RuntimeError, "torch.no_grad()", cache=cache), torch.enable_grad():
        layer(x.clone().requires_grad_(), cache[0])
    with torch.enable_grad():  # nothing asks for a gradient: nothing is lost
        y = layer(x, cache[0])
    cache.commit()
    assert not y.requires_grad
    assert all(not tensor.requires_grad for tensor in cache.tensors().values())


@both_backends
@on_the_host
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (tensor(0, 0, 1), ["rows must", "[0, 0, 1]"]),
        (tensor(0, 1, 3), ["rows must", "0 .. 2", "[0, 1, 3]"]),
        (tensor(0, -2, 1), ["rows must", "-1", "[0, -2, 1]"]),
        (tensor(0.0, 1, 2), ["rows must", "float32"]),
        (tensor(True, False, True), ["rows must", "bool"]),
        (tensor(0, 1), ["x must", "(2, t, 24)", "(3, "]),
        (tensor([0, 1, 2]), ["rows must", "(1, 3)"]),
        (tensor(0, 1, 2).to("meta"), ["rows must be on", "got meta"]),
        ([0, 1, 2], ["rows must be a tensor", "got list"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("t", [2, 7], ids=["step", "scan"])
def test_rows_that_cannot_be_are_refused(rows, words, t):
    layer = M.build()
    cache, _ = running(layer)
    with refused(ValueError, *words, cache=cache):
        layer(draw(1, 3, t, 24), cache[0], rows=rows)
    step(cache, [layer], draw(1, 3, t, 24))


def test_a_step_for_no_rows_is_refused():
    layer = M.build()
    cache, x = running(layer)
    with refused(ValueError, "rows must", cache=cache):
        layer(x[:0], cache[0], rows=torch.zeros(0, dtype=torch.int64, device=DEVICE))


@on_the_host
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(3, 3, dtype=torch.int64), ["attention_mask must", "(3, 4)", "(3, 3)"]),
        (torch.ones(2, 4, dtype=torch.int64), ["attention_mask must", "(3, 4)", "(2, 4)"]),
        (torch.ones(3, 1, 4, 4, dtype=torch.int64), ["attention_mask must", "(3, 4)"]),
        (torch.zeros(3, 4), ["attention_mask must", "float32"]),
        ([[1] * 4] * 3, ["attention_mask must be a tensor", "got list"]),
        (torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]), ["attention_mask must", "left"]),
    ],
    ids=["length", "batch", "4-D", "additive", "list", "interior"],
)
@pytest.mark.parametrize("step_tokens", [4, 3], ids=["step", "scan"])
def test_a_mask_that_cannot_be_is_refused(mask, words, step_tokens):
    layer = G.build()
    cache, _ = running(layer, step_tokens=step_tokens)
    with refused(ValueError, *words, cache=cache):
        layer(draw(1, 3, 4, 24), cache[0], attention_mask=mask)
    step(cache, [layer], draw(1, 3, 4, 24))


@on_the_host
def test_more_tokens_than_max_seqlen_are_refused():
    layer = M.build()
    cache, x = running(layer, max_seqlen=9)
    with refused(ValueError, "max_seqlen=9", "10", cache=cache):
        layer(x, cache[0])
    with refused(ValueError, "max_seqlen=9", cache=cache):
        layer(draw(1, 3, 4, 24), cache[0])
    with refused(ValueError, "max_seqlen=9", cache=cache):  # one row alone is too long
        layer(x, cache[0], attention_mask=tensor([0, 1], [1, 1], [0, 0]))
    step(cache, [layer], x, attention_mask=tensor([0, 1], [1, 0], [0, 0]))
    cache.commit()
    assert cache.seqlen.tolist() == [9, 9, 8]


@both_backends
def test_values_that_cannot_be_read_are_clamped_and_reported(monkeypatch):
    """As on a GPU, where reading a count would wait for the device."""
    cache_modules = replayssm.cache.step, replayssm.cache.kept, replayssm.cache.state_cache, replayssm.cache.selection
    for module in cache_modules:
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    layer = M.build()
    cache, x = running(layer, max_seqlen=12)
    cache.check()
    reference, _ = running(layer, max_seqlen=12)
    for counts, clamped in ((tensor(9, -3, 1), tensor(2, 0, 1)), (tensor(1, 1, 2), tensor(1, 1, 2))):
        step(cache, [layer], x)
        cache.commit(counts)
        step(reference, [layer], x)
        reference.commit(clamped)
        assert_unchanged(cache, snapshot(reference))
    reference.check()
    with pytest.raises(RuntimeError, match=r"ReplayStateCache\.check.*kept count.*reset"):
        cache.check()
    cache.reset()
    cache.check()


@both_backends
def test_padding_between_tokens_is_packed_and_reported_where_it_cannot_be_read(monkeypatch):
    monkeypatch.setattr(replayssm.cache.step, "readable", lambda tensor: False)
    layer = M.build()
    cache, _ = running(layer)
    x = draw(4, 3, 3, 24)
    step(cache, [layer], x, attention_mask=tensor([1, 0, 1], [1, 1, 1], [0, 1, 1]))
    cache.commit()
    assert cache.seqlen.tolist() == [10, 11, 10]
    with pytest.raises(RuntimeError, match=r"attention_mask.*between tokens"):
        cache.check()
    alone, _ = running(layer)
    monkeypatch.undo()
    step(alone, [layer], torch.stack([x[0, [0, 2]], x[1, :2], x[2, 1:]]))
    alone.commit()
    assert_e64(cache[0].state()[[0, 2]], alone[0].state()[[0, 2]], "state")


@both_backends
def test_tokens_beyond_max_seqlen_are_dropped_and_reported_where_they_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(replayssm.cache.step, "readable", lambda tensor: False)
    layer = M.build()
    cache, x = running(layer, max_seqlen=9)
    y = step(cache, [layer], x)
    cache.commit()
    assert cache.seqlen.tolist() == [9, 9, 9]
    assert torch.equal(y[:, 1], torch.zeros_like(y[:, 1]))
    with pytest.raises(RuntimeError, match="max_seqlen"):
        cache.check()
    monkeypatch.undo()
    expected, _ = running(layer)
    step(expected, [layer], x[:, :1])
    expected.commit()
    assert_e64(cache[0].state(), expected[0].state(), "state")
