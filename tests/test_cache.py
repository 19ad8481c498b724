"""Steps and commits: what opens and closes a step, what is refused, and that a refusal changes nothing."""

import copy

import pytest
import torch
from backends import both_backends, given
from budgets import assert_e64
from draws import DEVICE, draw, on_the_host, seeds
from geometries import G, K, M, R, decode_in_pieces, windows
from hypothesis import strategies as st
from refusals import assert_unchanged, refused, snapshot
from running import running, step, tensor
from torch import nn

from replayssm import ReplayStateCache

pytestmark = both_backends


@pytest.mark.parametrize(
    ("n", "advance"),
    [(None, [2, 2, 2]), (0, [0, 0, 0]), (1, [1, 1, 1]), (2, [2, 2, 2]), (tensor(0, 2, 1), [0, 2, 1])],
    ids=["all", "none", "one", "two", "per row"],
)
def test_commit_advances_every_row_by_what_it_keeps(n, advance):
    layer = M.build()
    cache, x = running(layer)
    before = cache.seqlen.tolist()
    step(cache, [layer], x)
    cache.commit(n)
    assert cache.seqlen.tolist() == [a + b for a, b in zip(before, advance, strict=True)]
    cache.check()


@on_the_host
@pytest.mark.parametrize(
    "n",
    [
        -1,
        3,
        True,
        1.0,
        "1",
        2**63,
        tensor(1, 1),
        tensor(1, 1, 3),
        tensor(0, -1, 0),
        tensor(1.0, 1, 1),
        tensor(True, True, True),
    ],
    ids=str,
)
def test_a_kept_count_that_cannot_be_is_refused(n):
    layer = M.build()
    cache, x = running(layer)
    step(cache, [layer], x)
    with refused(ValueError, "ReplayStateCache.commit", "n must", cache=cache):
        cache.commit(n)
    cache.commit(2)  # the step is still open
    assert cache.seqlen.tolist() == [10, 10, 10]


@pytest.mark.parametrize("n", [1, 6, tensor(6, 6, 6)], ids=str)
def test_a_scan_is_kept_whole(n):
    layer = G.build()
    cache, _ = running(layer)
    step(cache, [layer], draw(1, 3, 6, 24))
    with refused(ValueError, "n must be None", "step_tokens=3", cache=cache):
        cache.commit(n)
    cache.commit()
    assert cache.seqlen.tolist() == cache.flushed.tolist() == [14, 14, 14]


@on_the_host
@pytest.mark.parametrize("n", [tensor(1, 2, 0), tensor(1, 1, 1)], ids=str)
def test_a_count_is_limited_by_the_real_tokens_of_its_row(n):
    layer = M.build()
    cache, x = running(layer)
    mask = tensor([1, 1], [0, 1], [0, 0])
    step(cache, [layer], x, attention_mask=mask)
    with refused(ValueError, "n must", "[2, 1, 0]", cache=cache):
        cache.commit(n)
    cache.commit()
    assert cache.seqlen.tolist() == [10, 9, 8]


@on_the_host
def test_a_row_that_is_off_keeps_nothing():
    layer = M.build()
    cache, x = running(layer)
    rows = tensor(2, -1, 0)
    step(cache, [layer], x, rows=rows)
    with refused(ValueError, "n must", cache=cache):
        cache.commit(tensor(1, 1, 1))
    cache.commit(tensor(1, 0, 2))
    assert cache.seqlen.tolist() == [10, 8, 9]


@pytest.mark.parametrize("t", [1, 2, 3, 6])
def test_a_second_step_must_wait_for_the_commit(t):
    layer = K.build()
    cache, x = running(layer)
    step(cache, [layer], x)
    with refused(RuntimeError, "commit", cache=cache):
        layer(draw(1, 3, t, 24), cache[0])
    cache.commit()
    step(cache, [layer], draw(1, 3, t, 24))


def test_commit_must_follow_a_step():
    layer = M.build()
    cache, _ = running(layer)
    with refused(RuntimeError, "commit", "step", cache=cache):
        cache.commit()
    with refused(RuntimeError, "commit", "step", cache=ReplayStateCache([layer], 1)):
        ReplayStateCache([layer], 1).commit(0)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = M.build(seed=1), G.build(seed=2)


def test_commit_names_the_modules_that_were_not_called():
    model = Pair()
    cache = ReplayStateCache(model, 2, step_tokens=2)
    step(cache, [model.first], draw(1, 2, 2, 24))
    with refused(RuntimeError, "second", cache=cache) as _:
        cache.commit()
    with torch.no_grad():
        model.second(draw(1, 2, 2, 24), cache.state_of(model.second))
    cache.commit()
    assert cache.seqlen.tolist() == [2, 2]


@pytest.mark.parametrize("what", ["t", "rows", "mask", "no mask"])
def test_modules_of_a_step_must_agree(what):
    model = Pair()
    cache = ReplayStateCache(model, 2, step_tokens=3)
    x, rows, mask = draw(1, 2, 2, 24), tensor(0, 1), torch.ones(2, 2, dtype=torch.int64, device=DEVICE)
    step(cache, [model.first], x, rows=rows, attention_mask=mask)
    second = {
        "t": lambda: model.second(x[:, :1], cache[1], rows=rows, attention_mask=mask),
        "rows": lambda: model.second(x, cache[1], rows=rows.clone(), attention_mask=mask),
        "mask": lambda: model.second(x, cache[1], rows=rows, attention_mask=mask.clone()),
        "no mask": lambda: model.second(x, cache[1], rows=rows),
    }
    with refused(RuntimeError, "step", cache=cache):
        second[what]()
    with torch.no_grad():
        model.second(x, cache[1], rows=rows, attention_mask=mask)
    cache.commit()


BETWEEN_STEPS = {
    "flush": lambda cache: cache.flush(),
    "flush of a row": lambda cache: cache.flush(0),
    "reorder": lambda cache: cache.reorder(tensor(0, 1, 2)),
    "copy_rows": lambda cache: cache.copy_rows(0, 1),
    "reset of a row": lambda cache: cache.reset(0),
    "state": lambda cache: cache[0].state(),
    "checkpoint": lambda cache: cache[0].checkpoint,
    "deepcopy": lambda cache: copy.deepcopy(cache),
}


@pytest.mark.parametrize("call", BETWEEN_STEPS)
def test_an_open_step_allows_only_its_commit(call):
    layer = M.build()
    cache, x = running(layer)
    step(cache, [layer], x)
    with refused(RuntimeError, "commit", cache=cache):
        BETWEEN_STEPS[call](cache)
    cache.commit()
    BETWEEN_STEPS[call](cache)


class Broken(nn.Module):
    """Raises when it is asked to."""

    broken = False

    def forward(self, x):
        if self.broken:
            raise MemoryError("out of memory")
        return x


@pytest.mark.parametrize("place", ["in_proj", "norm", "out_proj"])
@pytest.mark.parametrize("which", [0, 1], ids=["first layer", "last layer"])
def test_after_a_failed_step_only_a_reset_of_all_rows_is_left(which, place):
    layers = [M.build(seed=1), M.build(seed=2)]
    cache, x = running(*layers)
    failing = getattr(layers[which], place)
    handle = failing.register_forward_pre_hook(lambda *_: Broken.forward(broken, None))
    broken = Broken()
    broken.broken = True
    with pytest.raises(MemoryError):
        step(cache, layers, x)
    handle.remove()
    for call in (*BETWEEN_STEPS.values(), lambda cache: cache.commit(), lambda cache: cache.commit(0)):
        with pytest.raises(RuntimeError, match="reset"):
            call(cache)
    cache.reset()
    fresh = ReplayStateCache(layers, 3, window=4, step_tokens=3)
    for t in (5, 2, 3):
        again = step(cache, layers, draw(t, 3, t, 24))
        assert torch.equal(again, step(fresh, layers, draw(t, 3, t, 24)))
        cache.commit()
        fresh.commit()


@given(step_tokens=st.integers(1, 5), data=st.data(), seed=seeds)
def test_a_row_flushes_exactly_when_its_records_would_not_fit(step_tokens, data, seed):
    """``seqlen - flushed + len > window``, each row by itself; a scan takes everything into the checkpoint."""
    window = data.draw(windows(step_tokens))
    layer = R.build()
    cache = ReplayStateCache([layer], 3, window=window, step_tokens=step_tokens)
    seqlen, flushed = [0, 0, 0], [0, 0, 0]
    for number in range(data.draw(st.integers(1, 12))):
        t = data.draw(st.integers(1, step_tokens + 2))
        scan = t > step_tokens
        lengths = data.draw(st.tuples(*[st.integers(0, t)] * 3))
        mask = torch.arange(t, device=DEVICE) >= t - tensor(*lengths)[:, None]
        step(cache, [layer], draw(seed + number, 3, t, 24), attention_mask=mask)
        assert cache.seqlen.tolist() == seqlen
        assert cache.flushed.tolist() == flushed, "the counters may move at the commit only"
        kept = lengths if scan else [data.draw(st.integers(0, length)) for length in lengths]
        cache.commit(None if scan else tensor(*kept))
        for row in range(3):
            if seqlen[row] - flushed[row] + lengths[row] > window:
                flushed[row] = seqlen[row]
            seqlen[row] += kept[row]
            if scan:
                flushed[row] = seqlen[row]
        assert cache.seqlen.tolist() == seqlen
        assert cache.flushed.tolist() == flushed


def test_window_0_folds_what_was_committed_at_every_step():
    layer = G.build()
    cache = ReplayStateCache([layer], 1, window=0, step_tokens=1)
    for number in range(5):
        before = cache[0].checkpoint.clone()
        pending = cache[0].state()
        step(cache, [layer], draw(number, 1, 1, 24))
        cache.commit()
        assert torch.equal(cache[0].checkpoint, pending)
        assert torch.equal(cache[0].checkpoint, before) == (number == 0)
        assert (cache.seqlen.item(), cache.flushed.item()) == (number + 1, number)


def test_a_model_without_state_opens_its_steps_itself():
    cache = ReplayStateCache(nn.Linear(2, 2), 2, step_tokens=2)
    opened = cache.open_step(2)
    assert (opened.t, opened.scan) == (2, False)
    with refused(RuntimeError, "commit", cache=cache):
        cache.open_step(2)
    cache.commit(1)
    cache.open_step(7)
    cache.commit()
    assert cache.seqlen.tolist() == [8, 8]
    assert cache.flushed.tolist() == [8, 8]


def test_state_and_checkpoint_are_what_they_say():
    layer, x = G.build(), G.input(2, 9)
    exact = G.trace(layer, x)
    _, cache = decode_in_pieces(layer, x, [5, 1, 1, 2], window=16, step_tokens=2)
    before = snapshot(cache)
    state = cache[0].state()
    assert_e64(cache[0].checkpoint, exact.states[:, 4], "checkpoint")
    assert_e64(state, exact.states[:, 8], "state")
    state.fill_(torch.nan)
    assert_unchanged(cache, before)
