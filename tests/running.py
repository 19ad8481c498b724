"""A cache in the middle of its work: pending records in every row, and what it takes to go on."""

import torch
from draws import DEVICE, draw
from torch import nn

from replayssm import ReplayStateCache


def running(*layers: nn.Module, window: int = 4, step_tokens: int = 3, batch: int = 3, max_seqlen: int | None = None):
    """A cache with pending records in every row, and a step of two tokens not yet taken."""
    cache = ReplayStateCache(list(layers), batch, window=window, step_tokens=step_tokens, max_seqlen=max_seqlen)
    for t in (5, 1, 2):
        step(cache, layers, draw(t, batch, t, 24))
        cache.commit()
    return cache, draw(30, batch, 2, 24)


def step(cache, layers, x, **arguments):
    with torch.no_grad():
        for i, layer in enumerate(layers):
            y = layer(x, cache[i], **arguments)
    return y


def tensor(*values, dtype=None):
    return torch.tensor(values, dtype=dtype, device=DEVICE)
