"""The states of one layer as they are kept between steps: the checkpoint, and the copy that is read instead of it.

Two precisions, apart from each other: the recurrence continues from the checkpoint alone. Nothing that was read from a
copy goes into it, so changing the read format never changes a bit of the checkpoint.
"""

import torch
from torch import Tensor

from replayssm.cache.checkpoint import EXACT, Checkpoint, expect_checkpoint
from replayssm.cache.formats import expect_read_format
from replayssm.cache.read_copy import ReadCopy
from replayssm.cache.selection import Selection

RUN_ON = ("cpu", "cuda")  # the devices that formats run on; ROCm's are called "cuda" too


def check_formats(where: str, checkpoint: str, read_format: str | None) -> None:
    """Refuse a checkpoint or read format that does not exist.

    Raises:
        NotImplementedError: the text lists those that do.
    """
    expect_checkpoint(where, checkpoint)
    expect_read_format(where, read_format)


def expect_runnable(where: str, checkpoint: str, read_format: str | None, device: torch.device) -> None:
    """Refuse a format that the device cannot run. On meta nothing runs: sizes can be asked for.

    Raises:
        NotImplementedError: the text names what can.
    """
    if (checkpoint, read_format) == (EXACT, None) or device.type == "meta":
        return
    asked = f"checkpoint={checkpoint!r} and read_format={read_format!r}"
    if device.type not in RUN_ON:
        raise NotImplementedError(
            f"{where}: checkpoint must be {EXACT!r} and read_format None on {device}; got {asked}. Formats need 64-bit "
            f"integers and FP8, as {' and '.join(RUN_ON)} have them."
        )


class StoredState:
    """Checkpoint and read copy of one layer, for every row of a cache.

    Args:
        checkpoint, read_format: as ``ReplayStateCache`` takes them.
        shape: (batch, nheads, headdim, d_state).
        dtype: of the layer's sums, fp32 or fp64.

    Attributes:
        checkpoint: what the recurrence continues from.
        copy: what steps read, or None where they read the checkpoint.
        formats: the names of both.
    """

    def __init__(
        self,
        checkpoint: str,
        read_format: str | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        self.formats = checkpoint, read_format
        self.checkpoint = Checkpoint(checkpoint, shape, dtype, device)
        self.copy = None if read_format is None else ReadCopy(read_format, shape, dtype, device)

    @property
    def plain(self) -> bool:
        """States are kept as they are computed, and read as they are kept."""
        return self.checkpoint.exact and self.copy is None

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, cache row first: "checkpoint" and "copy", further planes of each with .1, .2, ... behind."""
        parts = {"checkpoint": self.checkpoint.planes, "copy": () if self.copy is None else self.copy.planes}
        return {f"{part}.{i}" if i else part: plane for part, planes in parts.items() for i, plane in enumerate(planes)}

    def save(self, states: Tensor, selection: Selection, *, seed: Tensor, position: Tensor, layer: int) -> None:
        """Make states the checkpoints of the chosen rows, and copy what is stored; see ``Checkpoint.save``."""
        self.checkpoint.save(states, selection, seed=seed, position=position, layer=layer)
        self.rebuild_copy(selection)

    def rebuild_copy(self, selection: Selection) -> None:
        """Make the copy of the chosen rows again; it is a function of their stored checkpoints."""
        if self.copy is not None:
            self.copy.make(self.checkpoint.load(selection), selection)

    def read(self, due: Selection, folded: Tensor | None, *, every_row_folds: bool) -> Tensor:
        """What a step reads: of rows that have folded in it the state that they folded, of the others the copy.

        A row that folds has its exact state at hand, so it answers from that, before any rounding.

        Args:
            due: the rows that have folded.
            folded: (rows worked on, nheads, headdim, d_state), their states; None if there are none.
            every_row_folds: also those that had nothing to fold, whose exact states are the stored ones.

        Returns:
            (batch, nheads, headdim, d_state) fp32 or fp64, not to be written to.
        """
        if self.copy is None or every_row_folds:
            state, as_folded = self.checkpoint.load(Selection()), self.checkpoint.exact
        else:
            state, as_folded = self.copy.load(), False
        if folded is not None and not as_folded:
            due.write(state, folded)
        return state

    def faults(self) -> list[str]:
        """What is wrong with the stored numbers, in words; waits for the device.

        NaN or infinity stays inside the row and head in which it arose; what shares a scale with it is lost as well.
        """
        found = []
        lost = self.checkpoint.load(Selection()).isfinite().all(-1).all(-1).logical_not().sum().item()
        if lost:
            found.append(f"{lost} states of a row and head hold NaN or infinity")
        cut = self.checkpoint.saturated()
        if cut:
            found.append(f"{cut} numbers of the checkpoint were cut to the largest that it can hold")
        return found
