"""Writing models: whole folders that appear at once or not at all, and shards one by one."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from replayssm.hub.folders import CONFIG
from replayssm.hub.weights import WEIGHTS

MTP = "mtp.safetensors"  # a head for drafts
UNUSED = "unused.safetensors"  # tensors of another library's checkpoint that the model has no place for
SHARD_BYTES = 5 * 10**9


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json, model.safetensors and, for a model with a head for drafts, mtp.safetensors.

    An interrupted write leaves the files that were there. A head or shards of other weights do not stay.
    """
    text = json.dumps(dict(config), indent=2) + "\n"
    weights = {WEIGHTS: _on_the_host(tensors)} | ({} if head is None else {MTP: _on_the_host(head)})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:  # one for each of two writers
        config_path = Path(partial, CONFIG)
        config_path.write_text(text, encoding="utf-8")
        paths = [config_path]
        for name, content in weights.items():
            paths.append(Path(partial, name))
            save_file(content, paths[-1], metadata={"format": "pt"})
            shutil.copymode(config_path, paths[-1])  # save_file lets nobody but the owner read
        for path in reversed(paths):
            path.replace(folder / path.name)
    if head is None:
        (folder / MTP).unlink(missing_ok=True)
    (folder / UNUSED).unlink(missing_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, in a folder that is made if need be; interrupted it leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as partial:
        written = Path(partial, path.name)
        written.touch()
        mode = written.stat().st_mode
        save_file(_on_the_host(tensors), written, metadata={"format": "pt"})
        written.chmod(mode)  # save_file lets nobody but the owner read
        written.replace(path)


class Shards:
    """Writes the weights of a folder tensor by tensor and holds at most one file of them.

    Args:
        folder: exists.
        name: of the file, if there is one; several carry their numbers, and an index names them.
        shard_bytes: most bytes of a file, but for one tensor that is larger.
    """

    def __init__(self, folder: Path, name: str = WEIGHTS, *, shard_bytes: int = SHARD_BYTES):
        self._folder, self._name, self._limit = folder, name, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self._total = 0
        self._parts: list[list[str]] = []

    def add(self, key: str, tensor: Tensor) -> None:
        """The next tensor, which must not change until it is written."""
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        held = tensor.detach().cpu().contiguous()
        if held.untyped_storage().nbytes() > held.nbytes or any(_share(held, other) for other in self._held.values()):
            held = held.clone()  # a view would keep the whole, and safetensors holds nothing twice
        self._held[key] = held
        self._held_bytes += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write what is left and, for more than one file, the index."""
        self._flush()
        if len(self._parts) == 1:
            self._part(0).rename(self._folder / self._name)
            return
        stem = Path(self._name).stem
        names = [f"{stem}-{i + 1:05}-of-{len(self._parts):05}.safetensors" for i in range(len(self._parts))]
        for i, name in enumerate(names):
            self._part(i).rename(self._folder / name)
        files = {key: name for keys, name in zip(self._parts, names, strict=True) for key in keys}
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(files.items()))}
        (self._folder / f"{self._name}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self._folder / f".part-{number}"

    def _flush(self) -> None:
        write_weights(self._part(len(self._parts)), self._held)
        self._parts.append(sorted(self._held))
        self._held, self._held_bytes = {}, 0


def _share(a: Tensor, b: Tensor) -> bool:
    return a.nbytes > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _on_the_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
