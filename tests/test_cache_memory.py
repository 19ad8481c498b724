"""Memory: allocated once, counted to the byte, estimated without allocating, and in the promised precision."""

import pytest
import torch
from backends import both_backends
from draws import DEVICE, draw
from geometries import CASES, R
from running import tensor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replayssm import ReplayStateCache

every_layer = pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)
settings = pytest.mark.parametrize(
    "settings",
    [{}, {"window": 0}, {"window": 33, "step_tokens": 5}, {"window": 4, "step_tokens": 4, "max_seqlen": 50}],
    ids=str,
)


class Allocations(TorchDispatchMode):
    """Keeps every storage that an operation creates, so that no address is used twice."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage()
        return result


@both_backends
@settings
@every_layer
def test_nbytes_is_what_the_cache_holds_to_the_byte(geometry, settings):
    layers = nn.ModuleList([geometry.build(torch.bfloat16, seed=1), geometry.build(torch.float32, seed=2)])
    with Allocations() as allocated:
        cache = ReplayStateCache(layers, 3, **settings)
    held = {id(obj): obj for obj in storages_of(cache)}
    pointers = {storage.data_ptr() for storage in held.values() if storage.nbytes()}
    assert pointers <= set(allocated.storages), "the cache holds memory that it did not allocate"
    assert cache.nbytes == sum(allocated.storages[pointer].nbytes() for pointer in pointers)
    assert cache.nbytes == sum(cache.nbytes_by_part.values())


def storages_of(cache: ReplayStateCache) -> list[torch.UntypedStorage]:
    """Every tensor reachable from the cache, whatever it is called."""
    found, seen, stack = [], set(), [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item.untyped_storage())
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        elif type(item).__module__.startswith("replayssm") and not isinstance(item, nn.Module):
            stack.extend(vars(item).values())
    return found


@both_backends
@settings
@every_layer
def test_the_estimate_equals_the_cache_and_allocates_nothing(geometry, settings):
    layers = nn.ModuleList([geometry.build(torch.bfloat16), geometry.build(torch.float32)])
    with Allocations() as allocated:
        estimate = ReplayStateCache.estimate(layers, 3, **settings)
    assert sum(storage.nbytes() for storage in allocated.storages.values()) == 0
    cache = ReplayStateCache(layers, 3, **settings)
    assert estimate == cache.nbytes_by_part | {"total": cache.nbytes}


@every_layer
def test_the_parts_are_the_sizes_of_the_records(geometry):
    """By hand, for a bf16 layer: k and v as the layer makes them, g and beta and the checkpoint in fp32."""
    cache = ReplayStateCache([geometry.build(torch.bfloat16)], 3, window=6, step_tokens=2)
    nheads, headdim, d_state = geometry.nheads, geometry.headdim, geometry.d_state
    groups = geometry.options.get("ngroups", nheads)
    decay = d_state if geometry.kind == "kda" else 1
    channels = {"retention": 0, "kda": nheads * (2 * d_state + headdim)}.get(
        geometry.kind, nheads * headdim + 2 * groups * d_state
    )
    width = geometry.options.get("d_conv", 1 if geometry.kind == "retention" else 4)
    parts = cache.nbytes_by_part
    assert parts["checkpoint"] == 3 * nheads * headdim * d_state * 4
    assert parts["ring"] == 3 * (6 + 2) * (2 * groups * d_state + 2 * nheads * headdim + 4 * nheads * (decay + 1))
    assert parts["conv"] == 3 * (width - 1 + 2) * channels * 2


@both_backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_layer
def test_the_checkpoint_is_never_narrower_than_fp32_or_the_layer(geometry, dtype):
    cache = ReplayStateCache([geometry.build(dtype)], 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = cache[0]
    assert state.checkpoint.dtype == state.state().dtype == state.ring.g.dtype == state.ring.beta.dtype == wide
    assert state.ring.k.dtype == state.ring.v.dtype == state.conv.dtype == dtype


@both_backends
@pytest.mark.parametrize("window", [0, 5])
@every_layer
def test_no_cache_memory_is_allocated_after_the_cache_is_built(geometry, window):
    layer = geometry.build()
    cache = ReplayStateCache([layer], 3, window=window, step_tokens=3)
    before = {name: (t.data_ptr(), t.shape) for name, t in cache.tensors().items()}
    counters = cache.seqlen.data_ptr(), cache.flushed.data_ptr()
    with torch.no_grad():
        for t, kept in ((9, None), (3, tensor(1, 0, 3)), (3, 2), (1, None), (4, None), (2, 0)):
            layer(draw(t, 3, t, 24), cache[0])
            cache.commit(kept)
    cache.flush()
    cache.reorder(tensor(2, 2, 0))
    cache.copy_rows([0, 1], [1, 0])
    cache.reset(1)
    cache.reset()
    assert {name: (t.data_ptr(), t.shape) for name, t in cache.tensors().items()} == before
    assert (cache.seqlen.data_ptr(), cache.flushed.data_ptr()) == counters


@both_backends
def test_a_cache_lies_where_its_layers_lie():
    """One layer on meta, one on the device under test; no memory of another device is touched."""
    here, nowhere = CASES[0].build(), CASES[1].build().to("meta")
    cache = ReplayStateCache([here, nowhere], 2)
    assert {tensor.device.type for tensor in cache[0].tensors().values()} == {DEVICE.type}
    assert {tensor.device.type for tensor in cache[1].tensors().values()} == {"meta"}
