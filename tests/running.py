"""A cache in the middle of its work: pending records in every row, and what it takes to go on."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from draws import DEVICE, draw
from torch import Tensor, nn

from replayssm import ReplayStateCache


def running(
    *layers: nn.Module, window: int = 4, step_tokens: int = 3, batch: int = 3, max_seqlen: int | None = None
) -> tuple[ReplayStateCache, Tensor]:
    """A cache with pending records in every row, and a step of two tokens not yet taken."""
    cache = ReplayStateCache(list(layers), batch, window=window, step_tokens=step_tokens, max_seqlen=max_seqlen)
    for t in (5, 1, 2):
        step(cache, layers, draw(t, batch, t, 24))
        cache.commit()
    return cache, draw(30, batch, 2, 24)


def step(
    cache: ReplayStateCache,
    layers: Sequence[nn.Module],
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    rows: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """One step of every layer over the same x; the output of the last one."""
    with torch.no_grad():
        for i, layer in enumerate(layers):
            y = layer(x, cache[i], attention_mask=attention_mask, rows=rows, parents=parents)
    return y


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, device=DEVICE)
