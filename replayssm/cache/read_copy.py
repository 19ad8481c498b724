"""The read copy of one layer: smaller than the checkpoint, made of it, and never part of the recurrence."""

import torch
from torch import Tensor

from replayssm.cache import formats
from replayssm.cache.selection import Selection


class ReadCopy:
    """What steps read that do not flush, for every row of a cache. Derived: it is rebuilt, never saved.

    Args:
        name: a read format.
        shape: (batch, nheads, headdim, d_state).
        dtype: of the layer's sums.

    Attributes:
        planes: tensors, cache row first, in the order of the format's module.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None):
        self._format = formats.find(name)
        self._d_state, self._dtype = shape[-1], dtype
        planes = self._format.alloc(torch.empty(shape, dtype=torch.float32, device="meta"))
        self.planes = tuple(torch.zeros(plane.shape, dtype=plane.dtype, device=device) for plane in planes)

    def load(self) -> Tensor:
        """(batch, nheads, headdim, d_state) fp32 or fp64, a new tensor: the states as they are read."""
        return self._format.dequantize(self.planes)[..., : self._d_state].to(self._dtype)

    def make(self, states: Tensor, selection: Selection) -> None:
        """Copy stored states (rows worked on, nheads, headdim, d_state) for the chosen rows."""
        states = states.float().contiguous()
        planes = self._format.alloc(states)
        self._format.quantize(states, planes)
        for plane, values in zip(self.planes, planes, strict=True):
            selection.write(plane, values)
