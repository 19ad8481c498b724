"""The traffic of decoding, counted rather than measured: bytes of state and records that a step cannot avoid moving.

Conventional decoding reads and writes the whole state for every token. Replay reads it for every token, writes it once
a window, and reads the records of the window so far instead.
"""

from typing import NamedTuple

from replayssm import ReplayStateCache


class StateBytes(NamedTuple):
    """What all replay layers of a model keep for one sequence, in bytes."""

    state: int
    record: int  # of one token


class Traffic(NamedTuple):
    """Bytes a token and sequence, averaged over a window."""

    read: int
    written: int


def state_bytes(cache: ReplayStateCache) -> StateBytes:
    """State and record sizes of the model that ``cache`` serves; zeros for a model without replay layers."""
    parts = cache.nbytes_by_part
    return StateBytes(
        state=parts.get("checkpoint", 0) // cache.batch,
        record=parts.get("ring", 0) // (cache.batch * cache.clock.slots),
    )


def conventional_traffic(sizes: StateBytes) -> Traffic:
    """One token at a time without records: the state comes in and goes out."""
    return Traffic(read=sizes.state, written=sizes.state)


def replay_traffic(sizes: StateBytes, window: int) -> Traffic:
    """One token a step with a window of ``window`` records.

    The steps of one window find 1, 2, ... window committed records; the last of them folds these into the state and
    starts the next window. Every step writes one record. Windows 0 and 1 both fold at every step.
    """
    period = max(window, 1)
    return Traffic(
        read=sizes.state + sizes.record * (period + 1) // 2,
        written=sizes.state // period + sizes.record,
    )
