"""Cases RC-16, RC-18, RC-20 and RC-22: extreme gates, the bounded gate, and precisions where states outgrow them.

Hundreds of steps are too many to interpret: the kernels meet every kind of gate in test_triton_decode.py.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from backends import both_backends
from budgets import assert_e32, assert_e64, e32, rms
from draws import DEVICE, draw
from geometries import G, Geometry, K, M, decode_in_pieces
from oracles import token_loop
from passthrough import ChannelDelta, HeadDelta
from records import make_gate, make_records, tokens_of
from running import step

from replayssm import Records, ReplayStateCache
from replayssm.ops.chunked import scan

LENGTH = 130
EXTREME = ["none", "tiny", "one", "twenty", "hundred", "mixed", "alternating", "burst"]


def passthrough_input(layer, gate, dtype):
    """Inputs of a layer without projections, and what its recurrence sees of them."""
    q, k, v, _, beta = draw(5, 2, LENGTH, layer.features).split(layer.sizes, -1)
    g = make_gate(gate, (2, LENGTH, layer.nheads, layer.decay_width), seed=6).flatten(-2)
    x = torch.cat([q, k, v, g, beta], -1).to(dtype)
    query, records, _ = layer.project(x, None, None)
    return x, query, records


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("gate", EXTREME)
@pytest.mark.parametrize("kind", [HeadDelta, ChannelDelta], ids=["gated_deltanet", "kda"])
def test_rc16_any_gate_up_to_0_is_exact(kind, gate, dtype):
    """Through scan, replay and flush: windows of 16 and 64."""
    layer = kind(dtype=dtype)
    x, q, records = passthrough_input(layer, gate, dtype)
    exact, states = token_loop(tokens_of(q.double(), Records(*(f.double() for f in records))), delta=True)
    plain, plain_states = token_loop(tokens_of(q, records), delta=True)
    pieces = {16: [64, *[4] * 16, 2], 64: [1, 1, *[4] * 32], None: [LENGTH]}
    for window, sizes in pieces.items():
        if window is None:
            with torch.no_grad():
                y = layer(x)
        else:
            y, cache = decode_in_pieces(layer, x, sizes, window, step_tokens=4)
        if dtype == torch.float64:
            assert_e64(y, exact.flatten(-2), f"window {window}")
        else:
            assert_e32(y, exact.flatten(-2), e32(plain, exact), f"window {window}")
    if dtype == torch.float64:
        assert_e64(cache[0].state(), states[:, -1], "state")
    else:
        assert_e32(cache[0].state(), states[:, -1], e32(plain_states, states), "state")


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_rc16_closed_forms(decay):
    """A decay of e^-100 forgets everything: o = beta v <k, q>. No decay is the delta rule without a gate."""
    recurrence = {"head": HeadDelta, "channel": ChannelDelta}[decay].recurrence
    q, records = make_records(decay=decay, delta=True, t=LENGTH, heads=(4, 2), gate="hundred")
    y, _ = scan(q, records, None, recurrence)
    overlap = (records.k * q).sum(-1).repeat_interleave(2, -1)
    assert_e64(y, records.beta[..., None] * records.v * overlap[..., None])
    y, last = scan(q, records._replace(g=torch.zeros_like(records.g)), None, recurrence)
    state, outputs = torch.zeros_like(last), []
    tokens = tokens_of(q, records)
    for s in range(LENGTH):
        k, v, beta = tokens.k[:, s], tokens.v[:, s], tokens.beta[:, s]
        state = state - beta[..., None, None] * (state @ k[..., None] - v[..., None]) * k[..., None, :]
        outputs.append((state @ tokens.q[:, s][..., None])[..., 0])
    assert_e64(y, torch.stack(outputs, 1))
    assert_e64(last, state, "state")


@pytest.mark.parametrize("bias", [-60.0, 60.0])
@pytest.mark.parametrize(
    "geometry", [G, K, K.but(lower_bound=None), K.but(lower_bound=-20.0)], ids=["gdn", "bounded", "unbounded", "deep"]
)
def test_rc16_layers_with_gates_at_their_limits(geometry, bias):
    layer, x = geometry.build(), geometry.input(1, 50)
    with torch.no_grad():
        layer.dt_bias.fill_(bias)
        layer.A_log.fill_(1.0)
    exact = geometry.trace(layer, x)
    y, cache = decode_in_pieces(layer, x, [20, *[1] * 30], window=16)
    assert_e64(y, exact.output)
    assert_e64(cache[0].state(), exact.states[:, -1], "state")


@both_backends
@pytest.mark.parametrize(
    ("lower_bound", "raw", "expected"),
    [(-5.0, 1.0, -4.403985), (-5.0, 4.0, -4.998323), (None, 1.0, -2.626523), (None, 4.0, -8.036300)],
)
def test_rc18_the_bounded_gate_is_a_sigmoid_and_the_unbounded_one_a_softplus(lower_bound, raw, expected):
    layer = Geometry("kda", 4, 1, 2, 3, {"lower_bound": lower_bound}).build()
    with torch.no_grad():
        layer.f_proj.weight.zero_()
        layer.b_proj.weight.zero_()
        layer.dt_bias.fill_(raw)
        layer.A_log.fill_(math.log(2))
    cache = ReplayStateCache([layer], 1)
    step(cache, [layer], draw(1, 1, 1, 4))
    cache.commit()
    record = Records(*(ring[0, 0] for ring in cache[0].ring))
    assert [round(value, 6) for value in record.g.flatten().tolist()] == [expected] * 3
    assert record.beta.tolist() == [0.5]


STEPS = 2048


@pytest.mark.parametrize(
    "windows", [(0, 16), pytest.param((1, 16), marks=pytest.mark.nightly)], ids=lambda windows: str(windows[0])
)
@pytest.mark.parametrize("geometry", [G, M], ids=lambda g: g.kind)
def test_rc20_an_fp32_checkpoint_is_fp32_at_every_write(geometry, windows):
    """The state of a bf16 layer after 2,048 tokens against the same projections in fp64: no drift."""
    layer = geometry.build(torch.bfloat16)
    x = geometry.input(1, STEPS, dtype=torch.bfloat16)
    final = []
    for window in windows:
        t = 4 if window == 16 else 1
        cache = ReplayStateCache([layer], 1, window=window, step_tokens=t)
        states, seen = [], []
        with recording(layer, seen):
            for number, piece in enumerate(x.split(t, 1)):
                step(cache, [layer], piece)
                cache.commit()
                if (number + 1) * t in (256, STEPS):
                    states.append(cache[0].state())
        exact, plain = (recurrent_states(seen, geometry.delta, dtype) for dtype in (torch.float64, torch.float32))
        errors = [rms(got - want) / rms(want) for got, want in zip(states, exact, strict=True)]
        assert errors[1] <= 1e-5
        assert errors[1] <= 3 * errors[0]
        assert (cache[0].checkpoint.view(torch.int32) & 0xFFFF != 0).any(), "the checkpoint holds bf16 values"
        final.append(states[1])
    assert_e32(final[0], final[1].double(), e32(plain[1], exact[1]), f"window {windows[0]}")


@contextmanager
def recording(layer, seen):
    """Collects what the layer's projections hand to the recurrence."""
    project = layer.project

    def recorded(*arguments):
        q, records, extra = project(*arguments)
        seen.append((q, *records))
        return q, records, extra

    layer.project = recorded
    yield
    del layer.project


def recurrent_states(seen, delta, dtype):
    """The states after 256 and after all of the tokens that were recorded."""
    q, *fields = (torch.cat(pieces, 1).to(dtype) for pieces in zip(*seen, strict=True))
    states = token_loop(tokens_of(q, Records(*fields)), delta=delta)[1]
    return states[:, 255], states[:, -1]


def large_state_layer():
    """x = 200, B = 500, C = 1e-3, dt = 1, no decay: every token adds 1e5 to the state and 100 to y."""
    layer = Geometry("mamba2", 4, 4, 1, 1, {"norm": None, "bias": True, "out_bias": False}).build(torch.float16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.in_proj.bias[:4] = 1.278465  # SiLU(z) = 1
        layer.in_proj.bias[-4:] = 0.541325  # softplus = 1
        layer.conv1d.bias[:4], layer.conv1d.bias[4], layer.conv1d.bias[5] = 200.0, 500.0, 0.001998
        layer.A_log.fill_(-50.0)
        layer.out_proj.weight.copy_(torch.eye(4))
    return layer


@both_backends
@pytest.mark.parametrize("path", ["scan", "replay", "flush", "verify"])
def test_rc22_a_state_beyond_fp16_gives_the_output_that_fits(path):
    layer = large_state_layer()
    x = torch.zeros(2, 1 if path != "verify" else 4, 4, dtype=torch.float16, device=DEVICE)
    tokens = x.shape[1]
    with torch.no_grad():
        y = layer(x)
    if path != "scan":
        cache = ReplayStateCache([layer], 2, window=8, step_tokens=4)
        y = step(cache, [layer], x)
        cache.commit()
        if path == "flush":
            cache.flush()
            y = step(cache, [layer], x)  # read from the checkpoint, which one token has reached
            cache.commit(0)
        state = cache[0].checkpoint if path == "flush" else cache[0].state()
        assert torch.allclose(state, torch.full_like(state, tokens * 1e5), rtol=1e-3), state.flatten()[:2]
        assert state.dtype == torch.float32
    reached = torch.arange(1, tokens + 1, device=DEVICE) + (path == "flush")
    expected = 100.0 * reached[:, None].expand(2, tokens, 4)
    assert y.dtype == torch.float16
    assert torch.allclose(y.float(), expected, rtol=1e-3), y[0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("geometry", [M, G, K], ids=lambda g: g.kind)
def test_rc22_autocast_around_an_fp32_layer(geometry, dtype):
    layer, x = geometry.build(torch.float32), geometry.input(2, 80, dtype=torch.float32)
    exact = geometry.trace(layer, x.double()).output
    with torch.autocast(DEVICE.type, dtype):
        y = layer(x)
    y.float().pow(2).sum().backward()
    assert rms(y - exact) <= 8 * torch.finfo(dtype).eps * rms(exact)
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name
    cache = ReplayStateCache([layer], 2, window=4)
    with torch.autocast(DEVICE.type, dtype):
        step(cache, [layer], x[:, :9])
        cache.commit()
        y = step(cache, [layer], x[:, 9:10])
    assert torch.isfinite(y).all()
