"""From files to a model: every tensor is checked before the first one is read, then they are read one by one."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import hub
from replayssm.checks import expect
from replayssm.hub.pickles import Pickles
from replayssm.models import families
from replayssm.models.config import DTYPES, MODEL_TYPE
from replayssm.models.keys import Link

_BUNDLED = {"tiny": Path(__file__).parent / "tiny"}


def bundled(name: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a bundled model by its name, and any other name as it is."""
    return _BUNDLED.get(name, name) if isinstance(name, str) else name


def model_config(where: str, folder: hub.Folder) -> dict[str, Any]:
    """The config of a ``HybridLM`` for a folder, of which nothing but config.json is read."""
    source = hub.read_config(where, folder)
    return source if source.get("model_type") == MODEL_TYPE else families.adopt(where, source, {})


def expect_dtype(where: str, dtype: torch.dtype | None) -> None:
    """Check a dtype of weights: in any other a model neither computes nor comes back from a file."""
    expect(
        dtype is None or dtype in DTYPES.values(),
        f"{where}: dtype must be None or torch's {', '.join(DTYPES)}; got {dtype!r}. Choose one of these.",
    )


def expect_destination(where: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Check where tensors shall go, before any is read."""
    expect_dtype(where, dtype)
    expect(
        device is None or torch.device(device).type != "meta",
        f"{where}: device must be able to hold weights; got {device}. For shapes alone, build HybridLM(config, "
        "device='meta').",
    )


class Checkpoint:
    """A folder's config and weights, in our names or in those of another library.

    Args:
        where: names the caller in errors.
        wanted: whether a key of the file matters; None is all.
        weights: instead of the folder's safetensors.

    Attributes:
        config: that of a ``HybridLM``, not yet checked.
        weights: in the names of the file.
        unused: keys that belong to the checkpoint and have no place in the model.
    """

    def __init__(
        self,
        where: str,
        folder: hub.Folder,
        *,
        wanted: Callable[[str], bool] | None = None,
        weights: hub.Weights | Pickles | None = None,
    ):
        self._where, source = where, hub.read_config(where, folder)
        self.native = source.get("model_type") == MODEL_TYPE
        if not self.native:
            families.family_of(where, source)  # before files are fetched
        self.weights = hub.Weights(where, folder, wanted=wanted) if weights is None else weights
        entries = self.weights.entries
        self.config = source if self.native else families.adopt(where, source, entries)
        self.unused = [] if self.native else families.unused(source, entries)
        self._file = folder.path

    def embedding_dtype(self) -> torch.dtype | None:
        """The dtype that the file holds the embedding in, None where it holds none."""
        embed = "embed.weight"
        link = next(link for link in self.links([embed]) if embed in link.ours)
        entry = self.weights.entries.get(link.theirs[0])
        return None if entry is None else entry.dtype

    def largest_dtype(self) -> torch.dtype | None:
        """The dtype of the largest tensor that is wanted."""
        entries = self.weights.entries.values()
        return max(entries, key=lambda entry: entry.numel()).dtype if entries else None

    def links(self, own: Iterable[str] = ()) -> list[Link]:
        """How the model's tensors, named ``own``, and those of the file stand for each other."""
        return [Link((key,), (key,)) for key in own] if self.native else families.links_of(self._where, self.config)

    def expect_fit(self, links: Iterable[Link], own: Mapping[str, Tensor], *, part: bool = False) -> None:
        """Refuse a file that does not hold exactly what the links lead to, in shape.

        Args:
            own: the model's tensors, on meta.
            part: the file may hold others.

        Raises:
            ValueError: lists all that is wrong.
        """
        expected: dict[str, Tensor] = {}
        for link in links:
            expected |= zip(link.theirs, link.form.theirs([own[key] for key in link.ours]), strict=True)
        others = set(self.weights.entries) - expected.keys() if part else set(self.unused)
        stored = {key: entry for key, entry in self.weights.entries.items() if key not in others}
        advice = "Use the config.json that was saved with these weights."
        expect_fit(f"{self._where}: {self._file / hub.WEIGHTS}", expected, stored, "its config.json", advice)

    def fill(self, links: Sequence[Link], model: nn.Module, device: torch.device | str, prefix: str = "") -> None:
        """Read what the links lead to into a model on meta.

        Args:
            prefix: of the names of ours, taken off to get those of ``model``.

        Raises:
            ValueError: tensors contradict each other. The model is then useless.
        """
        total = sum(self.weights.entries[key].nbytes for link in links for key in link.theirs)
        with hub.Progress("loading", total) as progress:
            for link in self.in_file_order(links):
                for key, tensor in zip(link.ours, self.read(link), strict=True):
                    fill(model, key.removeprefix(prefix), tensor, device)
                del tensor  # not beside the next one
                progress.advance(sum(self.weights.entries[key].nbytes for key in link.theirs))
        self.weights.close()

    def in_file_order(self, links: Iterable[Link]) -> list[Link]:
        """Links of one file after those of another, so that each file is opened once."""
        return sorted(links, key=lambda link: self.weights.file_of(link.theirs[0]))

    def read(self, link: Link) -> list[Tensor]:
        """The model's tensors of a link, as the file holds them.

        Raises:
            ValueError: the file's tensors contradict each other.
        """
        try:
            theirs = [self.weights.read(key) for key in link.theirs]
            if len(link.ours) < len(theirs) and len({tensor.dtype for tensor in theirs}) > 1:
                raise ValueError("must be of one dtype")  # joined, they would take the widest
            return list(link.form.ours(theirs))
        except ValueError as error:
            names = ", ".join(link.theirs[:4]) + (", ..." if len(link.theirs) > 4 else "")
            raise ValueError(
                f"{self._where}: {names} {error}; got others. Use the config.json that was saved with these weights."
            ) from error


def expect_fit(
    where: str, expected: Mapping[str, Tensor], stored: Mapping[str, Tensor], owner: str, advice: str
) -> None:
    """Refuse a file that does not hold exactly these tensors, which are those of ``owner``."""
    faults = [f"no {key}" for key in expected if key not in stored]
    faults += [f"{key}, which the model does not have" for key in stored if key not in expected]
    faults += [
        f"{key} of shape {tuple(stored[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in stored and stored[key].shape != tensor.shape
    ]
    faults += [
        f"{key} of {stored[key].dtype} instead of floating point"
        for key in expected
        if key in stored and not stored[key].is_floating_point()
    ]
    expect(not faults, f"{where} must hold exactly the tensors of {owner}; got {'; '.join(faults)}. {advice}")


def fill(model: nn.Module, key: str, value: Tensor, device: torch.device | str) -> None:
    """Put a copy of a stored tensor in the place of one on meta."""
    owner, _, name = key.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, name)
    dtype = torch.promote_types(value.dtype, old.dtype) if keeps_precision(key) else old.dtype
    value = value.to(device=device, dtype=dtype, copy=True)
    if isinstance(old, nn.Parameter):
        parameter = nn.Parameter(value, requires_grad=old.requires_grad)
        vars(parameter).update(vars(old))  # marks such as "no weight decay"
        value = parameter
    setattr(module, name, value)


def stored(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors as a file of this dtype holds them."""
    return {
        key: tensor if dtype is None or not tensor.is_floating_point() or keeps_precision(key) else tensor.to(dtype)
        for key, tensor in tensors.items()
    }


def keeps_precision(key: str) -> bool:
    """Whether a parameter is so small and so sensitive that a lower dtype of the model does not touch it."""
    owner, _, name = key.rpartition(".")
    module = owner.rpartition(".")[2]
    if name in ("A_log", "dt_bias", "D") or module == "gate":  # of a mixture of experts: a choice is not rounded
        return True
    return module.endswith("norm") or module.startswith("pre_fc_norm")


def decoder_layer(key: str) -> int | None:
    """The index of the decoder layer that a key of a checkpoint belongs to; None outside of them."""
    found = None if key.startswith("mtp.") else re.search(r"(?:^|\.)layers\.(\d+)\.", key)
    return None if found is None else int(found[1])
