"""How tensors of a checkpoint and of a ``HybridLM`` stand for each other: moved and renamed, never computed with.

So both directions are exact, bit for bit, in every dtype; and a form that works on meta tells the shapes of a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from replayssm.models.config import MIXERS


class Form(Protocol):
    """How the tensors on the two sides of a link are arranged."""

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The model's tensors from the checkpoint's; views where they can be.

        Raises:
            ValueError: the tensors contradict each other.
        """

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """The checkpoint's tensors from the model's, also on meta."""


class Same:
    """The same tensors under other names."""

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return theirs

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return ours


class Twice:
    """One tensor that the checkpoint holds under several names, as a tied head that was stored all the same."""

    def __init__(self, copies: int = 2):
        self.copies = copies

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        first, *others = theirs
        for other in others:
            if not torch.equal(first.view(torch.uint8), other.view(torch.uint8)):
                raise ValueError("must be equal, as the config ties them")
        return [first]

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [*ours] * self.copies


class Stacked:
    """One tensor of ours, whose first axis counts tensors of theirs (experts)."""

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(theirs))]

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = ours
        return stacked.unbind(0)


class Reshaped:
    """One tensor that has other axes there."""

    def __init__(self, ours: Sequence[int], theirs: Sequence[int]):
        self._ours, self._theirs = tuple(ours), tuple(theirs)

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [theirs[0].reshape(self._ours)]

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ours[0].reshape(self._theirs)]


class Link(NamedTuple):
    """Tensors of the model and those of the checkpoint that hold the same numbers."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form = Same()


def mixer_keys(d_model: int, block: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of an entry of a config's layers, as the mixer itself names them."""
    arguments = {key: value for key, value in block.items() if key != "type"}
    return list(MIXERS[block["type"]](d_model, **arguments, device="meta").state_dict())


def renamed(ours: str, theirs: str, names: Sequence[str]) -> Iterator[Link]:
    """Links of the same names under other prefixes (with their dots)."""
    for name in names:
        yield Link((ours + name,), (theirs + name,))


def embeddings(embed: str, *, tied: bool, head_stored: bool, head: str = "lm_head.weight") -> Iterator[Link]:
    """Links of the embedding, named ``embed`` in the checkpoint, and of the head.

    Args:
        tied: the head is the embedding.
        head_stored: the file holds the head also where it is tied.
    """
    if not tied:
        yield Link(("embed.weight",), (embed,))
        yield Link(("lm_head.weight",), (head,))
    elif head_stored:
        yield Link(("embed.weight",), (embed, head), Twice())
    else:
        yield Link(("embed.weight",), (embed,))
