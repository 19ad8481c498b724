"""Some rows of a cache: an index where the host may look at it, else a mask."""

import torch
from torch import Tensor

from replayssm.checks import readable


class Selection:
    """Cache rows to work on: all of them, those that an index names, or, where looking would wait, those of a mask.

    Under a mask all rows are worked on and what is not wanted is not written, so no shape depends on a value.

    Attributes:
        rows: (chosen,) int64, or None where all rows are worked on.
        mask: (batch,) bool, or None where all rows worked on are wanted.
    """

    def __init__(self, which: Tensor | None = None):
        """``which``: (batch,) bool, None for all."""
        self.rows = self.mask = None
        if which is not None:
            if readable(which):
                self.rows = which.nonzero().squeeze(1)
            else:
                self.mask = which

    @property
    def none(self) -> bool:
        """There is nothing to do, as far as the host knows."""
        return self.rows is not None and len(self.rows) == 0

    def take(self, cached: Tensor) -> Tensor:
        """(batch, ...) -> (rows worked on, ...)."""
        return cached if self.rows is None else cached.index_select(0, self.rows)

    def write(self, cached: Tensor, values: Tensor) -> None:
        """Put values (rows worked on, ...) into the chosen rows of ``cached`` (batch, ...), in place."""
        if self.rows is not None:
            cached.index_copy_(0, self.rows, values)
        elif self.mask is not None:
            cached.copy_(torch.where(self.mask.reshape(-1, *[1] * (cached.ndim - 1)), values, cached))
        else:
            cached.copy_(values)
