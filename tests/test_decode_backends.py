"""Which backend decoding takes, where it is refused, and steps in a graph of torch.compile."""

import importlib.util
import sys

import pytest
import torch
from budgets import assert_e64, assert_same_bits
from draws import DEVICE, draw, on_the_host
from geometries import CASES, G, M, R
from refusals import refused
from running import step, tensor

from replayssm import ReplayGatedDeltaNet, ReplayMamba2, ReplayStateCache
from replayssm.cache import auto_window
from replayssm.ops import decode

every_layer = pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)


@pytest.fixture
def kernels(monkeypatch):
    """Caches with backend "auto" take the kernels."""
    pytest.importorskip("triton")
    monkeypatch.setattr(decode, "automatic", lambda device: "triton")


@on_the_host
def test_kernels_are_refused_on_a_cpu_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused(RuntimeError, "ReplayStateCache", "backend must", "'torch'", "on cpu", "'triton'", "GPU"):
        ReplayStateCache([M.build()], 1, backend="triton")


def test_kernels_are_refused_where_triton_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    with refused(RuntimeError, "ReplayStateCache", "backend must", "'torch'", "'triton'", "Install triton"):
        ReplayStateCache([M.build()], 1, backend="triton")


@pytest.mark.parametrize(("place", "chosen"), [("cpu", "torch"), ("meta", "torch"), ("cuda", "triton")])
def test_auto_is_triton_on_a_gpu_where_triton_is_installed_and_torch_elsewhere(monkeypatch, place, chosen):
    found = {"triton": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    assert decode.choose("a test", "auto", torch.device(place)) == chosen
    found.clear()
    assert decode.choose("a test", "auto", torch.device(place)) == "torch"


def test_an_estimate_is_of_the_backend_that_its_device_would_get(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    layer = G.build()
    plain, kernels = (ReplayStateCache.estimate([layer], 2, backend=name) for name in ("torch", "triton"))
    assert kernels["ring"] - plain["ring"] == 2 * 17 * G.nheads * G.headdim * 8  # u, fp64
    assert ReplayStateCache.estimate([layer], 2, device="cuda") == kernels
    assert ReplayStateCache.estimate([layer], 2, device="cpu") == plain
    assert ReplayStateCache.estimate([layer.to("meta")], 2) == plain


@every_layer
def test_a_compiled_step_of_the_kernels_is_one_graph_over_flushes_and_rows_that_are_off(geometry, kernels):
    """With fake kernels while it is traced, and the state updated in place as in eager steps."""
    torch._dynamo.reset()
    layer = geometry.build()
    caches = [ReplayStateCache([layer], 3, window=3, step_tokens=2) for _ in range(2)]
    compiled = torch.compile(
        lambda x, state, rows: layer(x, state, rows=rows), fullgraph=True, backend="aot_eager", dynamic=False
    )
    rows = tensor(2, -1, 0)
    with torch.no_grad():
        for number in range(4):
            x = draw(number, 3, 2, geometry.d_model)
            assert_e64(compiled(x, caches[0][0], rows), layer(x, caches[1][0], rows=rows), f"step {number}")
            for cache in caches:
                cache.commit(tensor(2, 0, 1))
    assert caches[0].flushed.tolist() == caches[1].flushed.tolist()
    assert caches[0].flushed.max() > 0
    for name, tensor_ in caches[0].tensors().items():
        assert_e64(tensor_.double(), caches[1].tensors()[name].double(), name)


@pytest.mark.parametrize("formats", [("fp32", None), ("fp16_sr", "int8")], ids=str)
@pytest.mark.parametrize("mutated", ["replay", "flush"])
def test_the_operators_are_what_they_declare(mutated, formats, kernels):
    """Schema, fakes and what they change in place, checked by PyTorch itself."""
    layer = G.build(torch.float32)
    cache = ReplayStateCache([layer], 3, window=4, checkpoint=formats[0], read_format=formats[1])
    for number in range(3):
        step(cache, [layer], draw(number, 3, 1, 24, dtype=torch.float32))
        cache.commit()
    state, clock = cache[0], cache.clock
    of_a_token = (state.ring.k, *state.ring)
    q, k, v, g, beta = (draw(i, 3, 1, *x.shape[2:], dtype=torch.float32) for i, x in enumerate(of_a_token))
    flushing = tensor(True, False, True)
    copies = [] if state.stored.copy is None else [*state.stored.copy.planes]
    states = [*state.stored.checkpoint.planes], copies
    settings = (0, *formats, "head", True)
    if mutated == "flush":
        arguments = (flushing, *states, *state.ring, clock.seqlen, clock.flushed, clock.seed, *settings)
        torch.library.opcheck(torch.ops.replayssm.flush.default, arguments)
        return
    new = (q, k, v, -g.abs(), beta)
    counters = (flushing, clock.seqlen, clock.flushed, clock.seed, None, None)
    arguments = (*new, *states, *state.ring, state.u, *counters, *settings)
    torch.library.opcheck(torch.ops.replayssm.replay.default, arguments)


def test_records_are_rounded_to_the_ring_before_their_first_use(kernels):
    """Under autocast g and beta come wider or narrower than they are kept; a token must see the same values later."""
    layer = M.build(torch.bfloat16)
    cache = ReplayStateCache([layer], 3)
    wider = layer.project

    def widened(*arguments):
        q, records, extra = wider(*arguments)
        noise = draw(3, *records.v.shape, dtype=torch.float32)
        return q, records._replace(v=records.v.float() * (1 + 1e-3 * noise)), extra

    x, outputs = draw(1, 3, 1, 24, dtype=torch.bfloat16), []
    for rounded in (False, True):
        cache.reset()
        layer.project = widened
        if rounded:
            layer.project = lambda *a: (lambda q, r, e: (q, r._replace(v=r.v.bfloat16()), e))(*widened(*a))
        outputs.append(step(cache, [layer], x))
        cache.commit()
    del layer.project
    assert_same_bits(outputs[0], outputs[1], "outputs")


def test_window_auto_is_chosen_for_the_backend_from_the_layers_and_the_batch():
    large = ReplayGatedDeltaNet(24, 8, 64, 64, device="meta", dtype=torch.bfloat16)
    for batch in (1, 512):
        sizes = [auto_window.LayerBytes.of(ReplayStateCache(large, batch)[0])]
        for backend in ("torch", "triton"):
            cache = ReplayStateCache(large, batch, window="auto", backend=backend, device="meta")
            assert cache.window == auto_window.choose(backend, batch, 1, sizes)
            assert cache[0].ring.v.shape[1] == max(cache.window, 1) + 1
    small = ReplayMamba2(24, 2, 4, 4, device="meta")
    assert ReplayStateCache(small, 1, window="auto", backend="triton", device="meta").window == 0
    assert ReplayStateCache(small, 1, window="auto", step_tokens=4, backend="triton", device="meta").window >= 4


def test_a_cache_says_what_its_steps_run_on():
    layer = M.build()
    assert ReplayStateCache([layer], 1, backend="torch").backend == "torch"
    expected = "triton" if DEVICE.type == "cuda" and importlib.util.find_spec("triton") else "torch"
    assert ReplayStateCache([layer], 1).backend == expected
    assert ReplayStateCache([layer], 1, backend="triton", device="meta").backend == "triton"
