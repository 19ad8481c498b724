"""Caches of layers without projections in every format, for the tests of formats; in plain PyTorch."""

import copy

from budgets import assert_same_bits
from passthrough import ChannelDelta, HeadDelta, HeadPlain
from programs import BATCH
from torch import Tensor, nn

from replayssm import ReplayStateCache
from replayssm.cache import formats

KINDS = {"mamba2": HeadPlain, "gated_deltanet": HeadDelta, "kda": ChannelDelta}
READ = formats.names()


def new_cache(
    layer: nn.Module, checkpoint: str, read_format: str | None, *, window: int, step_tokens: int = 1
) -> ReplayStateCache:
    return ReplayStateCache(
        [layer],
        BATCH,
        window=window,
        step_tokens=step_tokens,
        checkpoint=checkpoint,
        read_format=read_format,
        backend="torch",
        seed=3,
    )


def checkpoint_planes(cache: ReplayStateCache) -> dict[str, Tensor]:
    return {name: plane for name, plane in cache[0].tensors().items() if name.startswith("checkpoint")}


def assert_copies_follow(cache: ReplayStateCache, what: str) -> None:
    """The read copy of every row is what its stored checkpoint gives."""
    found = cache[0].stored.copy.load()
    cache = copy.deepcopy(cache)
    cache[0].rebuild_copy()
    assert_same_bits(found.contiguous(), cache[0].stored.copy.load().contiguous(), what)
