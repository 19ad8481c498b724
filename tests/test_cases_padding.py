"""Cases RC-01, RC-03 and RC-04, layer by layer: padding is as if it were not there. (Whole models: test_hybrid.py.)"""

import pytest
import torch
from backends import both_backends, given
from budgets import assert_e64, assert_same_bits
from draws import DEVICE, on_the_host
from geometries import CASES
from hypothesis import strategies as st
from refusals import refused
from running import step, tensor

from replayssm import ReplayStateCache

pytestmark = both_backends
every_layer = pytest.mark.parametrize("geometry", CASES, ids=lambda g: g.kind)


def padded(rows, side, fill, length=None):
    """A batch of rows (t, d_model) of any length, ``fill`` at the masked places; and its mask."""
    length = max(map(len, rows)) if length is None else length
    x = torch.full((len(rows), length, rows[0].shape[1]), fill, dtype=rows[0].dtype, device=DEVICE)
    mask = torch.zeros(len(rows), length, dtype=torch.int64, device=DEVICE)
    for row, tokens in enumerate(rows):
        place = slice(length - len(tokens), length) if side == "left" else slice(0, len(tokens))
        x[row, place], mask[row, place] = tokens, 1
    return x, mask


@every_layer
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    fill=st.sampled_from([0.0, 5.0, torch.nan]),
    window=st.sampled_from([0, 4, 16]),
)
def test_rc01_a_padded_prompt_is_continued_as_it_would_be_alone(geometry, lengths, side, fill, window):
    layer = geometry.build()
    rows = [geometry.input(1, length + 6, seed)[0] for seed, length in enumerate(lengths)]
    exact = [geometry.trace(layer, row[None]) for row in rows]
    cache = ReplayStateCache([layer], len(rows), window=window, step_tokens=1)
    x, mask = padded([row[:n] for row, n in zip(rows, lengths, strict=True)], side, fill)
    y = step(cache, [layer], x, attention_mask=mask)
    cache.commit()
    assert cache.seqlen.tolist() == lengths
    state = cache[0].state()
    for row, n in enumerate(lengths):
        assert_e64(y[row, mask[row] == 1], exact[row].output[0, :n], f"prompt of row {row}")
        assert_e64(state[row], exact[row].states[0, n - 1], f"state of row {row}")
    for s in range(6):
        y = step(cache, [layer], torch.stack([row[n + s] for row, n in zip(rows, lengths, strict=True)])[:, None])
        cache.commit()
        together = torch.stack([e.output[0, n + s] for e, n in zip(exact, lengths, strict=True)])
        assert_e64(y[:, 0], together, f"step {s}")


@pytest.mark.parametrize("window", [0, 5, 16])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("step_tokens", [1, 5], ids=["scanned", "replayed"])
@every_layer
def test_rc03_a_padded_second_turn_on_a_live_cache(geometry, side, window, step_tokens):
    layer = geometry.build()
    rows = [geometry.input(1, n, seed)[0] for seed, n in ((1, 15), (2, 12))]
    exact = [geometry.trace(layer, row[None]) for row in rows]
    cache = ReplayStateCache([layer], 2, window=window, step_tokens=step_tokens)
    step(cache, [layer], torch.stack([row[:6] for row in rows]))
    cache.commit()
    x, mask = padded([rows[0][6:11], rows[1][6:8]], side, torch.nan)
    y = step(cache, [layer], x, attention_mask=mask)
    cache.commit()
    assert cache.seqlen.tolist() == [11, 8]
    assert_e64(y[0], exact[0].output[0, 6:11], "second turn of row a")
    assert_e64(y[1, mask[1] == 1], exact[1].output[0, 6:8], "second turn of row b")
    pieces = []
    for s in range(4):
        pieces.append(step(cache, [layer], torch.stack([rows[0][11 + s], rows[1][8 + s]])[:, None]))
        cache.commit()
    after = torch.cat(pieces, 1)
    assert_e64(after[0], exact[0].output[0, 11:15], "row a")
    assert_e64(after[1], exact[1].output[0, 8:12], "row b")


@every_layer
def test_rc04_what_stands_at_masked_places_changes_nothing(geometry):
    layer = geometry.build()
    rows = [geometry.input(1, 15, seed)[0] for seed in (1, 2)]
    exact = [geometry.trace(layer, row[None]).output[0] for row in rows]
    outputs = []
    for fill in (0.0, torch.nan):
        cache = ReplayStateCache([layer], 2, window=4)
        x, mask = padded([rows[0][:7], rows[1][:12]], "right", fill)
        pieces = [step(cache, [layer], x, attention_mask=mask)]
        cache.commit()
        assert cache.seqlen.tolist() == [7, 12]
        for s in range(3):
            pieces.append(step(cache, [layer], torch.stack([rows[0][7 + s], rows[1][12 + s]])[:, None]))
            cache.commit()
        outputs.append(torch.cat(pieces, 1))
    assert_same_bits(outputs[1], outputs[0], "with NaN at the masked places")
    assert_e64(torch.cat([outputs[0][0, :7], outputs[0][0, 12:]]), exact[0][:10], "the padded row")
    assert_e64(outputs[0][1], exact[1], "its neighbour")


@on_the_host
@every_layer
@pytest.mark.parametrize("step_tokens", [1, 5], ids=["scan", "step"])
def test_rc04_padding_between_tokens_is_refused(geometry, step_tokens):
    layer = geometry.build()
    cache = ReplayStateCache([layer], 1, step_tokens=step_tokens)
    mask = tensor([1, 1, 0, 1, 1])
    with refused(ValueError, "attention_mask must", "left", cache=cache):
        layer(geometry.input(1, 5), cache[0], attention_mask=mask)
    with refused(ValueError, "attention_mask must", "left"):
        layer(geometry.input(1, 5), attention_mask=mask)


@every_layer
def test_a_row_of_padding_alone_does_not_move(geometry):
    layer = geometry.build()
    cache = ReplayStateCache([layer], 2, window=4, step_tokens=2)
    x, tail = geometry.input(2, 7), geometry.input(2, 3, seed=5)
    step(cache, [layer], x)
    cache.commit()
    for t in (1, 2, 5):
        other = geometry.input(2, t, seed=t)
        other[0] = torch.nan
        y = step(cache, [layer], other, attention_mask=tensor([0] * t, [1] * t))
        assert torch.equal(y[0], torch.zeros_like(y[0]))
        cache.commit()
    assert cache.seqlen.tolist() == [7, 15]
    y = step(cache, [layer], tail)
    cache.commit()
    assert_e64(y[0], geometry.trace(layer, torch.cat([x, tail], 1)).output[0, 7:])
