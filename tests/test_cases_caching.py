"""Cases RC-08, RC-11 and RC-12: continuing a sequence in pieces, short prompts, one formula on every path.

RC-08 and RC-11 run in plain PyTorch alone: what any cut does to the kernels is a property of test_replay_properties.py,
and a convolution's history (RC-11) is not theirs.
"""

import math

import pytest
import torch
from backends import both_backends
from budgets import assert_e64
from draws import DEVICE
from geometries import CASES, Geometry, M, decode_in_pieces
from running import step, tensor

from replayssm import ReplayStateCache
from replayssm.layers.norm import GatedRMSNorm

every_layer = pytest.mark.parametrize("geometry", CASES, ids=lambda g: g.kind)
CUTS = [[131], [130, 1], [7, 5, *[1] * 119], [1] * 131, [63, 1, 1, 66], [64, 67], [65, 66]]


@pytest.mark.parametrize("window", [0, 1, 5, 16])
@every_layer
def test_rc08_any_cut_gives_the_same_outputs(geometry, window):
    layer, x = geometry.build(), geometry.input(1, 131)
    exact = geometry.trace(layer, x)
    for cuts in CUTS:
        y, cache = decode_in_pieces(layer, x, cuts, window)
        assert_e64(y, exact.output, f"cuts {cuts[:5]}")
        assert_e64(cache[0].state(), exact.states[:, -1], f"state after cuts {cuts[:5]}")


@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("d_conv", [1, 2, 3, 4, 5])
@every_layer
def test_rc11_history_that_is_missing_is_zeros(geometry, d_conv, window):
    geometry = geometry.but(d_conv=d_conv)
    layer, x = geometry.build(), geometry.input(2, 9)
    exact = geometry.trace(layer, x).output
    for prompt in (1, 2, 3):
        for first in ([prompt], [1] * prompt):
            y, _ = decode_in_pieces(layer, x[:, : prompt + 6], [*first, *[1] * 6], window)
            assert_e64(y, exact[:, : prompt + 6], f"after a prompt fed as {first}")


@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("d_conv", [1, 2, 4, 5])
@every_layer
def test_rc11_prompts_of_1_2_and_9_tokens_in_one_batch(geometry, d_conv, window):
    geometry = geometry.but(d_conv=d_conv)
    layer, x = geometry.build(), geometry.input(3, 15)
    exact, lengths = geometry.trace(layer, x).output, [1, 2, 9]
    cache = ReplayStateCache([layer], 3, window=window)
    mask = torch.arange(9, device=DEVICE) < tensor(*lengths)[:, None]
    pieces = [step(cache, [layer], x[:, :9], attention_mask=mask)]
    cache.commit()
    for s in range(6):
        pieces.append(step(cache, [layer], torch.stack([x[row, n + s : n + s + 1] for row, n in enumerate(lengths)])))
        cache.commit()
    for row, n in enumerate(lengths):
        got = torch.cat([pieces[0][row, :n], *(piece[row] for piece in pieces[1:])])
        assert_e64(got, exact[row, : n + 6], f"row {row}")


INSIDE = (1e-4, 50.0)  # every dt of the layer below lies between: softplus of numbers in (-9, 49)


@pytest.mark.parametrize("dt_limits", [(0.0, math.inf), INSIDE], ids=["unlimited", "limited"])
@pytest.mark.parametrize("norm", ["gate_first", "norm_first", None])
def test_rc12_one_formula_on_every_path(norm, dt_limits):
    geometry = M.but(norm=norm, dt_limits=dt_limits)
    layer, x = geometry.build(), geometry.input(2, 20)
    dt = geometry.tokens(layer, x).beta
    assert dt.min() > INSIDE[0]
    assert dt.max() < INSIDE[1]
    exact = geometry.trace(layer, x)
    with torch.no_grad():
        assert_e64(layer(x), exact.output, "forward")
    y, cache = decode_in_pieces(layer, x, [1] * 20, window=6)
    assert_e64(y, exact.output, "single steps")
    assert_e64(cache[0].state(), exact.states[:, -1], "state")


@both_backends
@pytest.mark.parametrize("dt_limits", [(0.5, math.inf), (0.0, 0.9), (0.5, 0.9)], ids=str)
def test_rc12_dt_is_clamped_in_a_scan_and_never_in_a_step(dt_limits):
    geometry = M.but(dt_limits=dt_limits)
    layer, x = geometry.build(), geometry.input(2, 24)
    scanned = tensor(*[s < 9 or 15 <= s < 20 for s in range(24)]).expand(2, 24)
    exact = geometry.trace(layer, x, scanned=scanned)
    for other in (True, False):  # the three runs do differ
        assert (geometry.trace(layer, x, scanned=other).output - exact.output).abs().max() > 1e-3
    y, cache = decode_in_pieces(layer, x, [9, 1, 2, 3, 5, 1, 2, 1], window=4, step_tokens=3)
    assert_e64(y, exact.output)
    assert_e64(cache[0].state(), exact.states[:, -1], "state")
    with torch.no_grad():
        assert_e64(layer(x), geometry.trace(layer, x, scanned=True).output, "training path")


@pytest.mark.parametrize(
    ("gate_first", "activation", "expected"),
    [
        (True, "silu", [1.269696, -0.622793]),
        (False, "silu", [0.620324, -0.304272]),
        (False, "sigmoid", [0.620324, 0.304272]),
    ],
    ids=["Mamba-2", "norm first", "KDA"],
)
def test_rc12_the_norms_on_numbers(gate_first, activation, expected):
    norm = GatedRMSNorm(2, groups=1, gate_first=gate_first, activation=activation, eps=0.0, dtype=torch.float64)
    y, z = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert [round(value, 6) for value in norm(y, z).tolist()] == expected


@pytest.mark.parametrize("norm", ["gate_first", "norm_first", None])
def test_rc12_mamba2_uses_the_norm_it_was_built_with(norm):
    """One token whose recurrence gives y = [3, 4] and whose gate is z = [1, -1]."""
    expected = {"gate_first": [1.269696, -0.622793], "norm_first": [0.620324, -0.304272]}
    gated = [3 * torch.tensor(1.0).sigmoid().item(), -4 * torch.tensor(-1.0).sigmoid().item()]
    layer = Geometry("mamba2", 2, 2, 1, 1, {"norm": norm, "bias": True, "norm_eps": 1e-20}).build()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.in_proj.bias[:2] = tensor(1.0, -1.0)  # z; x, B, C and dt come from the convolution and dt_bias
        layer.conv1d.bias.copy_(inverse_silu([3.0, 4.0, 1.0, 1.0]))
        layer.dt_bias.fill_(math.log(math.e - 1))  # dt = 1
        layer.out_proj.weight.copy_(torch.eye(2))
        if norm is not None:
            layer.norm.weight.fill_(1.0)
        layer.D.zero_()
        y = layer(torch.zeros(1, 1, 2, dtype=torch.float64, device=DEVICE))[0, 0]
    assert [round(value, 6) for value in y.tolist()] == [round(value, 6) for value in expected.get(norm, gated)]


def inverse_silu(values: list[float]) -> torch.Tensor:
    """Inputs whose SiLU are these numbers, by Newton's method."""
    target = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    x = target + 0.3
    for _ in range(60):
        s = torch.sigmoid(x)
        x = x - (x * s - target) / (s * (1 + x * (1 - s)))
    return x


def test_rc12_kda_norm_then_sigmoid():
    layer = Geometry("kda", 2, 1, 2, 1, {"norm_eps": 1e-20}).build()
    y, z = (torch.tensor(pair, dtype=torch.float64, device=DEVICE).reshape(1, 1, 1, 2) for pair in ([3, 4], [1, -1]))
    with torch.no_grad():
        layer.o_norm.weight.fill_(1.0)
        layer.o_proj.weight.copy_(torch.eye(2))
        assert [round(value, 6) for value in layer.emit(y, z).flatten().tolist()] == [0.620324, 0.304272]
