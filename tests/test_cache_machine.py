"""Random use of a cache, one operation after another, against a list of the tokens that each row has accepted.

After every operation the counters must be those of the lists, and the state that of the token loop over them.
"""

import copy

import pytest
import torch
from backends import both_backends, settings_now
from budgets import assert_e64
from draft_trees import line, padded, paths, trees
from draws import DEVICE, draw, seeds
from geometries import G, Geometry, K, M, R, windows
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from programs import poison
from torch import Tensor

import replayssm
from replayssm import trees as trees_module
from replayssm.cache import kept as kept_module
from replayssm.cache import selection as selection_module
from replayssm.cache import state_cache as state_cache_module
from replayssm.cache import step as step_module

BATCH = 3
row_sets = st.lists(st.integers(0, BATCH - 1), unique=True, min_size=1, max_size=BATCH)
row_numbers = st.integers(0, BATCH - 1)


class CacheMachine(RuleBasedStateMachine):
    """One layer, one cache, and per row a plain tensor (tokens, d_model) of what it has accepted."""

    geometry: Geometry

    @initialize(step_tokens=st.integers(1, 4), data=st.data(), seed=seeds)
    def build(self, step_tokens, data, seed):
        self.layer = self.geometry.build(seed=seed)
        self.step_tokens, self.window = step_tokens, data.draw(windows(step_tokens))
        self.cache = replayssm.ReplayStateCache([self.layer], BATCH, window=self.window, step_tokens=step_tokens)
        self.accepted = [
            torch.empty(0, self.geometry.d_model, dtype=torch.float64, device=DEVICE) for _ in range(BATCH)
        ]

    @rule(lengths=st.tuples(*[st.integers(0, 9)] * BATCH), left=st.booleans(), seed=seeds)
    def prefill(self, lengths, left, seed):
        """A scan of ragged rows, padded on one side; rows without a token are all padding."""
        t = max(*lengths, self.step_tokens + 1)
        self.step(list(range(BATCH)), t, lengths, left, seed)
        self.cache.commit()
        self.accept(range(BATCH), lengths)

    @rule(rows=row_sets, off=st.integers(0, 1), data=st.data(), seed=seeds)
    def prefill_some(self, rows, off, data, seed):
        t = data.draw(st.integers(self.step_tokens + 1, 9))
        self.step([*rows, *[-1] * off], t, [t] * len(rows) + [0] * off, True, seed)
        self.cache.commit()
        self.accept(rows, [t] * len(rows))

    @rule(data=st.data(), seed=seeds)
    def decode(self, data, seed):
        """Every row is given t tokens and keeps as many as it likes, or all rows as many, or all of them."""
        t = data.draw(st.integers(1, self.step_tokens))
        kept = data.draw(st.tuples(*[st.integers(0, t)] * BATCH) | st.integers(0, t) | st.none())
        self.step(list(range(BATCH)), t, [t] * BATCH, True, seed, masked=False)
        self.cache.commit(torch.tensor(kept, device=DEVICE) if isinstance(kept, tuple) else kept)
        self.accept(range(BATCH), kept if isinstance(kept, tuple) else [t if kept is None else kept] * BATCH)

    @rule(data=st.data(), left=st.booleans(), seed=seeds)
    def decode_ragged(self, data, left, seed):
        t = data.draw(st.integers(1, self.step_tokens))
        lengths = data.draw(st.tuples(*[st.integers(0, t)] * BATCH))
        kept = [data.draw(st.integers(0, length)) for length in lengths]
        self.step(list(range(BATCH)), t, lengths, left, seed)
        self.cache.commit(torch.tensor(kept, device=DEVICE))
        self.accept(range(BATCH), kept)

    @rule(rows=row_sets, at=st.integers(0, 3), data=st.data(), seed=seeds)
    def decode_some(self, rows, at, data, seed):
        """Some rows in any order, and a place that is off."""
        t = data.draw(st.integers(1, self.step_tokens))
        kept = [data.draw(st.integers(0, t)) for _ in rows]
        places, counts, lengths = list(rows), list(kept), [t] * len(rows)
        at = min(at, len(rows))
        for values, off in ((places, -1), (counts, 0), (lengths, 0)):
            values.insert(at, off)
        self.step(places, t, lengths, True, seed, masked=False)
        self.cache.commit(torch.tensor(counts, device=DEVICE))
        self.accept(places, counts)

    @rule(rows=row_sets, off=st.booleans(), shared=st.booleans(), data=st.data(), seed=seeds)
    def decode_tree(self, rows, off, shared, data, seed):
        """Each row keeps a path of its own tree, or of one for all; the outputs off the path are compared as well."""
        places = [*rows, *[-1] * off]
        t = data.draw(st.integers(1, self.step_tokens))
        one = data.draw(trees(t))
        parents = [one if shared else data.draw(trees(t)) for _ in places]
        x = draw(seed, len(places), t, self.geometry.d_model)
        with torch.no_grad():
            y = self.layer(
                x,
                self.cache[0],
                rows=torch.tensor(places, device=DEVICE),
                parents=torch.tensor(one if shared else parents, device=DEVICE),
            )
        lines = [[line(of_row, node) for node in range(t)] for of_row in parents]
        sequences = [
            torch.cat([self.accepted[row], x[place, nodes]]) for place, row in enumerate(rows) for nodes in lines[place]
        ]
        exact = self.geometry.trace(self.layer, torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)).output
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=DEVICE)
        assert_e64(y[: len(rows)].flatten(0, 1), exact[torch.arange(len(last), device=DEVICE), last])
        assert torch.equal(y[len(rows) :], torch.zeros_like(y[len(rows) :])), "the row that is off is not zero"
        kept = [data.draw(paths(of_row)) if row >= 0 else [] for row, of_row in zip(places, parents, strict=True)]
        self.cache.commit(torch.tensor([len(nodes) for nodes in kept], device=DEVICE), path=padded(kept))
        for place, row in enumerate(rows):
            self.accepted[row] = torch.cat([self.accepted[row], x[place, kept[place]]])

    @rule(row=row_numbers)
    def reset(self, row):
        self.cache.reset(row)
        self.accepted[row] = self.accepted[row][:0]

    @rule(rows=row_sets)
    def flush(self, rows):
        self.cache.flush(rows)
        assert all(self.cache.flushed[row] == self.cache.seqlen[row] for row in rows)

    @rule(index=st.tuples(*[row_numbers] * BATCH))
    def reorder(self, index):
        self.cache.reorder(torch.tensor(index, device=DEVICE))
        self.accepted = [self.accepted[row] for row in index]

    @rule(onto=row_sets, data=st.data())
    def copy_rows(self, onto, data):
        sources = [data.draw(row_numbers) for _ in onto]
        self.cache.copy_rows(sources, onto)
        before = list(self.accepted)
        for src, dst in zip(sources, onto, strict=True):
            self.accepted[dst] = before[src]

    @rule()
    def continue_a_deep_copy(self):
        """And wreck the original, which must share nothing with it."""
        original, self.cache = self.cache, copy.deepcopy(self.cache)
        for tensor in original.tensors().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    @rule(value=st.sampled_from([torch.nan, torch.inf]))
    def poison_what_is_dead(self, value):
        poison(self.cache, value)

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def counters_and_state_are_those_of_the_accepted_tokens(self):
        cache = self.cache
        assert cache.seqlen.tolist() == [len(tokens) for tokens in self.accepted]
        pending = cache.seqlen - cache.flushed
        assert ((pending >= 0) & (pending <= max(self.window, self.step_tokens))).all()
        cache.check()
        longest = max(1, *map(len, self.accepted))
        history = torch.zeros(BATCH, longest, self.geometry.d_model, dtype=torch.float64, device=DEVICE)
        for row, tokens in enumerate(self.accepted):
            history[row, : len(tokens)] = tokens
        states = self.geometry.trace(self.layer, history).states
        state = cache[0].state()
        for row, tokens in enumerate(self.accepted):
            expected = states[row, len(tokens) - 1] if len(tokens) else torch.zeros_like(state[row])
            assert_e64(state[row], expected, f"state of row {row} after {len(tokens)} tokens")

    def step(self, places, t, lengths, left, seed, masked=True):
        """One model call; its outputs, drafts included, must continue what the rows have accepted."""
        x = draw(seed, len(places), t, self.geometry.d_model)
        mask = torch.zeros(len(places), t, dtype=torch.int64, device=DEVICE)
        for place, length in enumerate(lengths):
            mask[place, t - length if left else 0 : t if left else length] = 1
        self.new = [x[place, mask[place] == 1] for place in range(len(places))]
        x[mask == 0] = torch.nan
        rows = None if places == list(range(BATCH)) else torch.tensor(places, device=DEVICE)
        with torch.no_grad():
            y = self.layer(x, self.cache[0], rows=rows, attention_mask=mask if masked else None)
        assert torch.equal(y[mask == 0], torch.zeros_like(y[mask == 0])), "masked outputs are not zero"
        self.compare(places, y, mask)

    def compare(self, places: list[int], y: Tensor, mask: Tensor) -> None:
        on = [place for place, row in enumerate(places) if row >= 0]
        sequences = [torch.cat([self.accepted[places[place]], self.new[place]]) for place in on]
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        if not padded.shape[1]:
            return
        exact = self.geometry.trace(self.layer, padded).output
        got, expected = [], []
        for index, place in enumerate(on):
            first = len(self.accepted[places[place]])
            got.append(y[place, mask[place] == 1])
            expected.append(exact[index, first : first + len(self.new[place])])
        assert_e64(torch.cat(got), torch.cat(expected))

    def accept(self, rows, kept) -> None:
        for place, (row, count) in enumerate(zip(rows, kept, strict=True)):
            if row >= 0:
                self.accepted[row] = torch.cat([self.accepted[row], self.new[place][:count]])


class Mamba2Machine(CacheMachine):
    geometry = M


class GatedDeltaNetMachine(CacheMachine):
    geometry = G


class KDAMachine(CacheMachine):
    geometry = K


class RetentionMachine(CacheMachine):
    geometry = R


class UnreadableMachine(CacheMachine):
    """Values that may not be looked at, as on a GPU: every row is folded and written, and masked."""

    geometry = G

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        for module in (step_module, kept_module, state_cache_module, selection_module, trees_module):
            self.patches.setattr(module, "readable", lambda tensor: False)

    def teardown(self):
        self.patches.undo()


@both_backends
@pytest.mark.parametrize(
    "machine", [Mamba2Machine, GatedDeltaNetMachine, KDAMachine, RetentionMachine], ids=lambda machine: machine.__name__
)
def test_any_use_of_a_cache_leaves_the_states_of_the_accepted_tokens(machine):
    run_state_machine_as_test(machine, settings=settings_now())


def test_so_it_does_where_values_cannot_be_read():
    run_state_machine_as_test(UnreadableMachine, settings=settings_now())
