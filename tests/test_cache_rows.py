"""Rows that move, are copied, start afresh or are flushed: pending records and all that belongs to a row go along."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from backends import both_backends
from budgets import assert_e64, assert_same_bits
from draws import DEVICE, draw, on_the_host
from geometries import CASES, G, K, M, R
from refusals import assert_unchanged, refused, snapshot
from running import running, step, tensor

from replayssm import ReplayStateCache

every_layer = pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)


def ragged(*layers, window=5):
    """A cache whose rows differ in seqlen, in what is pending and in where their rings stand."""
    cache = ReplayStateCache(list(layers), 3, window=window, step_tokens=3, seed=40)
    for t, counts in ((6, None), (3, (3, 1, 0)), (2, (2, 0, 1)), (3, (1, 3, 2))):
        step(cache, layers, draw(t, 3, t, 24))
        cache.commit(None if counts is None else tensor(*counts))
    assert len(set(cache.seqlen.tolist())) == len(set((cache.seqlen - cache.flushed).tolist())) == 3
    return cache


@every_layer
@pytest.mark.parametrize("index", [(2, 0, 1), (1, 1, 1), (0, 2, 2)], ids=str)
def test_reorder_moves_everything_that_belongs_to_a_row(geometry, index):
    layer = geometry.build()
    cache, x = ragged(layer), draw(50, 3, 2, 24)
    before = snapshot(cache)
    twin = ragged(layer)
    cache.reorder(tensor(*index))
    for name, value in snapshot(cache).items():
        assert_same_bits(value, before[name][list(index)], name)
    assert_e64(step(cache, [layer], x[list(index)]), step(twin, [layer], x)[list(index)])


@both_backends
@every_layer
def test_copied_rows_continue_as_their_source(geometry):
    layer = geometry.build()
    cache, x = ragged(layer), draw(50, 3, 2, 24)
    x[1] = x[0]
    cache.copy_rows(0, 1)
    y = step(cache, [layer], x)
    cache.commit()
    assert_e64(y[1], y[0])
    assert cache.seqlen[0] == cache.seqlen[1]
    state = cache[0].state()
    assert_e64(state[1], state[0], "state")


def test_copy_rows_reads_every_source_before_it_writes():
    layer = M.build()
    cache = ragged(layer)
    before = snapshot(cache)
    cache.copy_rows([0, 1], tensor(1, 0))
    for name, value in snapshot(cache).items():
        assert_same_bits(value, before[name][[1, 0, 2]], name)


@on_the_host
@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([0, 1], [2, 2], ["dst must", "[2, 2]"]),
        ([0, 1], [2], ["src and dst must", "2 and 1"]),
        (3, 0, ["src must", "0 .. 2", "[3]"]),
        (0, -1, ["dst must", "0 .. 2", "[-1]"]),
        (tensor(0.5), 1, ["src must", "float32"]),
        (tensor([0, 1]), 1, ["src must", "(1, 2)"]),
    ],
    ids=str,
)
def test_rows_that_cannot_be_copied_are_refused(src, dst, words):
    cache = ragged(M.build())
    with refused(ValueError, "ReplayStateCache.copy_rows", *words, cache=cache):
        cache.copy_rows(src, dst)


@on_the_host
@pytest.mark.parametrize(
    ("index", "words"),
    [
        (tensor(0, 1), ["index must", "(3,)", "(2,)"]),
        (tensor(0, 1, 3), ["index must", "0 .. 2"]),
        (tensor(0, 1, -1), ["index must", "0 .. 2"]),
        (tensor(0.0, 1, 2), ["index must", "float32"]),
    ],
    ids=str,
)
def test_an_order_that_cannot_be_is_refused(index, words):
    cache = ragged(M.build())
    with refused(ValueError, "ReplayStateCache.reorder", *words, cache=cache):
        cache.reorder(index)


@on_the_host
@pytest.mark.parametrize("method", ["reset", "flush"])
@pytest.mark.parametrize("rows", [3, -1, [0, 5], tensor(0.0), tensor([0]), slice(2), "0", [None], 2**63], ids=str)
def test_rows_outside_the_cache_are_refused(method, rows):
    cache = ragged(M.build())
    with refused(ValueError, f"ReplayStateCache.{method}", "rows must", cache=cache):
        getattr(cache, method)(rows)


@every_layer
@pytest.mark.parametrize("rows", [1, [1], tensor(1)], ids=["int", "list", "tensor"])
def test_reset_starts_a_row_afresh_and_leaves_the_others(geometry, rows):
    layer = geometry.build()
    cache, x = ragged(layer), draw(50, 3, 5, 24)
    before = snapshot(cache)
    cache.reset(rows)
    for name, value in snapshot(cache).items():
        assert_same_bits(value[[0, 2]], before[name][[0, 2]], name)
    assert (cache.seqlen[1], cache.flushed[1]) == (0, 0)
    y = step(cache, [layer], x)
    cache.commit()
    assert_e64(y[1:2], geometry.trace(layer, x[1:2]).output)


@both_backends
@every_layer
def test_flush_folds_the_rows_that_were_named_and_changes_no_state(geometry):
    layer = geometry.build()
    cache = ragged(layer)
    before = snapshot(cache)
    states, seqlen = cache[0].state(), cache.seqlen.clone()
    cache.flush([0, 2])
    assert torch.equal(cache.seqlen, seqlen)
    assert torch.equal(cache.flushed[[0, 2]], seqlen[[0, 2]])
    for name, value in snapshot(cache).items():
        assert_same_bits(value[1], before[name][1], name)
    assert_e64(cache[0].checkpoint[[0, 2]], states[[0, 2]], "checkpoint")
    assert_e64(cache[0].state(), states, "state")
    cache.flush()
    assert torch.equal(cache.flushed, cache.seqlen)
    again = snapshot(cache)
    cache.flush()
    assert_unchanged(cache, again)


@both_backends
@every_layer
def test_a_deep_copy_shares_nothing_and_serves_the_same_model(geometry):
    layers = [geometry.build(seed=1), geometry.build(seed=2)]
    cache, x = ragged(*layers), draw(50, 3, 2, 24)
    before = snapshot(cache)
    twin = copy.deepcopy(cache)
    assert_unchanged(twin, before)
    pointers = [{t.data_ptr() for t in c.tensors().values() if t.numel()} for c in (cache, twin)]
    assert not pointers[0] & pointers[1]
    expected = step(cache, layers, x)
    cache.commit(1)
    assert_unchanged(twin, before)
    assert torch.equal(step(twin, layers, x), expected)
    twin.commit(1)
    assert_unchanged(twin, snapshot(cache))
    assert twin.state_of(layers[1]) is twin[1]
    assert twin.state_of(layers[1]) is not cache.state_of(layers[1])


@every_layer
def test_a_deep_copy_made_in_inference_mode_serves_outside_it(geometry):
    layer = geometry.build()
    cache, x = ragged(layer), draw(50, 3, 2, 24)
    with torch.inference_mode():
        twin = copy.deepcopy(cache)
    for each in (twin, cache):
        step(each, [layer], x)
        each.commit(1)
        each.flush()
    assert_unchanged(twin, snapshot(cache))


def test_a_cache_does_not_keep_its_model_alive():
    layer = K.build()
    cache, watched = ReplayStateCache([layer], 1), weakref.ref(layer)
    del layer
    gc.collect()
    assert watched() is None
    assert cache[0].state().shape[2:] == (5, 7)


@pytest.mark.parametrize("rows", [np.int64(1), [np.int32(1)], np.array([1]), range(1, 2), (1,)], ids=repr)
def test_a_row_may_be_named_by_numpy_too(rows):
    cache = ragged(M.build())
    cache.reset(rows)
    assert (cache.seqlen == 0).tolist() == [False, True, False]


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_is_not_pickled_and_says_what_to_save(take):
    cache = ragged(M.build())
    with refused(TypeError, "ReplayStateCache", "tensors()", "copy.deepcopy", cache=cache):
        take(cache)


@every_layer
@pytest.mark.parametrize("formats", [("fp32", None), ("int8_sr", "fp8"), ("nvfp4_sr", "lr_if4")], ids=str)
def test_a_cache_continues_from_its_saved_tensors(geometry, formats):
    """Pending records, random streams and read copies included: bit for bit as if nothing had happened."""
    layer = geometry.build(torch.float32)
    settings = dict(window=4, step_tokens=2, checkpoint=formats[0], read_format=formats[1])
    first, second = (ReplayStateCache([layer], 3, seed=seed, **settings) for seed in (5, 9))
    for t, counts in ((6, None), (2, (2, 1, 0)), (2, (1, 0, 2))):
        step(first, [layer], geometry.input(3, t, dtype=torch.float32))
        first.commit(None if counts is None else tensor(*counts))
    file = io.BytesIO()
    torch.save(first.tensors(), file)
    file.seek(0)
    for name, saved in torch.load(file).items():
        second.tensors()[name].copy_(saved)
    for t in (2, 1, 2, 5):
        x = geometry.input(3, t, dtype=torch.float32)
        assert torch.equal(step(first, [layer], x), step(second, [layer], x))
        first.commit()
        second.commit()
    assert_unchanged(second, snapshot(first))


def test_the_random_stream_moves_with_its_row():
    layer = M.build()
    cache = ragged(layer)
    assert cache.seed.tolist() == [40, 41, 42]
    cache.reorder(tensor(2, 0, 1))
    assert cache.seed.tolist() == [42, 40, 41]
    cache.reset(1)
    assert cache.seed.tolist() == [42, 40, 41]
    cache.reset([0, 2], seed=tensor(7, 8))
    assert cache.seed.tolist() == [7, 40, 8]
    assert ReplayStateCache([layer], 2, seed=tensor(9, 3)).seed.tolist() == [9, 3]
    assert ReplayStateCache([layer], 2, seed=2**63 - 1).seed.tolist() == [2**63 - 1, -(2**63)]


@both_backends
@pytest.mark.parametrize("step_tokens", [5, 2], ids=["step", "scan"])
def test_rows_in_any_order_equal_all_rows_in_order(step_tokens):
    layer = G.build()
    x = draw(50, 3, 5, 24)
    y, states = [], []
    for order in ([0, 1, 2], [2, 0, 1]):
        cache, _ = running(layer, window=6, step_tokens=step_tokens)
        rows = None if order == [0, 1, 2] else tensor(*order)
        y.append(step(cache, [layer], x[order], rows=rows)[[order.index(row) for row in range(3)]])
        cache.commit()
        states.append(cache[0].state())
    assert_e64(y[1], y[0])
    assert_e64(states[1], states[0], "state")


@both_backends
@every_layer
def test_a_step_writes_the_slots_of_its_real_tokens_and_no_others(geometry):
    layer, x = geometry.build(), draw(50, 3, 3, 24)
    cache = ragged(layer, window=9)
    before = snapshot(cache)
    start, flushed = cache.seqlen.tolist(), cache.flushed.tolist()
    lengths = [2, 0, 3]
    step(cache, [layer], x, attention_mask=torch.arange(3, device=DEVICE) < tensor(*lengths)[:, None])
    cache.commit(tensor(1, 0, 2))
    assert cache.flushed.tolist() == flushed, "no row was to flush"
    for name, value in snapshot(cache).items():
        if ".ring." in name or name.endswith(".conv"):
            slots = value.shape[1]
            for row, length in enumerate(lengths):
                written = {(start[row] + s) % slots for s in range(length)}
                others = [slot for slot in range(slots) if slot not in written]
                assert_same_bits(value[row, others], before[name][row, others], f"{name} of row {row}")
        elif name.endswith("checkpoint"):
            assert_same_bits(value, before[name], name)


@every_layer
@pytest.mark.parametrize("t", [1, 3, 7], ids=["step", "flush", "scan"])
@pytest.mark.parametrize("on", [0, 1, 2])
def test_a_row_that_is_off_keeps_every_bit_pending_records_too(geometry, on, t):
    """Its own records would not fit beside the tokens that the others are given."""
    layer = geometry.build()
    cache = ragged(layer)
    before = snapshot(cache)
    off = [row for row in range(3) if row != on]
    assert (cache.seqlen - cache.flushed)[off].max() > 0
    step(cache, [layer], draw(50, 2, t, 24), rows=tensor(-1, on))
    cache.commit()
    for name, value in snapshot(cache).items():
        assert_same_bits(value[off], before[name][off], name)
    assert cache.seqlen[on] == before["seqlen"][on] + t


def test_an_empty_selection_of_rows_does_nothing():
    cache = ragged(M.build())
    before = snapshot(cache)
    for nothing in ([], torch.zeros(0, dtype=torch.int64, device=DEVICE)):
        cache.flush(nothing)
        cache.reset(nothing)
        cache.copy_rows(nothing, nothing)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.int64])
def test_rows_of_any_integer_dtype_name_the_same_rows(dtype):
    layer, batch = R.build(), 300
    cache = ReplayStateCache([layer], batch)
    rows = torch.tensor([100, 0, 7], device=DEVICE).to(dtype)
    x = draw(1, 3, 1, 24)
    with torch.no_grad():
        layer(x, cache[0], rows=rows)
    cache.commit(torch.tensor([1, 0, 1], device=DEVICE).to(dtype))
    assert cache.seqlen.nonzero().squeeze(1).tolist() == [7, 100]
