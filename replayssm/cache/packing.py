"""Padding: which positions of a call are real tokens, and how they are moved to the front and back."""

import torch
from torch import Tensor

from replayssm.checks import expect, expect_device, expect_shape


class Packing:
    """Which positions of a call are real tokens: packing moves each row's tokens to the front.

    Args:
        attention_mask: (rows, t), nonzero = a token; None is all tokens.
        length: (rows,) int64, real tokens of each row, at most what the mask says; None is what the mask says.

    Attributes:
        valid: (rows, t) bool in packed order, or None if every position is a real token.
    """

    def __init__(self, attention_mask: Tensor | None, t: int, length: Tensor | None = None):
        self.valid: Tensor | None = None
        self._order: Tensor | None = None
        self._shown: Tensor | None = None
        if attention_mask is not None:
            real = attention_mask != 0
            length = real.sum(1) if length is None else length
            count = real.long().cumsum(1) - 1  # packed position of each real token
            self._order = torch.argsort(real.logical_not().to(torch.uint8), dim=1, stable=True)
            self._count = count.clamp(min=0)
            self._shown = real.logical_and(count < length.unsqueeze(1))
        if length is not None:
            self.valid = torch.arange(t, device=length.device) < length.unsqueeze(1)

    def pack(self, x: Tensor) -> Tensor:
        """(rows, t, ...): each row's real tokens first, exact zeros behind; without a mask, ``x`` itself."""
        if self._order is None:
            return x
        return masked(x.gather(1, _like(self._order, x).expand_as(x)), self.valid)

    def unpack(self, y: Tensor) -> Tensor:
        """The inverse of ``pack``: exact zeros at masked positions and for rows that are off."""
        if self._shown is None:
            return masked(y, self.valid)
        return masked(y.gather(1, _like(self._count, y).expand_as(y)), self._shown)

    @classmethod
    def checked(cls, where: str, attention_mask: Tensor | None, x: Tensor) -> "Packing":
        """The packing of whole sequences ``x`` (rows, t, ...), where the mask's values may be read.

        Raises:
            ValueError: the mask has another shape than the positions of x, or padding between tokens.
        """
        if attention_mask is not None:
            expect_mask(where, attention_mask, (x.shape[0], x.shape[1]), x.device)
            if not torch.compiler.is_compiling():
                refuse_interior_padding(where, has_interior_padding(attention_mask))
        return cls(attention_mask, x.shape[1])


def masked(x: Tensor, valid: Tensor | None) -> Tensor:
    """``x`` (rows, t, ...) with exact zeros where ``valid`` (rows, t) is False, NaN included; None masks nothing."""
    return x if valid is None else torch.where(_like(valid, x), x, 0)


def expect_mask(where: str, attention_mask: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """Check shape, dtype and device of an attention_mask."""
    advice = "Give one entry for each position of the input, 1 for a token and 0 for padding."
    expect_shape(where, "attention_mask", attention_mask, shape, advice)
    expect(
        not attention_mask.is_floating_point(),
        f"{where}: attention_mask must be bool or integer, 1 = a token; got {attention_mask.dtype}. "
        "An additive mask does not fit: pass which positions are tokens.",
    )
    expect_device(where, "attention_mask", attention_mask, device)


def has_interior_padding(attention_mask: Tensor) -> Tensor:
    """() bool: some row has a masked position between two real ones."""
    real = attention_mask != 0
    begins = real[:, 0].long() + (real[:, 1:] & ~real[:, :-1]).sum(1)
    return (begins > 1).any()


def refuse_interior_padding(where: str, interior: Tensor) -> None:
    """Raise ValueError if the flag from ``has_interior_padding`` is set; reads it."""
    expect(
        not bool(interior),
        f"{where}: attention_mask must have its zeros on the left or on the right of a row's tokens; got zeros "
        "between tokens. Use left padding.",
    )


def _like(index: Tensor, x: Tensor) -> Tensor:
    """(rows, t) -> (rows, t, 1, ...) with as many axes as ``x``."""
    return index.reshape(index.shape + (1,) * (x.ndim - 2))
