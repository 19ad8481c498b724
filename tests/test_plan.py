"""The traffic model against the schedule that a cache really follows."""

import pytest
import torch

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayMamba2, ReplayStateCache
from replayssm.plan import StateBytes, Traffic, conventional_traffic, replay_traffic, state_bytes


@pytest.mark.parametrize("window", [0, 1, 2, 5, 16])
def test_traffic_is_what_the_schedule_of_a_cache_moves(window: int) -> None:
    layer = ReplayMamba2(16, nheads=2, headdim=4, d_state=8)
    cache = ReplayStateCache(layer, 1, window=window)
    sizes = state_bytes(cache)
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
    assert replay_traffic(sizes, window) == Traffic(read // steps, written // steps)


def test_sizes_are_those_of_one_sequence_whatever_the_cache() -> None:
    layers = [
        ReplayMamba2(32, nheads=4, headdim=8, d_state=16, ngroups=2),
        ReplayGatedDeltaNet(32, nheads=2, headdim=8, d_state=16, dtype=torch.bfloat16),
        ReplayKDA(32, nheads=2, headdim=8, d_state=24),
    ]
    state = 4 * (4 * 8 * 16 + 2 * 8 * 16 + 2 * 8 * 24)
    mamba2 = 4 * (2 * 16 + 4 * 8 + 4 + 4)
    gated_deltanet = 2 * (2 * 16 + 2 * 8) + 4 * (2 + 2)
    kda = 4 * (2 * 24 + 2 * 8 + 2 * 24 + 2)
    for batch, window, step_tokens in [(1, 0, 1), (3, 16, 1), (2, 5, 4)]:
        cache = ReplayStateCache(layers, batch, window=window, step_tokens=step_tokens)
        assert state_bytes(cache) == StateBytes(state, mamba2 + gated_deltanet + kda)


def test_a_published_mamba2_geometry_moves_1_8_times_less() -> None:
    layer = ReplayMamba2(4096, 128, 64, 128, ngroups=8, device="meta", dtype=torch.bfloat16)
    sizes = state_bytes(ReplayStateCache(layer, 1, device="meta"))
    ratio = sum(conventional_traffic(sizes)) / sum(replay_traffic(sizes, 16))
    assert ratio == pytest.approx(1.80, abs=0.01)
