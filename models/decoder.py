"""Links of the usual decoder: layers of a mixer and a feed-forward part, each behind a norm of its own.

A layer is two blocks here. Mixtures of experts are stored in two ways, all experts in one tensor or each by itself.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from replayssm.models.keys import Link, Stacked, embeddings, mixer_keys, renamed

NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
# An entry of the config's layers, our prefix of its mixer, and the checkpoint's prefix of its layer -> links.
PartLinks: TypeAlias = Callable[[Mapping[str, Any], str, str], Iterable[Link]]


class StackedPairs:
    """``gate_up_proj``: all experts, rows of the gate over those of up. Theirs are all gates, then all ups."""

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        half = len(theirs) // 2
        pairs = theirs[0].new_empty(half, 2, *theirs[0].shape)  # filled in place: experts are most of a model
        for i, pair in enumerate(zip(theirs[:half], theirs[half:], strict=True)):
            pairs[i, 0], pairs[i, 1] = pair
        return [pairs.flatten(1, 2)]

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        gates, ups = ours[0].chunk(2, 1)
        return [*gates.unbind(), *ups.unbind()]


def decoder_links(
    config: Mapping[str, Any],
    root: str,
    *,
    head_stored: bool,
    mixer: PartLinks,
    feed_forward: PartLinks,
    norms: Sequence[str] = NORMS,
) -> Iterator[Link]:
    """Links of a whole model.

    Args:
        config: of the ``HybridLM``; its blocks are mixer and feed-forward part in turn.
        root: prefix of the checkpoint's keys, with its dot; the head has none.
        head_stored: the file holds the head also where it is tied.
        norms: what the checkpoint calls those of a layer's two parts, and the last one.
    """
    yield from embeddings(f"{root}embed_tokens.weight", tied=config["tie_embeddings"], head_stored=head_stored)
    yield Link(("norm.weight",), (f"{root}{norms[2]}.weight",))
    yield from _layer_links(config["layers"], "", root, mixer, feed_forward, norms)


def mtp_links(config: Mapping[str, Any], *, mixer: PartLinks, feed_forward: PartLinks) -> Iterator[Link]:
    """Links of an ``MTPDecoder``, with the names of Qwen3-Next."""
    yield from renamed("mtp.", "mtp.", [f"{name}.weight" for name in ("fc", "norm")])
    yield from renamed("mtp.", "mtp.", [f"pre_fc_norm_{name}.weight" for name in ("embedding", "hidden")])
    yield from _layer_links(config["mtp"], "mtp.", "mtp.", mixer, feed_forward, NORMS)


def layout_of_parts(stored: Collection[str]) -> dict[str, bool]:
    """What the keys of a file say about its head, its experts and its ``MTPDecoder``, which has one layer."""
    stacked = [key.startswith("mtp.") for key in stored if key.endswith("experts.gate_up_proj")]
    return {
        "head_stored": "lm_head.weight" in stored,
        "experts_stacked": False in stacked,
        "mtp": {key.split(".")[2] for key in stored if key.startswith("mtp.layers.")} == {"0"},
        "mtp_experts_stacked": True in stacked,
    }


def is_stacked(layout: Mapping[str, Any], ours: str) -> bool:
    """Whether the checkpoint holds all experts of the mixture with our prefix ``ours`` in one tensor."""
    return layout["mtp_experts_stacked" if ours.startswith("mtp.") else "experts_stacked"]


def _layer_links(
    blocks: Sequence[Mapping[str, Any]],
    ours_root: str,
    theirs_root: str,
    mixer: PartLinks,
    feed_forward: PartLinks,
    norms: Sequence[str],
) -> Iterator[Link]:
    for i, block in enumerate(blocks):
        ours, theirs, first = f"{ours_root}layers.{i}.", f"{theirs_root}layers.{i // 2}.", i % 2 == 0
        yield Link((f"{ours}norm.weight",), (f"{theirs}{norms[i % 2]}.weight",))
        yield from (mixer if first else feed_forward)(block, f"{ours}mixer.", theirs)


def same_names(d_model: int, block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
    """Links of a part whose tensors have our names in the checkpoint, behind another prefix."""
    yield from renamed(ours, theirs, mixer_keys(d_model, block))


def mixture_links(
    d_model: int,
    block: Mapping[str, Any],
    ours: str,
    theirs: str,
    *,
    stacked: bool = False,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> Iterator[Link]:
    """Links of a ``MoE`` with gated experts.

    Args:
        stacked: the checkpoint holds ``experts.gate_up_proj`` and ``experts.down_proj`` as we do.
        names: else what it calls the projections of an expert: gate, up, down.
        shared: what it calls the shared expert.
    """
    count = range(block["num_experts"])
    gate, up, down = ([f"{theirs}experts.{i}.{name}.weight" for i in count] for name in names)
    for name in mixer_keys(d_model, block):
        if stacked or not name.startswith("experts."):
            yield Link((ours + name,), (theirs + name.replace("shared_expert.", f"{shared}."),))
        elif name == "experts.down_proj":
            yield Link((ours + name,), tuple(down), Stacked())
        else:
            yield Link((ours + name,), (*gate, *up), StackedPairs())
