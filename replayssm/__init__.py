"""ReplaySSM: recurrent states as a checkpoint plus a ring of recent inputs, for Mamba-2, Gated DeltaNet and KDA."""

import typing

from replayssm.acceptance import Acceptance
from replayssm.cache.layer_state import LayerState
from replayssm.cache.state_cache import ReplayStateCache
from replayssm.generate import generate
from replayssm.layers.base import ReplayLayer
from replayssm.layers.gated_deltanet import ReplayGatedDeltaNet
from replayssm.layers.kda import ReplayKDA
from replayssm.layers.mamba2 import ReplayMamba2
from replayssm.ops.records import Records, Recurrence

__all__ = [
    "Acceptance",
    "LayerState",
    "Records",
    "Recurrence",
    "ReplayGatedDeltaNet",
    "ReplayKDA",
    "ReplayLayer",
    "ReplayMamba2",
    "ReplayStateCache",
    "generate",
]

if typing.TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
        from importlib.metadata import version  # what is installed says it, and few ask

        return version("replayssm")
