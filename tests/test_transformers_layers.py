"""A third party's opinion: our layers with the weights of transformers' own mixers must give their outputs.

transformers computes in fp32 inside, so an fp64 mixer differs from the token loop by what fp32 makes of it: E32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from budgets import assert_e32, assert_e64, e32
from draws import DEVICE
from geometries import Geometry, decode_in_pieces
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
LENGTH = 70  # two chunks and a rest, at the chunk size below
CHUNK = 32


@dataclass(frozen=True)
class Stock:
    """A mixer of transformers: where it is, the config that makes it tiny, and the geometry of ours that it equals."""

    family: str
    config: str
    mixer: str
    settings: dict[str, object]
    ours: Geometry
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict

    def build(self, layer: nn.Module) -> nn.Module:
        # imported here, so that collecting the tests stays fast; an older transformers lacks some families
        module = f"transformers.models.{self.family}"
        configs = pytest.importorskip(f"{module}.configuration_{self.family}")
        mixers = pytest.importorskip(f"{module}.modeling_{self.family}")
        config = getattr(configs, self.config)(**self.settings)
        mixer = getattr(mixers, self.mixer)(config, layer_idx=0)
        multipliers = self.ours.options.get("segment_multipliers")
        if multipliers is not None:  # Falcon-H1's model hangs this on its mixers; it is in no state dict
            sizes = [48, 48, 14, 14, 6]
            vector = torch.cat([torch.full((n,), scale) for n, scale in zip(sizes, multipliers, strict=True)])
            mixer.register_buffer("mup_vector", vector.to(torch.float64).reshape(1, 1, -1))
        mixer = mixer.to(DEVICE, torch.float64).eval()
        values = self.rename({name: value.detach() for name, value in layer.state_dict().items()})
        own = mixer.state_dict()
        values = {name: value.reshape(own[name].shape) if name in own else value for name, value in values.items()}
        missing, unexpected = mixer.load_state_dict(values, strict=False)
        assert not unexpected
        assert set(missing) <= {"mup_vector"}
        return mixer


def olmo(values: dict[str, Tensor]) -> dict[str, Tensor]:
    keys, inner = 2 * 7, 6 * 5
    q, k, v = values.pop("in_proj_qkv.weight").split([keys, keys, inner])
    values |= {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    names = {
        "in_proj_z": "g_proj",
        "in_proj_a": "a_proj",
        "in_proj_b": "b_proj",
        "norm": "o_norm",
        "out_proj": "o_proj",
    }
    return renamed(values, names)


def kda(values: dict[str, Tensor]) -> dict[str, Tensor]:
    values["conv1d.weight"] = torch.cat([values.pop(f"{part}_conv1d.weight") for part in "qkv"])
    gate = {name: f"forget_gate.{name}" for name in ("A_log", "dt_bias", "f_proj", "f_a_proj", "f_b_proj")}
    return renamed(values, gate)


def renamed(values: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, value in values.items():
        first, *rest = name.split(".")
        result[".".join([names.get(first, first), *rest])] = value
    return result


def mamba2_of(**options: object) -> Geometry:
    return Geometry("mamba2", 24, 6, 8, 7, {"ngroups": 2, **options})


MAMBA_SETTINGS = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_expand": 2,
    "mamba_chunk_size": CHUNK,
}
LINEAR_SETTINGS = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
}
KDA_SETTINGS = {"hidden_size": 24, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
GDN = Geometry("gated_deltanet", 24, 6, 5, 7, {"ngroups": 2})
KDA = Geometry("kda", 24, 3, 6, 6, {"output_gate_rank": 6, "gate_rank": 6})

STOCK = {
    "nemotron_h": Stock(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHMamba2Mixer",
        {
            "hidden_size": 24,
            "layers_block_type": ["mamba"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 5,
            "ssm_state_size": 7,
            "n_groups": 2,
            "chunk_size": CHUNK,
            "time_step_min": 0.4,
            "use_bias": True,
        },
        Geometry("mamba2", 24, 6, 5, 7, {"ngroups": 2, "dt_limits": (0.4, math.inf), "bias": True}),
    ),
    "mamba2": Stock(
        "mamba2",
        "Mamba2Config",
        "Mamba2Mixer",
        {
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_heads": 6,
            "head_dim": 8,
            "state_size": 7,
            "n_groups": 2,
            "chunk_size": CHUNK,
            "conv_kernel": 3,
            "use_conv_bias": False,
        },
        mamba2_of(d_conv=3, conv_bias=False),
    ),
    "bamba": Stock(
        "bamba",
        "BambaConfig",
        "BambaMixer",
        {**MAMBA_SETTINGS, "time_step_limit": (0.3, 0.9), "mamba_proj_bias": True},
        mamba2_of(dt_limits=(0.3, 0.9), bias=True),
    ),
    "granitemoehybrid": Stock(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridMambaLayer",
        {**MAMBA_SETTINGS, "layer_types": ["mamba"], "rms_norm_eps": 1e-2},
        mamba2_of(norm_eps=1e-2),
    ),
    "falcon_h1": Stock(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        {**MAMBA_SETTINGS, "mamba_d_ssm": 48, "ssm_in_multiplier": 1.5, "projectors_bias": True},
        mamba2_of(norm=None, in_multiplier=1.5, segment_multipliers=(0.5, 2.0, 0.25, 3.0, 0.7), out_bias=True),
    ),
    "falcon_h1 with norm": Stock(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        {**MAMBA_SETTINGS, "mamba_d_ssm": 48, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
        mamba2_of(norm="norm_first", segment_multipliers=(1.0, 1.0, 1.0, 1.0, 1.0)),
    ),
    "falcon_h1 gate first": Stock(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        {**MAMBA_SETTINGS, "mamba_d_ssm": 48, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        mamba2_of(norm="gate_first", segment_multipliers=(1.0, 1.0, 1.0, 1.0, 1.0)),
    ),
    "zamba2": Stock(
        "zamba2",
        "Zamba2Config",
        "Zamba2MambaMixer",
        {
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "layers_block_type": ["mamba"],
            "n_mamba_heads": 6,
            "mamba_d_state": 7,
            "mamba_ngroups": 2,
            "chunk_size": CHUNK,
        },
        mamba2_of(dt_limits=(0.001, math.inf)),
    ),
    "qwen3_5": Stock("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", LINEAR_SETTINGS, GDN),
    "olmo_hybrid": Stock(
        "olmo_hybrid",
        "OlmoHybridConfig",
        "OlmoHybridGatedDeltaNet",
        {
            **LINEAR_SETTINGS,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 2,
        },
        GDN.but(neg_eigval=True, norm_eps=1e-5, d_conv=2),
        olmo,
    ),
    "kimi_linear": Stock(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearDeltaAttention",
        {**KDA_SETTINGS, "linear_num_heads": 3, "linear_head_dim": 6},
        KDA,
        kda,
    ),
    "glm5_next": Stock(
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextLinearAttention",
        {**KDA_SETTINGS, "linear_num_heads": 3, "linear_head_dim": 6, "linear_lower_bound": -3.0},
        KDA.but(lower_bound=-3.0),
        kda,
    ),
    "bailing_hybrid": Stock(
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridDeltaAttention",
        {**KDA_SETTINGS, "num_attention_heads": 3, "head_dim": 6, "kda_lower_bound": -2.0, "rms_norm_eps": 1e-2},
        KDA.but(lower_bound=-2.0, gate_rank=None, output_gate_rank=None, norm_eps=1e-2),
        kda,
    ),
}


@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_a_layer_with_the_weights_of_a_transformers_mixer_equals_it(stock):
    geometry = stock.ours
    layer, x = geometry.build(), geometry.input(2, LENGTH)
    mixer = stock.build(layer)
    with torch.no_grad():
        theirs, forward = mixer(x), layer(x)
    exact, plain = geometry.trace(layer, x).output, geometry.trace(layer, x.float()).output
    allowed = e32(plain, exact)
    assert_e64(forward, exact, "ours against the token loop")
    assert_e32(theirs, exact, allowed, "theirs against the token loop")
    assert_e32(forward, theirs, allowed, "ours against theirs")
    if geometry.options.get("dt_limits", (0.0,))[0] <= 0.001:  # a step does not clamp dt, here or there
        decoded, _ = decode_in_pieces(layer, x, [LENGTH - 20, *[1] * 10, *[2] * 5], window=4, step_tokens=2)
        assert_e32(decoded, theirs, allowed, "ours, decoding, against theirs")
