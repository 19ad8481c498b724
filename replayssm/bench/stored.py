"""The kernels for states in formats, called as those for states as they are: what the bench times of a format."""

import torch
from torch import Tensor

from replayssm.cache.selection import Selection
from replayssm.cache.stored_state import StoredState
from replayssm.ops import triton_store
from replayssm.ops.records import Records, Recurrence

AT_ONCE = 16  # rows of a batch that are put into formats at once, in plain PyTorch


class StoredKernels:
    """``Kernels`` that keep the states of each checkpoint tensor in formats, from when they first see it.

    Args:
        checkpoint, read_format: names of formats, as ``ReplayStateCache`` takes them.
    """

    def __init__(self, checkpoint: str, read_format: str | None):
        self.checkpoint, self.read_format = checkpoint, read_format
        self._stored: dict[int, tuple[Tensor, StoredState]] = {}
        self._seeds: dict[int, Tensor] = {}

    def replay(
        self,
        q: Tensor,
        records: Records,
        checkpoint: Tensor,
        ring: Records,
        u: Tensor | None,
        flushing: Tensor,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> Tensor:
        """A step; see ``triton_store.replay``."""
        stored = self._of(checkpoint)
        return triton_store.replay(
            q,
            records,
            stored.checkpoint.planes,
            () if stored.copy is None else stored.copy.planes,
            ring,
            u,
            flushing,
            seqlen,
            flushed,
            self._seed(seqlen),
            layer=0,
            checkpoint=self.checkpoint,
            read_format=self.read_format,
            rows=None,
            length=None,
            recurrence=recurrence,
        )

    def flush(
        self,
        which: Tensor,
        checkpoint: Tensor,
        ring: Records,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> None:
        """Fold, and show in ``checkpoint`` what is stored then."""
        stored = self._of(checkpoint)
        copies = () if stored.copy is None else stored.copy.planes
        triton_store.store(
            None,
            stored.checkpoint.planes,
            copies,
            ring,
            None,
            which,
            seqlen,
            flushed,
            self._seed(seqlen),
            layer=0,
            checkpoint=self.checkpoint,
            read_format=self.read_format,
            recurrence=recurrence,
        )
        if not stored.checkpoint.exact:
            checkpoint.copy_(stored.checkpoint.load(Selection()))

    def error(self, states: Tensor) -> float:
        """What steps read of states, RMS of the difference over that of the states."""
        stored = self._stored_of(states)
        read = stored.checkpoint.load(Selection()) if stored.copy is None else stored.copy.load()
        return float((read - states).square().mean().sqrt() / states.square().mean().sqrt())

    def _seed(self, seqlen: Tensor) -> Tensor:
        """Zeros that are there before a step is timed."""
        if len(seqlen) not in self._seeds:
            self._seeds[len(seqlen)] = torch.zeros_like(seqlen)
        return self._seeds[len(seqlen)]

    def _of(self, checkpoint: Tensor) -> StoredState:
        known = self._stored.get(id(checkpoint))
        if known is None:  # keeps the tensor, so that no other has its id
            known = self._stored[id(checkpoint)] = checkpoint, self._stored_of(checkpoint)
        return known[1]

    def _stored_of(self, states: Tensor) -> StoredState:
        stored = StoredState(self.checkpoint, self.read_format, tuple(states.shape), states.dtype, states.device)
        if stored.checkpoint.exact:
            stored.checkpoint.planes = (states,)
        for rows in torch.arange(len(states), device=states.device).split(AT_ONCE):
            part = StoredState(
                self.checkpoint, self.read_format, (len(rows), *states.shape[1:]), states.dtype, states.device
            )
            seed = torch.zeros_like(rows)
            part.save(states[rows], Selection(), seed=seed, position=seed, layer=0)
            for name, plane in part.tensors().items():
                stored.tensors()[name][rows] = plane
        return stored
