"""The family ``nemotron_h`` (arXiv 2504.03624): Mamba-2, attention without positions, squared-ReLU MLPs, experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.checks import expect
from replayssm.models.config import MODEL_TYPE
from replayssm.models.fields import Fields
from replayssm.models.keys import Link, Stacked, embeddings, mixer_keys, renamed

UNUSED = (r"mtp\.",)
# Of Mamba-2, the inner width is heads * head dim whatever expand says, dt_bias was drawn between the time steps, and
# time_step_limit is read by nobody. Attention has no positions, so what speaks of them has no effect.
HARMLESS = [
    *("expand", "time_step_limit", "time_step_max", "time_step_floor", "time_step_rank"),
    *("rope_theta", "rope_parameters", "partial_rotary_factor"),
    *("mamba_ssm_cache_dtype", "use_mamba_kernels", "moe_shared_expert_overlap"),
]
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
MTP_NAMES = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}

_COMMON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "head_dim": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
_MIXTURE = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_shared_expert_overlap": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Nemotron-H-8B": {
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    "Nemotron-3-Nano-4B": {
        **_COMMON,
        "hidden_size": 3136,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 12544,
        "mamba_num_heads": 96,
        "mamba_head_dim": 80,
    },
    "Nemotron-3-Nano-30B-A3B": {
        **_COMMON,
        **_MIXTURE,
        "hidden_size": 2688,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "norm_eps": 1e-5,
        "rope_theta": 10000,
        "partial_rotary_factor": 1.0,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
    "Nemotron-3-Super-120B-A12B": {
        **_COMMON,
        **_MIXTURE,
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "routed_scaling_factor": 5.0,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
}


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("nemotron_h", source, HARMLESS)
    eps = field("layer_norm_epsilon", 1e-5)
    for name in ("norm_eps", "rms_norm_eps"):
        field.only(name, eps)
    for name in ("mlp_hidden_act", "hidden_act"):
        field.only(name, "relu2")
    blocks = {
        "mamba": _mamba(field, eps),
        "attention": _attention(field),
        "mlp": {
            "type": "mlp",
            "hidden": field("intermediate_size", 21504),
            "activation": "relu2",
            "bias": field("mlp_bias", False),
        },
        "moe": _moe(field),
    }
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size", 131072),
        "d_model": field("hidden_size", 4096),
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": eps,
        "residual_fp32": field("residual_in_fp32", False),
        **field.dtype(),
        "layers": [dict(blocks[kind]) for kind in _kinds(field, "hybrid_override_pattern", "layers_block_type")],
        "mtp": [dict(blocks[kind]) for kind in _kinds(field, *MTP_NAMES, default=["attention", "moe"])],
    }
    number, known = field("num_hidden_layers", None), len(config["layers"])
    expect(
        number is None or number == known,
        f"{field.where}: num_hidden_layers must be the {known} of the pattern; got {number}. Use the config.json that "
        "came with the weights.",
    )
    field.only("num_nextn_predict_layers", 0, 1)
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    renamed = any(key.startswith("model.") for key in stored)  # as transformers names them in memory
    return {
        "prefix": "model." if renamed else "backbone.",
        "head_stored": "lm_head.weight" in stored,
        "mtp": any(key.startswith("mtp.layers.") for key in stored),
    }


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config, root = read_config(source), layout["prefix"]
    tied, stored = config["tie_embeddings"], layout["head_stored"]
    yield from embeddings(f"{root}embeddings.weight", tied=tied, head_stored=stored)
    for i, block in enumerate(config["layers"]):
        ours, theirs = f"layers.{i}.", f"{root}layers.{i}."
        yield from renamed(ours, theirs, ["norm.weight"])
        yield from block_links(config["d_model"], block, f"{ours}mixer.", f"{theirs}mixer.")
    yield Link(("norm.weight",), (f"{root}norm_f.weight",))
    if layout["mtp"]:
        yield from _mtp_links(config)


def _mtp_links(config: Mapping[str, Any]) -> Iterator[Link]:
    """Links of the head for further tokens; what is around its blocks is stored with the first and the last one."""
    blocks = config["mtp"]
    for i, block in enumerate(blocks):
        ours = theirs = f"mtp.layers.{i}."
        yield from renamed(ours, theirs, ["norm.weight"])
        yield from block_links(config["d_model"], block, f"{ours}mixer.", f"{theirs}mixer.")
    first, last = "mtp.layers.0.", f"mtp.layers.{len(blocks) - 1}."
    yield Link(("mtp.pre_fc_norm_embedding.weight",), (f"{first}enorm.weight",))
    yield Link(("mtp.pre_fc_norm_hidden.weight",), (f"{first}hnorm.weight",))
    yield Link(("mtp.fc.weight",), (f"{first}eh_proj.weight",))
    yield Link(("mtp.norm.weight",), (f"{last}final_layernorm.weight",))


def block_links(d_model: int, block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
    """Links of a mixer: a checkpoint holds every expert by itself, and calls the shared one ``shared_experts``."""
    for name in mixer_keys(d_model, block):
        if name.startswith("experts."):
            projection = name.removeprefix("experts.")
            each = (f"{theirs}experts.{i}.{projection}.weight" for i in range(block["num_experts"]))
            yield Link((ours + name,), tuple(each), Stacked())
        else:
            yield Link((ours + name,), (theirs + name.replace("shared_expert.", "shared_experts."),))


def _mamba(field: Fields, eps: float) -> dict[str, Any]:
    field.only("mamba_hidden_act", "silu")
    field.only("mamba_proj_bias", False)
    return {
        "type": "mamba2",
        "nheads": field("mamba_num_heads", 128),
        "headdim": field("mamba_head_dim", 64),
        "d_state": field("ssm_state_size", 128),
        "ngroups": field("n_groups", 8),
        "d_conv": field("conv_kernel", 4),
        "bias": field("use_bias", False),
        "conv_bias": field("use_conv_bias", True),
        "norm_eps": eps,
        "dt_limits": [field("time_step_min", 0.001), float("inf")],
    }


def _attention(field: Fields) -> dict[str, Any]:
    field.only("attention_bias", False)
    field.only("sliding_window", None)
    headdim = field("head_dim", 128)
    field.only("attention_head_dim", headdim)
    return {
        "type": "attention",
        "nheads": field("num_attention_heads", 32),
        "headdim": headdim,
        "kv_heads": field("num_key_value_heads", 8),
    }


def _moe(field: Fields) -> dict[str, Any]:
    field.only("n_shared_experts", 1)
    return {
        "type": "moe",
        "hidden": field("moe_intermediate_size", 7688),
        "num_experts": field("n_routed_experts", 8),
        "top_k": field("num_experts_per_tok", 2),
        "activation": "relu2",
        "scores": "sigmoid",
        "normalize": field("norm_topk_prob", True),
        "scale": field("routed_scaling_factor", 1.0),
        "expert_groups": field("n_group", 1),
        "top_groups": field("topk_group", 1),
        "shared_hidden": field("moe_shared_expert_intermediate_size", 7688),
        "latent": field("moe_latent_size", None),
        "bias": field("mlp_bias", False),
    }


def _kinds(field: Fields, letters: str, names: str, default: list[str] | None = None) -> list[str]:
    """The kind of each block, however the file spells them: as a text, one letter each, or as a list."""
    pattern, kinds = field(letters, None), field(names, None)
    if kinds is None:
        kinds = [PATTERN.get(letter, letter) for letter in pattern or ""]
    kinds = [OTHER_NAMES.get(kind, kind) for kind in kinds] or default
    expect(
        kinds is not None and set(kinds) <= set(PATTERN.values()),
        f"{field.where}: {letters} must be a text of {', '.join(PATTERN)}, or {names} a list of "
        f"{', '.join(PATTERN.values())}; got {kinds if pattern is None else pattern!r}. Use the config.json that came "
        "with the weights.",
    )
    return list(kinds or [])
