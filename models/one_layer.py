"""One replay layer out of a checkpoint: only its tensors are read, and of a repository only their files fetched."""

import os
import re
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from replayssm import ReplayLayer, hub
from replayssm.checks import expect
from replayssm.models.config import DTYPES, MIXERS, check_config
from replayssm.models.keys import Link, mixer_keys
from replayssm.models.loading import Checkpoint, bundled, decoder_layer, expect_destination

Layer = TypeVar("Layer", bound=ReplayLayer)


def load_layer(
    cls: type[Layer],
    name: str | os.PathLike[str],
    layer: int,
    revision: str | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Layer:
    """See ``ReplayLayer.from_pretrained``."""
    where = f"{cls.__name__}.from_pretrained"
    expect(
        isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0,
        f"{where}: layer must be the index of a decoder layer, from 0 on; got {layer!r}. Give one.",
    )
    own_type = next((name for name, mixer in MIXERS.items() if isinstance(mixer, type) and issubclass(cls, mixer)), "")
    expect(
        bool(own_type),
        f"{where}: the class must be a replay layer of a known kind; got {cls.__name__}. Call it of ReplayMamba2, "
        "ReplayGatedDeltaNet or ReplayKDA.",
    )
    expect_destination(where, device, dtype)
    folder = hub.find_folder(where, bundled(name), revision)
    checkpoint = Checkpoint(where, folder, wanted=lambda key: decoder_layer(key) == layer)
    config = checkpoint.config
    check_config(config)
    by_layer = _links_by_layer(checkpoint)
    types = {i: [config["layers"][block]["type"] for block in blocks] for i, blocks in by_layer.items()}
    others = ", ".join(str(i) for i in sorted(types) if own_type in types[i]) or "no layer"
    there = f"which is {' and '.join(types[layer])}" if layer in types else f"of {len(types)} layers"
    expect(
        own_type in types.get(layer, []),
        f"{where}: layer must be that of a {own_type}; got {layer}, {there}. Such are: {others}.",
    )
    block = by_layer[layer][types[layer].index(own_type)]
    prefix = f"layers.{block}.mixer."
    links = [link for link in _links(checkpoint) if link.ours[0].startswith(prefix)]
    arguments = {key: value for key, value in config["layers"][block].items() if key != "type"}
    if dtype is None:
        dtype = DTYPES[config["dtype"]] if "dtype" in config else checkpoint.largest_dtype()
    build = cast(Callable[..., Layer], cls)  # a final subclass: the arguments are its own
    found = build(config["d_model"], **arguments, device="meta", dtype=dtype)
    checkpoint.expect_fit(links, {prefix + key: tensor for key, tensor in found.state_dict().items()}, part=True)
    checkpoint.fill(links, found, "cpu" if device is None else device, prefix)
    return found.eval()


def _links(checkpoint: Checkpoint) -> list[Link]:
    """Links of the mixers, for a checkpoint in our names too."""
    config = checkpoint.config
    blocks = enumerate(config["layers"])
    own = [f"layers.{i}.mixer.{key}" for i, block in blocks for key in mixer_keys(config["d_model"], block)]
    return checkpoint.links(own)


def _links_by_layer(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """The blocks of the model that each decoder layer of the checkpoint became."""
    blocks: dict[int, list[int]] = {}
    for link in _links(checkpoint):
        ours, theirs = re.match(r"layers\.(\d+)\.mixer\.", link.ours[0]), decoder_layer(link.theirs[0])
        if ours is not None and theirs is not None and int(ours[1]) not in blocks.setdefault(theirs, []):
            blocks[theirs].append(int(ours[1]))
    return blocks
