"""Model families: what a checkpoint's config.json and keys mean, one module of this package a family.

A family is a module that is listed in ``FAMILIES`` under each ``model_type`` it serves, and that holds

``read_config(source) -> config``
    The content of the checkpoint's config.json -> that of a ``HybridLM``. It reads through ``fields.Fields``, whose
    ``done`` refuses what was not understood. A decoder layer of two sublayers (attention and MLP) becomes two blocks.
``read_layout(source, stored) -> layout``
    What the config does not say and only the file shows, as JSON: a prefix, a tied head that is stored all the same.
    ``stored`` is key -> tensor on meta. The layout is kept in the model's config, so that ``links`` can give back
    exactly the file that came. Where one layer is read, ``stored`` is that layer's part of the file.
``links(source, layout) -> iterable of keys.Link``
    Every tensor of the model exactly once, and every key of the file that belongs to it exactly once. A link of a
    decoder layer i names keys with ``layers.<i>.``: one layer of a checkpoint is found by that.
``UNUSED: tuple of regular expressions``
    Beginnings of keys that such files may hold and the model has no place for, as a vision tower. They are listed after
    loading, and carried along by a conversion.
``PUBLISHED: dict of name -> content of config.json``
    Geometries of published checkpoints, for tests on meta: only the fields that matter to a tensor or to the maths.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from replayssm.checks import expect, expect_exists
from replayssm.models import (
    bamba,
    granitemoehybrid,
    kimi_linear,
    mamba2,
    nemotron_h,
    qwen3_5,
    qwen3_next,
    state_spaces,
)
from replayssm.models.keys import Link

Source = Mapping[str, Any]


class Family(Protocol):
    """See the head of this file."""

    UNUSED: tuple[str, ...]
    PUBLISHED: dict[str, dict[str, Any]]

    def read_config(self, source: Source) -> dict[str, Any]: ...

    def read_layout(self, source: Source, stored: Mapping[str, Tensor]) -> dict[str, Any]: ...

    def links(self, source: Source, layout: Mapping[str, Any]) -> Iterable[Link]: ...


FAMILIES: dict[str, Family] = {
    "bamba": cast(Family, bamba),
    "granitemoehybrid": cast(Family, granitemoehybrid),
    "kimi_linear": cast(Family, kimi_linear),
    "mamba2": cast(Family, mamba2),
    "nemotron_h": cast(Family, nemotron_h),
    "qwen3_5": cast(Family, qwen3_5),
    "qwen3_5_moe": cast(Family, qwen3_5),
    "qwen3_5_moe_text": cast(Family, qwen3_5),
    "qwen3_5_text": cast(Family, qwen3_5),
    "qwen3_next": cast(Family, qwen3_next),
    "state-spaces": cast(Family, state_spaces),
}


def family_of(where: str, source: Source) -> Family:
    """The family of a checkpoint.

    Raises:
        NotImplementedError: none that is known, or its weights are quantised.
    """
    quantised = source.get("quantization_config")
    if quantised is not None:
        raise NotImplementedError(
            f"{where}: quantization_config must be none, since quantised weights are not read; got {quantised!r:.80}. "
            "Take the checkpoint in 16 or 32 bits."
        )
    model_type = source.get("model_type", "state-spaces" if "ssm_cfg" in source else None)
    expect_exists(where, "model_type", model_type, tuple(FAMILIES), "Other families cannot be loaded.")
    return FAMILIES[cast(str, model_type)]


def adopt(where: str, source: Source, stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config of a ``HybridLM`` for a checkpoint, which it remembers under "source".

    Args:
        source: the content of the checkpoint's config.json.
        stored: key -> tensor on meta, of the checkpoint's files.
    """
    layout = family_of(where, source).read_layout(source, stored)
    return {**_config(where, source, layout), "source": {"config": dict(source), "layout": layout}}


def unused(source: Source, stored: Mapping[str, Tensor]) -> list[str]:
    """Keys of a checkpoint that the model of its family has no place for."""
    family = family_of("HybridLM", source)
    has_head = family.read_layout(source, stored).get("mtp", False)
    return [
        key
        for key in stored
        if any(re.match(pattern, key) for pattern in family.UNUSED) and not (has_head and key.startswith("mtp."))
    ]


def links_of(where: str, config: Mapping[str, Any]) -> list[Link]:
    """How the model of this config and the checkpoint that it came from stand for each other.

    Raises:
        ValueError: the model came from no checkpoint, or has been changed since.
    """
    expect(
        "source" in config,
        f"{where}: config must come from a checkpoint of a known family; got a model without. Only such a model has "
        "names in another library.",
    )
    source, layout = config["source"]["config"], config["source"]["layout"]
    own = _config(where, source, layout)
    changed = sorted(
        key for key in (own.keys() | config.keys()) - {"source", "dtype"} if own.get(key) != config.get(key)
    )
    expect(
        not changed,
        f"{where}: config must be that of the checkpoint it came from; got other values of {', '.join(changed)}. "
        "The family has no way to say them.",
    )
    try:
        return list(family_of(where, source).links(source, layout))
    except KeyError as error:
        raise ValueError(
            f"{where}: layout of config.json's source must be as loading wrote it; got one without {error}. Load or "
            "convert the checkpoint again."
        ) from error


def _config(where: str, source: Source, layout: Mapping[str, Any]) -> dict[str, Any]:
    """That of the ``HybridLM``, without a head that the file does not have: transformers drops it."""
    try:
        config = family_of(where, source).read_config(source)
    except (TypeError, AttributeError, ArithmeticError) as error:  # families reckon with whatever stands in the file
        raise ValueError(
            f"{where}: config.json must hold numbers, lists and names where files of its family do; got a value of "
            f"another kind, of which Python says: {error}. Use the file that came with the weights."
        ) from error
    return config if layout.get("mtp", False) else {key: value for key, value in config.items() if key != "mtp"}
