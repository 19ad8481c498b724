"""Layers without projections: x holds the records themselves, so that nothing but the cache and the ops can differ."""

import torch
from draws import DEVICE
from torch import Tensor, nn

from replayssm import Records, Recurrence, ReplayLayer


class Passthrough(ReplayLayer):
    """The features of x are q, k, v, g and beta of 4 heads in 2 groups; the outputs are those of the recurrence."""

    def __init__(self, headdim: int = 5, d_state: int = 7, dtype: torch.dtype = torch.float32):
        super().__init__(nheads=4, headdim=headdim, d_state=d_state, ngroups=2)
        # only tells the cache the dtype and the device
        self.anchor = nn.Parameter(torch.empty(0, dtype=dtype, device=DEVICE), requires_grad=False)
        self.decay_width = self.recurrence.decay_width(d_state)
        self.sizes = [2 * d_state, 2 * d_state, 4 * headdim, 4 * self.decay_width, 4]

    @property
    def features(self) -> int:
        return sum(self.sizes)

    def project(self, x: Tensor, conv_state: None, mask: Tensor | None) -> tuple[Tensor, Records, None]:
        q, k, v, g, beta = x.split(self.sizes, -1)
        q, k = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (q, k))
        if self.recurrence.delta:
            k = k / k.abs().sum(-1, keepdim=True)
        g = -g.abs().unflatten(-1, (self.nheads, self.decay_width))
        return q, Records(k, v.unflatten(-1, (self.nheads, self.headdim)), g, torch.sigmoid(beta)), None

    def emit(self, y: Tensor, extra: None) -> Tensor:
        return y.flatten(-2)


class HeadPlain(Passthrough):
    recurrence = Recurrence(decay="head", delta=False)


class HeadDelta(Passthrough):
    recurrence = Recurrence(decay="head", delta=True)


class ChannelPlain(Passthrough):
    recurrence = Recurrence(decay="channel", delta=False)


class ChannelDelta(Passthrough):
    recurrence = Recurrence(decay="channel", delta=True)


PASSTHROUGH = [HeadPlain, HeadDelta, ChannelPlain, ChannelDelta]
