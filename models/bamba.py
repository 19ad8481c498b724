"""The family ``bamba``: Mamba-2 and a little attention, each layer with an MLP."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.models.config import MODEL_TYPE
from replayssm.models.decoder import decoder_links, same_names
from replayssm.models.fields import Fields, rotary
from replayssm.models.granitemoehybrid import mamba
from replayssm.models.keys import Link

UNUSED: tuple[str, ...] = ()
HARMLESS = ["mamba_chunk_size", "z_loss_coefficient"]  # how a kernel cuts a sequence; training
NORMS = ("input_layernorm", "pre_ff_layernorm", "final_layernorm")
PUBLISHED: dict[str, dict[str, Any]] = {
    "Bamba-9B": {
        "model_type": "bamba",
        "attn_layer_indices": [9, 18, 27],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
    },
}


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("bamba", source, HARMLESS)
    field.only("hidden_act", "silu")
    eps, d_model, nheads = field("rms_norm_eps", 1e-5), field("hidden_size"), field("num_attention_heads")
    headdim, kv_heads = field("head_dim", d_model // nheads), field("num_key_value_heads", 8)
    recurrent, feed_forward = mamba(field, eps), {"type": "mlp", "hidden": field("intermediate_size")}
    feed_forward["bias"] = field("mlp_bias", False)
    attention = {
        "type": "attention",
        "nheads": nheads,
        "headdim": headdim,
        "kv_heads": nheads if kv_heads is None else kv_heads,
        **rotary(field, headdim, share=0.5),
        "bias": field("attention_bias", False),
    }
    full = set(field("attn_layer_indices", None) or [])
    kinds = [attention if i in full else recurrent for i in range(field("num_hidden_layers"))]
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size"),
        "d_model": d_model,
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": eps,
        **field.dtype(),
        "layers": [dict(block) for mixer in kinds for block in (mixer, feed_forward)],
    }
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"head_stored": "lm_head.weight" in stored}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)

    def mixer(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        part = "mamba" if block["type"] == "mamba2" else "self_attn"
        return same_names(config["d_model"], block, ours, f"{theirs}{part}.")

    def feed_forward(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        return same_names(config["d_model"], block, ours, f"{theirs}feed_forward.")

    head_stored = layout["head_stored"]
    return decoder_links(config, "model.", head_stored=head_stored, mixer=mixer, feed_forward=feed_forward, norms=NORMS)
