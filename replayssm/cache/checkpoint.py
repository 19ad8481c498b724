"""How a checkpoint is stored: as it is computed, or in fewer bits, rounded stochastically.

There is no format that rounds to the nearest: a decay that moves a number by less than half a step would have no
effect, window after window, and the error would grow without bound.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.cache import blocks, rounding
from replayssm.cache.philox import state_words
from replayssm.cache.selection import Selection
from replayssm.checks import expect_exists


class CheckpointFormat(NamedTuple):
    """States (..., headdim, d_state) fp32 in fewer bits.

    Attributes:
        encode: of states and random words, the planes, first the codes; leading axes as those of the states.
        decode: of the planes, fp32 numbers (..., headdim, d_state or more: d_state filled up to whole blocks).
    """

    encode: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]


EXACT = "fp32"
FORMATS = {
    "fp16_sr": CheckpointFormat(lambda x, words: (rounding.to_fp16(x, words),), Tensor.float),
    "bf16_sr": CheckpointFormat(lambda x, words: (rounding.to_bf16(x, words),), Tensor.float),
    "int16_sr": CheckpointFormat(blocks.int16_rows, blocks.from_int16_rows),
    "int8_sr": CheckpointFormat(blocks.int8_blocks, blocks.from_int8_blocks),
    "fp8_sr": CheckpointFormat(blocks.fp8_rows, blocks.from_fp8_rows),
    "nvfp4_sr": CheckpointFormat(blocks.nvfp4, blocks.from_nvfp4),
}
NAMES = (EXACT, *FORMATS)


def expect_checkpoint(where: str, name: str) -> None:
    """Refuse a checkpoint format that does not exist.

    Raises:
        NotImplementedError: the text lists those that do, and says why there is none that rounds to the nearest.
    """
    advice = "Choose one of these."
    if f"{name}_sr" in FORMATS:
        advice = f"Rounding to the nearest swallows slow decay, so stored states are rounded stochastically: {name}_sr."
    expect_exists(where, "checkpoint", name, NAMES, advice)


class Checkpoint:
    """The stored states of one layer for every row of a cache.

    Args:
        name: of ``NAMES``; "fp32" is the dtype of the layer's sums, fp64 in an fp64 layer.
        shape: (batch, nheads, headdim, d_state).
        dtype: of the layer's sums.

    Attributes:
        planes: tensors, cache row first; all zeros are states of zeros.
        shape: (nheads, headdim, d_state).
        exact: a stored state is what was given to be stored, bit for bit.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None):
        self.exact = name == EXACT
        self._dtype, self.shape = dtype, shape[1:]
        self._format = None if self.exact else FORMATS[name]
        planes: tuple[Tensor, ...] = (torch.empty(shape, dtype=dtype, device="meta"),)
        if self._format is not None:
            planes = self._format.encode(planes[0].float(), planes[0].long())
        self.planes = tuple(torch.zeros(plane.shape, dtype=plane.dtype, device=device) for plane in planes)

    def load(self, selection: Selection) -> Tensor:
        """The states of the chosen rows.

        Returns:
            (rows worked on, nheads, headdim, d_state) fp32 or fp64; of all rows of an exact checkpoint not a copy.
        """
        planes = [selection.take(plane) for plane in self.planes]
        if self._format is None:
            return planes[0]
        return self._format.decode(*planes)[..., : self.shape[-1]].to(self._dtype)

    def saturated(self) -> int:
        """How many numbers were too large and became the largest that there is; waits for the device.

        Only a float without a scale has a largest number.
        """
        codes = self.planes[0]
        if self.exact or not codes.is_floating_point():
            return 0
        return int((codes.abs() == torch.finfo(codes.dtype).max).sum())

    def save(self, states: Tensor, selection: Selection, *, seed: Tensor, position: Tensor, layer: int) -> None:
        """Store the states of the chosen rows.

        Args:
            states: (rows worked on, nheads, headdim, d_state).
            seed, position: (batch,) int64, the row's random stream, and the last token that its state holds.
            layer: which replay layer of the model.
        """
        planes: tuple[Tensor, ...] = (states,)
        if self._format is not None:
            nheads, headdim, d_state = self.shape
            words = state_words(selection.take(seed), selection.take(position), layer, (nheads, headdim, d_state))
            planes = self._format.encode(states.float(), words)
        for plane, values in zip(self.planes, planes, strict=True):
            selection.write(plane, values)
