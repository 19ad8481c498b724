"""``window="auto"``: the best of the windows by weighed bytes, and 0 only where replay cannot pay."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer, ReplayMamba2, ReplayStateCache
from replayssm.cache.auto_window import WINDOWS, LayerBytes, choose
from replayssm.plan import replay_step

KINDS = ("mamba2", "gated_deltanet", "kda")


def layer(
    kind: str, nheads: int, headdim: int, d_state: int, per_group: int, dtype: torch.dtype, device: str
) -> LayerBytes:
    """The sizes that a cache of 3 rows gives for one layer of nheads * per_group heads; KDA has a group a head."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    module: ReplayLayer
    if kind == "mamba2":
        module = ReplayMamba2(24, nheads * per_group, headdim, d_state, ngroups=nheads, **options)
    elif kind == "gated_deltanet":
        module = ReplayGatedDeltaNet(24, nheads * per_group, headdim, d_state, ngroups=nheads, **options)
    else:
        module = ReplayKDA(24, nheads * per_group, headdim, d_state=d_state, **options)
    return LayerBytes.of(ReplayStateCache(module, 3, window=5, step_tokens=2, device=device)[0])


layers = st.builds(
    layer,
    st.sampled_from(KINDS),
    nheads=st.integers(1, 32),
    headdim=st.sampled_from([16, 64, 80, 128]),
    d_state=st.sampled_from([16, 64, 128, 256]),
    per_group=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    device=st.just("meta"),
)


@given(st.lists(layers, min_size=1, max_size=3))
def test_the_window_moves_hardly_more_than_the_fewest_bytes(model: list[LayerBytes]) -> None:
    """And is not longer than the one that does: a byte of a record takes more time than one of a state."""

    def moved(window: int) -> int:
        return sum(sum(replay_step(each, window)) for each in model)

    chosen, least = choose("triton", 2**20, 1, model), min(WINDOWS, key=moved)
    assert chosen in WINDOWS
    assert chosen <= least or moved(chosen) - moved(least) <= 2 * len(model)  # two quotients a layer are rounded down
    assert moved(chosen) <= 1.05 * moved(least)


@given(st.lists(layers, min_size=1, max_size=3), st.integers(1, 512), st.integers(2, 64))
def test_a_step_with_drafts_always_has_a_window_that_holds_it(
    model: list[LayerBytes], batch: int, step_tokens: int
) -> None:
    for backend in ("torch", "triton"):
        assert choose(backend, batch, step_tokens, model) >= max(step_tokens, min(WINDOWS))


@given(st.lists(layers, min_size=1, max_size=3), st.integers(1, 512))
def test_more_rows_never_turn_replay_off(model: list[LayerBytes], batch: int) -> None:
    fewer, more = (choose("triton", rows, 1, model) for rows in (batch, 2 * batch))
    assert fewer in (0, more)


def test_one_row_of_a_small_published_layer_is_decoded_conventionally_and_a_batch_is_not() -> None:
    published = {
        "mamba2": (layer("mamba2", 8, 64, 128, 16, torch.bfloat16, "meta"), 16, 16),
        "gated_deltanet": (layer("gated_deltanet", 16, 128, 128, 2, torch.bfloat16, "meta"), 0, 12),
        "kda": (layer("kda", 32, 128, 128, 1, torch.bfloat16, "meta"), 0, 8),
    }
    for name, (sizes, alone, window) in published.items():
        assert choose("triton", 1, 1, [sizes]) == choose("triton", 1, 1, [sizes] * 7) == alone, name
        assert choose("triton", 32, 1, [sizes]) == window, name
        assert choose("triton", 32, 1, [sizes] * 7) == window, name


def test_a_small_state_is_decoded_conventionally_at_any_usual_batch() -> None:
    small = layer("mamba2", 1, 16, 16, 2, torch.bfloat16, "meta")
    assert choose("triton", 512, 1, [small]) == 0


def test_plain_pytorch_and_models_without_a_recurrent_layer_get_16() -> None:
    small = layer("mamba2", 1, 16, 16, 2, torch.bfloat16, "meta")
    assert [choose("torch", 1, t, [small]) for t in (1, 16, 20)] == [16, 16, 20]
    assert [choose("triton", 1, t, []) for t in (1, 20)] == [16, 20]


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_do_not_depend_on_the_device_and_add_up_to_the_ring(kind: str) -> None:
    sizes = layer(kind, 2, 8, 16, 2, torch.float32, "cpu")
    assert sizes == layer(kind, 2, 8, 16, 2, torch.float32, "meta")
    assert sizes.state == 4 * 4 * 8 * 16
    assert sizes.y == 4 * 4 * 8
    assert sizes.u == (0 if kind == "mamba2" else 4 * 4 * 8)
    groups = 4 if kind == "kda" else 2
    assert sizes.q == sizes.k == 4 * groups * 16
    assert sizes.record == sizes.k + 4 * (4 * 8 + 4 * (16 if kind == "kda" else 1) + 4)
    assert sizes.live_record == sizes.record - (0 if kind == "mamba2" else sizes.beta)  # u for v, as wide in fp32
