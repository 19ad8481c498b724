"""The family ``kimi_linear``: Kimi Delta Attention and latent attention without positions (arXiv 2510.26692)."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.checks import expect
from replayssm.models.config import MODEL_TYPE
from replayssm.models.decoder import decoder_links, mixture_links, same_names
from replayssm.models.fields import Fields
from replayssm.models.keys import Link, Reshaped, mixer_keys

UNUSED: tuple[str, ...] = ()
LINEAR, FULL = "linear_attention", "full_attention"
# Positions that no layer takes; sizes that follow from others.
HARMLESS = ["head_dim", "model_max_length", "pretraining_tp", "qk_head_dim", "rope_parameters", "rope_scaling"]
HARMLESS += ["rope_theta"]
_ATTENTION = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, dict[str, Any]] = {
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": _ATTENTION,
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 28) if i not in _ATTENTION],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("kimi_linear", source, HARMLESS)
    field.only("hidden_act", "silu")
    field.only("num_nextn_predict_layers", 0)
    number, eps = field("num_hidden_layers"), field("rms_norm_eps", 1e-5)
    linear, kinds = _linear(field, eps)
    mixers = {LINEAR: linear, FULL: _latent_attention(field)}
    parts = {"dense": {"type": "mlp", "hidden": field("intermediate_size")}, "sparse": _mixture(field)}
    first = field("first_k_dense_replace", 1)
    feed_forward = field("mlp_layer_types", None) or ["dense" if i < first else "sparse" for i in range(number)]
    for name, values, known in (("layer_types", kinds, mixers), ("mlp_layer_types", feed_forward, parts)):
        expect(
            len(values) == number and set(values) <= known.keys(),
            f"{field.where}: {name} must be {number} of {', '.join(known)}, as num_hidden_layers says; got {values}. "
            "Use the config.json that came with the weights.",
        )
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size"),
        "d_model": field("hidden_size"),
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": eps,
        **field.dtype(),
        "layers": [
            dict(block) for kind, part in zip(kinds, feed_forward, strict=True) for block in (mixers[kind], parts[part])
        ],
    }
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    # transformers renames the MLPs of dense layers along with the mixtures when it writes them
    moved = any(key.endswith("block_sparse_moe.up_proj.weight") for key in stored)
    return {"head_stored": "lm_head.weight" in stored, "dense": "block_sparse_moe" if moved else "mlp"}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)
    d_model = config["d_model"]

    def mixer(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        for name in mixer_keys(d_model, block):
            flat = name == "A_log"
            shape = (1, 1, block["nheads"], 1)
            link = Link((ours + name,), (f"{theirs}self_attn.{name}",))
            yield link._replace(form=Reshaped(shape[2:3], shape)) if flat else link

    def feed_forward(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        if block["type"] == "mlp":
            return same_names(d_model, block, ours, f"{theirs}{layout['dense']}.")
        names = ("w1", "w3", "w2")
        theirs = f"{theirs}block_sparse_moe."
        return mixture_links(d_model, block, ours, theirs, names=names, shared="shared_experts")

    return decoder_links(config, "model.", head_stored=layout["head_stored"], mixer=mixer, feed_forward=feed_forward)


def _linear(field: Fields, eps: float) -> tuple[dict[str, Any], list[str]]:
    """The KDA block, and the kind of every layer; published files count layers from 1."""
    number, kinds = field("num_hidden_layers"), field("layer_types", None)
    published = field("linear_attn_config", None)
    if published is None:
        sizes = {"headdim": field("linear_head_dim", 128), "nheads": field("linear_num_heads", 32)}
        width = field("linear_conv_kernel_dim", 4)
        kinds = kinds or [FULL if i and i % 4 == 0 else LINEAR for i in range(number)]
    else:
        inner = Fields(f"{field.family}, linear_attn_config", published)
        inner.only("use_full_rank_gate", False)
        inner.only("gate_lower_bound", None)
        sizes = {"headdim": inner("head_dim"), "nheads": inner("num_heads")}
        width = inner("short_conv_kernel_size")
        of_kind = {**dict.fromkeys(inner("kda_layers"), LINEAR), **dict.fromkeys(inner("full_attn_layers"), FULL)}
        kinds = kinds or [of_kind.get(i + 1, "none") for i in range(number)]
        inner.done()
    rank = sizes["headdim"]
    ranks = {"gate_rank": rank, "output_gate_rank": rank}
    return {"type": "kda", **sizes, "d_conv": width, **ranks, "norm_eps": eps}, kinds


def _latent_attention(field: Fields) -> dict[str, Any]:
    field.only("q_lora_rank", None)
    field.only("mla_use_nope", True)
    field.only("mla_use_output_gate", False)
    nheads = field("num_attention_heads")
    field.only("num_key_value_heads", nheads, None)
    return {
        "type": "mla",
        "nheads": nheads,
        "headdim": field("v_head_dim"),
        "d_key": field("qk_nope_head_dim"),
        "d_shared": field("qk_rope_head_dim"),
        "kv_rank": field("kv_lora_rank"),
        "bias": field("attention_bias", False),
    }


def _mixture(field: Fields) -> dict[str, Any]:
    field.only("moe_layer_freq", 1)
    field.only("moe_router_activation_func", "sigmoid")
    field.only("use_grouped_topk", True)
    field.only("topk_method", "noaux_tc")
    hidden = field("moe_intermediate_size")
    return {
        "type": "moe",
        "hidden": hidden,
        "num_experts": field("num_experts"),
        "top_k": field("num_experts_per_token"),
        "scores": "sigmoid",
        "normalize": field("moe_renormalize", True),
        "scale": field("routed_scaling_factor", 1.0),
        "expert_groups": field("num_expert_group", 1),
        "top_groups": field("topk_group", 1),
        "shared_hidden": hidden * field("num_shared_experts", 1),
    }
