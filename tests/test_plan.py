"""The traffic model against the schedule that a cache really follows."""

import pytest
import torch

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayMamba2, ReplayStateCache
from replayssm.plan import LayerBytes, Traffic, conventional_traffic, layer_bytes, replay_traffic


@pytest.mark.parametrize("window", [0, 1, 2, 5, 16])
def test_traffic_is_what_the_schedule_of_a_cache_moves(window: int) -> None:
    layer = ReplayMamba2(16, nheads=2, headdim=4, d_state=8)
    (sizes,) = layer_bytes(layer)
    cache = ReplayStateCache(layer, 1, window=window)
    steps = 20 * max(window, 1)
    read = written = 0
    with torch.no_grad():
        layer(torch.randn(1, 7, 16), cache[0])
        cache.commit()
        for step in range(steps + 1):
            pending = int(cache.seqlen - cache.flushed)
            before = int(cache.flushed)
            layer(torch.randn(1, 1, 16), cache[0])
            cache.commit()
            if step > 0:  # the first step behind a prompt finds no record
                read += sizes.state + pending * sizes.record
                written += sizes.record + sizes.state * (int(cache.flushed) > before)
    assert replay_traffic([sizes], window) == Traffic(read // steps, written // steps)


def test_sizes_are_those_of_the_cache() -> None:
    layers = torch.nn.ModuleList(
        [
            ReplayMamba2(32, nheads=4, headdim=8, d_state=16, ngroups=2),
            ReplayGatedDeltaNet(32, nheads=2, headdim=8, d_state=16, dtype=torch.bfloat16),
            ReplayKDA(32, nheads=2, headdim=8),
        ]
    )
    cache = ReplayStateCache(layers, 1, window=16)
    slots = cache[0].ring.k.shape[1]
    sizes = layer_bytes(layers)
    assert sum(layer.state for layer in sizes) == cache.nbytes_by_part["checkpoint"]
    assert slots * sum(layer.record for layer in sizes) == cache.nbytes_by_part["ring"]


def test_a_published_mamba2_geometry_moves_1_8_times_less() -> None:
    layer = ReplayMamba2(4096, 128, 64, 128, ngroups=8, device="meta", dtype=torch.bfloat16)
    sizes = layer_bytes(layer)
    assert sizes == [LayerBytes(state=128 * 64 * 128 * 4, record=2 * (8 * 128 + 128 * 64) + 4 * 2 * 128)]
    ratio = sum(conventional_traffic(sizes)) / sum(replay_traffic(sizes, 16))
    assert ratio == pytest.approx(1.80, abs=0.01)
