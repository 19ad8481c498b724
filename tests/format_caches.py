"""Caches of layers without projections in every format; in plain PyTorch unless a test is marked."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
from backends import as_marked
from budgets import assert_same_bits, rms
from passthrough import ChannelDelta, HeadDelta, HeadPlain
from programs import BATCH
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import replayssm.cache.kept
import replayssm.cache.selection
import replayssm.cache.state_cache
import replayssm.cache.step
import replayssm.models.hybrid
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
        backend=as_marked(),
        seed=3,
    )


def checkpoint_planes(cache: ReplayStateCache) -> dict[str, Tensor]:
    return {name: plane for name, plane in cache[0].tensors().items() if name.startswith("checkpoint")}


def assert_copies_follow(cache: ReplayStateCache, what: str) -> None:
    """The read copy of every row is what its stored checkpoint gives."""
    found = cache[0].stored.copy.load()
    cache = copy.deepcopy(cache)
    cache[0].rebuild_copy()
    expected = cache[0].stored.copy.load()
    if "lr_if4" in cache[0].stored.formats and as_marked() == "triton":  # kernels sum its terms in another order
        assert rms(found - expected) <= 0.02 * rms(expected), what
    else:
        assert_same_bits(found.contiguous(), expected.contiguous(), what)


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Values may not be looked at, as on a GPU."""
    with pytest.MonkeyPatch.context() as patches:
        for module in (
            replayssm.cache.step,
            replayssm.cache.kept,
            replayssm.cache.state_cache,
            replayssm.cache.selection,
            replayssm.models.hybrid,
        ):
            patches.setattr(module, "readable", lambda tensor: False)
        yield


class NoValues(TorchDispatchMode):
    """Refuses what would make a host wait for a GPU: to read a value, or a shape that depends on one."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert not name.startswith(self.WAITING), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))
