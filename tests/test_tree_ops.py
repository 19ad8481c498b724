"""The nodes of a draft tree: the reference against the token loop along each path, the chunked form against both."""

import pytest
import torch
from budgets import assert_e32, assert_e64, assert_same_bits, e32
from draft_trees import chain, line, trees
from draws import DEVICE, draw, same_bits_everywhere, seeds
from hypothesis import given
from hypothesis import strategies as st
from oracles import token_loop
from records import GATES, KEYS, make_records, to, tokens_of
from torch import Tensor

from replayssm.ops.chunked import replay, replay_tree
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.reference import replay_tree_ref
from replayssm.trees import Tree

RECURRENCES = [Recurrence(decay, delta) for decay in ("head", "channel") for delta in (False, True)]
every_recurrence = pytest.mark.parametrize(
    "recurrence", RECURRENCES, ids=lambda r: f"{r.decay}-{'delta' if r.delta else 'plain'}"
)
sizes = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (3, 1), (6, 2), (4, 4)]),
        "headdim": st.sampled_from([5, 8, 40]),
        "d_state": st.sampled_from([7, 16, 24]),
        "gate": st.sampled_from(GATES),
        "keys": st.sampled_from(KEYS),
        "seed": seeds,
    }
)
batches = st.integers(1, 8).flatmap(lambda t: st.lists(trees(t), min_size=1, max_size=3))


def make(recurrence: Recurrence, rows: int, t: int, **size: object) -> tuple[Tensor, Records, Tensor]:
    q, records = make_records(decay=recurrence.decay, delta=recurrence.delta, batch=rows, t=t, **size)
    nheads, headdim = records.v.shape[2:]
    return q, records, draw(9, rows, nheads, headdim, q.shape[-1])


def along_paths(q, records, parents, state, recurrence, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """The token loop in ``dtype`` over the committed tokens and the path of each node: its output, and the write u."""
    nodes, tokens = len(parents[0]), tokens_of(q.to(dtype), to(records, dtype))
    old = tokens.v.shape[1] - nodes
    outputs, writes = torch.empty_like(tokens.v[:, old:]), torch.empty_like(tokens.v[:, old:])
    for row, of_row in enumerate(parents):
        for node in range(nodes):
            places = [*range(old), *(old + j for j in line(of_row, node))]
            path = type(tokens)(*(field[row : row + 1, places] for field in tokens))
            y, states = token_loop(path, delta=recurrence.delta, state=state[row : row + 1].to(dtype))
            outputs[row, node] = y[0, -1]
            before = states[0, -2] if len(places) > 1 else state[row].to(dtype)
            held = ((before * path.g[0, -1].exp().unsqueeze(-2)) @ path.k[0, -1].unsqueeze(-1)).squeeze(-1)
            target = path.v[0, -1] - held if recurrence.delta else path.v[0, -1]
            writes[row, node] = path.beta[0, -1].unsqueeze(-1) * target
    return outputs, writes


def with_q(q: Tensor, records: Records) -> Tensor:
    """Read keys for every record, as the token loop wants them; what it gives for committed ones is not looked at."""
    return torch.cat([torch.zeros_like(records.k[:, q.shape[1] :]), q], 1)


@every_recurrence
@given(parents=batches, committed=st.integers(0, 9), size=sizes)
def test_reference_equals_the_token_loop_along_each_path(recurrence, parents, committed, size):
    nodes = len(parents[0])
    q, records, state = make(recurrence, len(parents), committed + nodes, **size)
    q = q[:, committed:]
    y = replay_tree_ref(q, records, parents, state, delta=recurrence.delta)
    assert_e64(y, along_paths(with_q(q, records), records, parents, state, recurrence)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@every_recurrence
@given(parents=batches, committed=st.integers(0, 20), size=sizes)
def test_chunked_equals_the_token_loop_along_each_path(recurrence, dtype, parents, committed, size):
    nodes = len(parents[0])
    q, records, state = make(recurrence, len(parents), committed + nodes, **size)
    q, records, state = q[:, committed:].to(dtype), to(records, dtype), state.to(dtype)
    before = [x.clone() for x in (q, *records, state)]
    tree = Tree(torch.tensor(parents, device=DEVICE), len(parents))
    got = replay_tree(q, records, tree, state, recurrence)
    arguments = with_q(q, records), records, parents, state, recurrence
    for x, exact, plain, what in zip(
        got, along_paths(*arguments), along_paths(*arguments, dtype=torch.float32), ("output", "u"), strict=True
    ):
        assert x.dtype == dtype
        if dtype == torch.float64:
            assert_e64(x, exact, what)
        else:
            assert_e32(x, exact, e32(plain, exact), what)
    for x, copy in zip((q, *records, state), before, strict=True):
        assert_same_bits(x, copy, "an input")


@every_recurrence
@given(t=st.integers(1, 8), committed=st.integers(0, 20), size=sizes)
def test_a_tree_that_is_a_chain_gives_what_the_chain_gives(recurrence, t, committed, size):
    q, records, state = make(recurrence, 2, committed + t, **size)
    q = q[:, committed:]
    got, _ = replay_tree(q, records, Tree(torch.tensor(chain(t), device=DEVICE), 2), state, recurrence)
    assert_e64(got, replay(q, records, state, recurrence))


@same_bits_everywhere
@every_recurrence
@given(parents=batches, committed=st.integers(0, 9), size=sizes)
def test_a_row_does_not_depend_on_the_trees_of_others(recurrence, parents, committed, size):
    """Bit for bit, the batch of one included; and not on what stands in the places of other nodes."""
    nodes = len(parents[0])
    q, records, state = make(recurrence, len(parents), committed + nodes, **size)
    q, given_parents = q[:, committed:], torch.tensor(parents, device=DEVICE)
    whole, _ = replay_tree(q, records, Tree(given_parents, len(parents)), state, recurrence)
    for row, of_row in enumerate(parents):
        one = slice(row, row + 1)
        alone = Records(*(field[one].clone() for field in records))
        other = size["seed"] % nodes
        seen = [node for node in range(nodes) if other not in line(of_row, node)]
        for field in (alone.k, alone.v, alone.beta):
            field[:, committed + other] = 1e3
        y, _ = replay_tree(q[one], alone, Tree(given_parents[one], 1), state[one], recurrence)
        assert_same_bits(y[0, seen], whole[row, seen], f"row {row}")
