"""From another library's checkpoint to a folder of ours and back: tensor by tensor, bit for bit, dtypes as they are."""

import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from replayssm import hub
from replayssm.checks import expect, expect_choice, expect_positive
from replayssm.hub.pickles import Pickles
from replayssm.models import families
from replayssm.models.config import MODEL_TYPE, check_config
from replayssm.models.hybrid import HybridLM
from replayssm.models.loading import Checkpoint

# What else belongs to a model: its tokenizer, and how it likes to generate.
COMPANIONS = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
]


@dataclass
class Report:
    """What a conversion wrote.

    Attributes:
        tensors, nbytes: of the model.
        dtypes: name -> bytes.
        unused: keys that the model has no place for, carried along.
        companions: other files, copied.
    """

    tensors: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    unused: list[str] = field(default_factory=list)
    companions: list[str] = field(default_factory=list)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    revision: str | None = None,
    shard_bytes: int = hub.SHARD_BYTES,
) -> Report:
    """Write a checkpoint in the other form; the target appears whole or not at all.

    "replayssm": from a known family in safetensors, or in pytorch_model.bin, of which only tensors are read. "hf": back
    to what it came from, key for key and bit for bit, also after training. Pickles become safetensors.

    Args:
        source: a folder, or "org/name" of a repository of the Hub.
        target: a folder that does not exist.
        to: "replayssm" or "hf".
        revision: of a repository.
        shard_bytes: most bytes of a file of weights.

    Raises:
        FileNotFoundError, ValueError: the source is incomplete, does not fit its config, or is in this form already; or
            the target exists.
        NotImplementedError: a family, or a setting of one, that is not known.
    """
    where = "convert"
    expect_choice(where, "to", to, ("hf", "replayssm"))
    place, goal = hub.find_folder(where, source, revision), Path(target).expanduser()
    expect_positive(where, shard_bytes=shard_bytes)
    expect(not os.path.lexists(goal), f"{where}: target must not exist; got {goal}. Give another name, or remove it.")
    native = hub.read_config(where, place).get("model_type") == MODEL_TYPE
    expect(
        native == (to == "hf"),
        f"{where}: to must be {'hf' if native else 'replayssm'} for {place.path}; got {to}. It is in that form "
        "already.",
    )
    goal.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{goal.name}-", dir=goal.parent))
    try:
        report = (_to_hf if native else _to_ours)(where, place, partial, shard_bytes)
        for name in COMPANIONS:
            found = place.fetch(name)
            if found is not None:
                shutil.copyfile(found, partial / name)
                report.companions.append(name)
        partial.chmod((partial / hub.CONFIG).stat().st_mode | 0o111)  # mkdtemp lets nobody but the owner in
        partial.rename(goal)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _to_ours(where: str, place: hub.Folder, partial: Path, shard_bytes: int) -> Report:
    pickled = place.fetch(hub.WEIGHTS) is None and place.fetch(hub.INDEX) is None
    checkpoint = Checkpoint(where, place, weights=Pickles(where, place) if pickled else None)
    config, weights = checkpoint.config, checkpoint.weights
    check_config(config)
    links = checkpoint.links()
    checkpoint.expect_fit(links, HybridLM(config, device="meta").own_tensors())
    report = Report(unused=list(checkpoint.unused))
    with _progress(weights.entries) as progress:
        shards = hub.Shards(partial, shard_bytes=shard_bytes)
        for link in checkpoint.in_file_order(links):
            for key, tensor in zip(link.ours, checkpoint.read(link), strict=True):
                _add(shards, key, tensor, report, progress)
        shards.finish()
        others = hub.Shards(partial, hub.UNUSED, shard_bytes=shard_bytes)
        for key in report.unused:
            tensor = weights.read(key)
            others.add(key, tensor)
            progress.advance(tensor.nbytes)
        if report.unused:
            others.finish()
    weights.close()
    _write_config(partial, config)
    return report


def _to_hf(where: str, place: hub.Folder, partial: Path, shard_bytes: int) -> Report:
    checkpoint = Checkpoint(where, place)
    config, weights = checkpoint.config, checkpoint.weights
    check_config(config)
    links = families.links_of(where, config)
    expect(
        place.fetch(hub.MTP) is None,
        f"{where}: {place.path} must hold a model alone; got {hub.MTP}, a head for drafts that no other library has. "
        "Remove the file to convert without it.",
    )
    own = HybridLM(config, device="meta").own_tensors()
    checkpoint.expect_fit(checkpoint.links(own), own)
    carried = any(place.fetch(name) is not None for name in (hub.UNUSED, f"{hub.UNUSED}.index.json"))
    others = hub.Weights(where, place, hub.UNUSED) if carried else None
    report = Report(unused=[] if others is None else list(others.entries))
    with _progress(weights.entries) as progress:
        shards = hub.Shards(partial, shard_bytes=shard_bytes)
        for link in sorted(links, key=lambda link: weights.file_of(link.ours[0])):
            theirs = link.form.theirs([weights.read(key) for key in link.ours])
            for key, tensor in zip(link.theirs, theirs, strict=True):
                _add(shards, key, tensor, report, progress)
        weights.close()
        if others is not None:
            for key in report.unused:
                shards.add(key, others.read(key))
            others.close()
        shards.finish()
    _write_config(partial, config["source"]["config"])
    return report


def _add(shards: hub.Shards, key: str, tensor: Tensor, report: Report, progress: hub.Progress) -> None:
    shards.add(key, tensor)
    report.tensors += 1
    report.nbytes += tensor.nbytes
    report.dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    progress.advance(tensor.nbytes)


def _progress(entries: dict[str, Tensor]) -> hub.Progress:
    return hub.Progress("converting", sum(entry.nbytes for entry in entries.values()))


def _write_config(partial: Path, config: dict[str, Any]) -> None:
    (partial / hub.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
