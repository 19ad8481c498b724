"""Cases RC-37, RC-38, RC-41 and RC-42: gradients next to a cache, finite and right; compilation; initial values."""

import math

import pytest
import torch
from budgets import assert_e64, assert_gradient, assert_same_bits, rms
from draws import DEVICE, draw
from geometries import CASES, decode_in_pieces
from hybrids import build, config, token_ids
from peak_memory import PeakMemory
from torch import nn

import replayssm
from replayssm import ReplayStateCache

every_layer = pytest.mark.parametrize("geometry", CASES, ids=lambda g: g.kind)


def gradients(layer, x, weight):
    layer.zero_grad()
    (layer(x) * weight).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


@every_layer
def test_rc37_decoding_does_not_touch_training(geometry):
    layer, x = geometry.build(), geometry.input(2, 9)
    weight = draw(3, *x.shape)
    before = gradients(layer, x, weight)
    decode_in_pieces(layer, x, [4, 1, 1, 1, 1, 1], window=2)
    for name, gradient in gradients(layer, x, weight).items():
        assert_same_bits(gradient, before[name], f"gradient of {name}")


def test_rc37_generation_under_gradients_records_none():
    model, ids = build(config(), dtype=torch.float32), token_ids(2, 5)
    assert torch.is_grad_enabled()
    peaks = []
    for count in (20, 200):
        cache = ReplayStateCache(model, 2, window=4, max_seqlen=300)
        with PeakMemory() as peak:
            tokens = replayssm.generate(model, ids, max_new_tokens=count, cache=cache)
        peaks.append(peak.bytes)
        assert not tokens.requires_grad
        for name, tensor in cache.tensors().items():
            assert tensor.grad_fn is None, name
            assert not tensor.requires_grad, name
    assert peaks[1] <= peaks[0] + 10 * tokens.nbytes, "memory grows with the steps"


@pytest.mark.parametrize("dt_bias", [20.0, -20.0])
@every_layer
def test_rc38_gradients_at_the_limits_are_finite_and_right(geometry, dt_bias):
    layer, x = geometry.build(), 30 * geometry.input(1, 257)
    with torch.no_grad():
        layer.dt_bias.fill_(dt_bias)
        layer.A_log.copy_(torch.linspace(0, math.log(16), layer.nheads))
    assert_gradients(geometry, layer, x)


@pytest.mark.parametrize("content", ["equal", "zero", "one token"])
@every_layer
def test_rc38_gradients_of_degenerate_inputs_are_finite_and_right(geometry, content):
    layer, x = geometry.build(), geometry.input(2, 70)
    x = {"equal": x[:, :1].expand(-1, 70, -1), "zero": torch.zeros_like(x), "one token": x[:, :1]}[content]
    assert_gradients(geometry, layer, x)


def assert_gradients(geometry, layer, x):
    """Gradients of the layer equal those of the token loop, in fp64."""
    weight = draw(8, *x.shape)
    results = []
    for run in (layer, lambda x: geometry.trace(layer, x).output):
        x = x.detach().clone().requires_grad_()
        layer.zero_grad()
        (run(x) * weight).sum().backward()
        results.append({"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}})
    for name, exact in results[1].items():
        assert_gradient(results[0][name], exact, name)


@every_layer
def test_rc38_gradcheck(geometry):
    layer = geometry.build()
    assert torch.autograd.gradcheck(layer, geometry.input(1, 5).requires_grad_())


@pytest.mark.parametrize("at_the_limits", [False, True], ids=["ordinary", "limits"])
@every_layer
def test_rc38_bf16_training_is_as_exact_as_plain_bf16_training(geometry, at_the_limits):
    """fp32 parameters under bf16 autocast, against the token loop in the same setting."""
    layer, x = geometry.build(torch.float32), geometry.input(1, 257, dtype=torch.float32)
    if at_the_limits:
        x = 30 * x
        with torch.no_grad():
            layer.dt_bias.fill_(20.0)
            layer.A_log.copy_(torch.linspace(0, math.log(16), layer.nheads))
    weight = draw(8, *x.shape)
    runs = {
        "exact": (lambda: geometry.trace(layer, x.double()).output, torch.float64, False),
        "plain": (lambda: geometry.trace(layer, x).output, torch.float32, True),
        "ours": (lambda: layer(x), torch.float32, True),
    }
    results = {}
    for name, (run, dtype, autocast) in runs.items():
        layer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            y = run()
        (y.to(dtype) * weight).sum().backward()
        results[name] = {key: parameter.grad.double().clone() for key, parameter in layer.named_parameters()}
    for name, exact in results["exact"].items():
        ours, plain = results["ours"][name], results["plain"][name]
        assert torch.isfinite(ours).all(), name
        assert rms(ours - exact) <= 8 * rms(plain - exact), name


class Compilations:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@every_layer
def test_rc41_a_compiled_layer_takes_any_length_with_gradients(geometry):
    torch._dynamo.reset()
    layer, backend = geometry.build(), Compilations()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for t in (5, 9, 17, 64):
        x = geometry.input(2, t)
        weight = draw(8, *x.shape)
        assert_e64(compiled(x).detach(), layer(x).detach(), f"{t} tokens")
        eager = gradients(layer, x, weight)
        for name, gradient in gradients_of(compiled, layer, x, weight).items():
            assert_gradient(gradient, eager[name], f"{name} at {t} tokens")
    assert backend.count <= 2


def gradients_of(compiled, layer, x, weight):
    layer.zero_grad()
    (compiled(x) * weight).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def decode_compiled(geometry, backend, steps=40):
    """Steps of two tokens with per-row acceptance, over flushes, compiled and eager; dtype fp32 or fp64."""
    torch._dynamo.reset()
    layer = geometry.build()
    caches = [ReplayStateCache([layer], 3, window=8, step_tokens=2) for _ in range(2)]
    compiled = torch.compile(lambda x, state: layer(x, state), fullgraph=True, backend=backend)
    generator = torch.Generator().manual_seed(1)
    prompt = geometry.input(3, 5)
    with torch.no_grad():
        for cache in caches:
            layer(prompt, cache[0])
            cache.commit()
        for number in range(steps):
            x = draw(number, 3, 2, geometry.d_model)
            assert_e64(compiled(x, caches[0][0]), layer(x, caches[1][0]), f"step {number}")
            kept = torch.randint(0, 3, (3,), generator=generator).to(DEVICE)
            for cache in caches:
                cache.commit(kept)
    assert torch.equal(caches[0].seqlen, caches[1].seqlen)
    assert torch.equal(caches[0].flushed, caches[1].flushed)
    assert len(set(caches[0].flushed.tolist())) > 1
    assert_e64(caches[0][0].state(), caches[1][0].state(), "state")


@every_layer
def test_rc41_a_compiled_decode_step_is_one_graph_over_every_flush(geometry):
    backend = Compilations()
    decode_compiled(geometry, backend)
    assert backend.count == 1


@pytest.mark.nightly
@every_layer
def test_rc41_a_decode_step_through_inductor(geometry):
    decode_compiled(geometry, "inductor")


def fresh(kind, place="cpu"):
    return {
        "mamba2": lambda: replayssm.ReplayMamba2(64, 8, 16, 16, device=place),
        "gated_deltanet": lambda: replayssm.ReplayGatedDeltaNet(64, 8, 16, 16, device=place),
        "kda": lambda: replayssm.ReplayKDA(64, 8, 16, device=place),
    }[kind]()


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["mamba2", "gated_deltanet", "kda"])
def test_rc42_a_layer_initialises_itself(kind, place):
    drawn = {}
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        layer = fresh(kind, place)
        if place == "meta":
            layer = layer.to_empty(device="cpu")
            torch.manual_seed(seed)
            layer.reset_parameters()
        dt, decay = torch.nn.functional.softplus(layer.dt_bias), layer.A_log.exp()
        assert dt.min() >= 1e-3 * (1 - 1e-5)
        assert dt.max() <= 0.1 * (1 + 1e-5)
        assert layer.dt_bias.min() >= -6.9073
        assert layer.dt_bias.max() <= -2.2521
        assert dt.std() > 0
        assert decay.min() >= 1 - 1e-5
        assert decay.max() <= 16 * (1 + 1e-5)
        if kind == "mamba2":
            assert torch.equal(layer.D, torch.ones_like(layer.D))
        for name in ("A_log", "dt_bias", "D"):
            if hasattr(layer, name):
                assert getattr(layer, name)._no_weight_decay
        values = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
        assert torch.isfinite(values).all()
        if seed in drawn:
            assert torch.equal(values, drawn[seed])
        drawn[seed] = values
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("kind", ["mamba2", "gated_deltanet", "kda"])
def test_rc42_a_hundred_steps_of_training_lower_the_loss(kind):
    """Copying: recall the token that stood 5 places before."""
    torch.manual_seed(0)
    mixer, embed, head = fresh(kind), nn.Embedding(8, 64), nn.Linear(64, 8)
    model = nn.ModuleList([mixer, embed, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        ids = torch.randint(8, (8, 24))
        x = embed(ids)
        logits = head(x + mixer(x))[:, 5:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :-5].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
