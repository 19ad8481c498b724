"""The traffic of decoding, counted rather than measured: bytes of state and records that a step cannot avoid moving.

Conventional decoding reads and writes the whole state for every token. Replay reads it for every token, writes it once
a window, and reads the records of the window so far instead.
"""

from typing import NamedTuple

from torch import nn

from replayssm import ReplayLayer, ReplayStateCache


class LayerBytes(NamedTuple):
    """What one replay layer keeps for one sequence, in bytes."""

    state: int
    record: int  # of one token


class Traffic(NamedTuple):
    """Bytes a token and sequence, averaged over a window."""

    read: int
    written: int


def layer_bytes(model: nn.Module) -> list[LayerBytes]:
    """State and record sizes of the replay layers of ``model``, in module order; allocates nothing."""
    cache = ReplayStateCache(model, 1, window=0, max_seqlen=1, device="meta")
    count = sum(isinstance(module, ReplayLayer) for module in model.modules())
    states = [cache[i] for i in range(count)]
    return [LayerBytes(s.checkpoint.nbytes, sum(field[:, 0].nbytes for field in s.ring)) for s in states]


def conventional_traffic(layers: list[LayerBytes]) -> Traffic:
    """One token at a time without records: the state comes in and goes out."""
    state = sum(layer.state for layer in layers)
    return Traffic(read=state, written=state)


def replay_traffic(layers: list[LayerBytes], window: int) -> Traffic:
    """One token a step with a window of ``window`` records.

    The steps of one window find 1, 2, ... window committed records; the last of them folds these into the state and
    starts the next window. Every step writes one record. Windows 0 and 1 both fold at every step.
    """
    period = max(window, 1)
    state = sum(layer.state for layer in layers)
    record = sum(layer.record for layer in layers)
    return Traffic(read=state + record * (period + 1) // 2, written=state // period + record)
