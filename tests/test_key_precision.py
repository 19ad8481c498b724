"""What it costs to keep l2-normalised keys in bf16, the precision of the activations: docs/math.md, section 4."""

import copy

import pytest
import torch
from budgets import assert_same_bits, rms
from draws import DEVICE, draw
from torch import Tensor, nn

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer
from replayssm.ops import chunked

D_MODEL, NHEADS, HEADDIM, D_STATE = 256, 4, 128, 128
MOST = 1.1  # not a tolerance but the claim: q, v, gates and projections round as well, so one rounding more adds little


def gated_deltanet() -> tuple[ReplayLayer, nn.Module, slice]:
    layer = ReplayGatedDeltaNet(D_MODEL, NHEADS, HEADDIM, D_STATE, ngroups=2, device=DEVICE, dtype=torch.bfloat16)
    return layer, layer.conv1d, slice(2 * D_STATE, 4 * D_STATE)  # its channels: q and k of both groups, then v


def kda() -> tuple[ReplayLayer, nn.Module, slice]:
    layer = ReplayKDA(D_MODEL, NHEADS, HEADDIM, d_state=D_STATE, device=DEVICE, dtype=torch.bfloat16)
    return layer, layer.k_conv1d, slice(None)


def outputs(layer: ReplayLayer, convolution: nn.Module, channels: slice, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer makes of x, and what it would make of it with its keys left in fp32."""
    raw: list[Tensor] = []
    handle = convolution.register_forward_hook(lambda module, inputs, y: raw.append(y[..., channels].float()))
    q, records, extra = layer.project(x, None, None)
    handle.remove()
    keys = raw[0].unflatten(-1, (layer.ngroups, layer.d_state))
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + 1e-6)
    assert_same_bits(keys.to(x.dtype), records.k, "keys, once rounded")
    y, _ = chunked.scan(q, records._replace(k=keys), None, layer.recurrence)
    return layer(x), layer.emit(y, extra)


@pytest.mark.parametrize("build", [gated_deltanet, kda], ids=lambda build: build.__name__)
@torch.no_grad()
def test_rounding_keys_to_bf16_hardly_adds_to_the_error_of_a_bf16_layer(build):
    torch.manual_seed(0)
    layer, *keys = build()
    x = draw(1, 1, 512, D_MODEL, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()(x.double())
    for what, part in (("all tokens", slice(None)), ("the last quarter", slice(384, None))):
        rounded, wide = (rms((y - exact)[:, part]) / rms(exact[:, part]) for y in outputs(layer, *keys, x))
        assert rounded <= MOST * wide, f"{what}: error {rounded:.2e} with keys in bf16, {wide:.2e} with keys in fp32"
