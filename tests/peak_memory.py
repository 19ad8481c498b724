"""How much memory a piece of code holds at once, counted from its operations."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that operations create while they are alive.

    Attributes:
        bytes: most bytes alive at once.
        largest: bytes of the largest storage.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.largest = self._alive = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: weakref.ref) -> None:
            del self._known[key]
            self._alive -= size

        self._known[key] = weakref.ref(storage, forget)
        self._alive += size
        self.bytes, self.largest = max(self.bytes, self._alive), max(self.largest, size)
