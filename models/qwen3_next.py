"""The family ``qwen3_next``: as Qwen3.5's mixtures of experts, with the projections of a key head side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.models.decoder import decoder_links, is_stacked, layout_of_parts, mixture_links, mtp_links, same_names
from replayssm.models.fields import Fields
from replayssm.models.keys import Link, mixer_keys
from replayssm.models.qwen import FULL, kinds_of_mixer, layer_types, mixture, model_config

UNUSED: tuple[str, ...] = (r"mtp\.",)
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
}


class Interleaved:
    """Rows of several matrices of theirs in one, key head by key head, and ours in two with all heads in a row.

    Args:
        ngroups: key heads.
        sizes: rows of each part of a head; all parts but the last are our first tensor, which has them one after the
            other, and the last is our second.
    """

    def __init__(self, ngroups: int, sizes: Sequence[int]):
        self.ngroups, self.sizes = ngroups, list(sizes)

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [part.flatten(0, 1) for part in theirs[0].unflatten(0, (self.ngroups, -1)).split(self.sizes, 1)]
        return [torch.cat(parts[:-1]), parts[-1]]

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = [self.ngroups * size for size in self.sizes[:-1]]
        parts = [part.unflatten(0, (self.ngroups, -1)) for part in (*ours[0].split(rows), ours[1])]
        return [torch.cat(parts, 1).flatten(0, 1)]


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("qwen3_next", source)
    field.only("use_sliding_window", False)
    config = model_config(field)
    sparse = {**mixture(field), "normalize": field("norm_topk_prob", True)}
    dense = {"type": "mlp", "hidden": field("intermediate_size")}
    step, dense_layers = field("decoder_sparse_step", 1), field("mlp_only_layers", None) or []
    mixers = kinds_of_mixer(field)
    config["layers"] = []
    for i, kind in enumerate(layer_types(field)):
        is_sparse = i not in dense_layers and sparse["num_experts"] > 0 and (i + 1) % step == 0
        config["layers"] += [dict(mixers[kind]), dict(sparse if is_sparse else dense)]
    config["mtp"] = [dict(mixers[FULL]), sparse]
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    return layout_of_parts(stored)


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)
    d_model = config["d_model"]

    def mixer(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        if block["type"] == "attention":
            return same_names(d_model, block, ours, f"{theirs}self_attn.")
        return _gated_deltanet(d_model, block, ours, f"{theirs}linear_attn.")

    def feed_forward(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        if block["type"] == "moe":
            return mixture_links(d_model, block, ours, f"{theirs}mlp.", stacked=is_stacked(layout, ours))
        return same_names(d_model, block, ours, f"{theirs}mlp.")

    head_stored = layout["head_stored"]
    yield from decoder_links(config, "model.", head_stored=head_stored, mixer=mixer, feed_forward=feed_forward)
    if layout["mtp"]:
        yield from mtp_links(config, mixer=mixer, feed_forward=feed_forward)


def _gated_deltanet(d_model: int, block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
    ngroups, heads = block["ngroups"], block["nheads"] // block["ngroups"]
    key, value = block["d_state"], heads * block["headdim"]
    together = {
        "in_proj_qkvz.weight": (("in_proj_qkv.weight", "in_proj_z.weight"), [key, key, value, value]),
        "in_proj_ba.weight": (("in_proj_b.weight", "in_proj_a.weight"), [heads, heads]),
    }
    for name, (parts, sizes) in together.items():
        yield Link(tuple(ours + part for part in parts), (theirs + name,), Interleaved(ngroups, sizes))
    for name in mixer_keys(d_model, block):
        if not name.startswith("in_proj_"):
            yield Link((ours + name,), (theirs + name,))
