"""What a token leaves behind, and the two facts in which the recurrences differ.

Axes of the library, in this order everywhere: batch, t (time), heads, features. ``k`` and ``q`` are stored once per
key group (``ngroups``); value head ``h`` reads group ``h // (nheads // ngroups)``. A state is
(batch, nheads, headdim, d_state). In einsum strings: b batch, g group, r value heads of a group, s and i times,
p headdim, n d_state.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class Records(NamedTuple):
    """What tokens leave behind: enough to redo their state updates, nothing more."""

    k: Tensor  # (batch, t, ngroups, d_state)     write key        Mamba-2: B
    v: Tensor  # (batch, t, nheads, headdim)      value            Mamba-2: x
    g: Tensor  # (batch, t, nheads, 1 | d_state)  log decay, nats  Mamba-2: dt * A; always <= 0
    beta: Tensor  # (batch, t, nheads)            write strength   Mamba-2: dt


@dataclass(frozen=True)
class Recurrence:
    """A recurrence, declared: everything else about it is shared.

    Attributes:
        decay: "head", one log decay a head and token (Mamba-2, GDN), or "channel", one per key channel (KDA).
        delta: write ``v`` minus what the decayed state already returns for ``k`` (GDN, KDA), or ``v`` (Mamba-2).
    """

    decay: Literal["head", "channel"]
    delta: bool

    def decay_width(self, d_state: int) -> int:
        """Size of the last axis of ``Records.g``."""
        return 1 if self.decay == "head" else d_state
