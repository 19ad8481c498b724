"""Trees by themselves: ancestors, paths, and the longest path that greedy decoding takes, against walks."""

import itertools

import pytest
import torch
from draft_trees import chain, line, padded, trees
from draws import DEVICE, on_the_host, seeds
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from replayssm.trees import Tree, longest_accepted

batches = st.integers(1, 9).flatmap(lambda t: st.lists(trees(t), min_size=1, max_size=3))


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@given(parents=batches)
def test_ancestors_are_those_of_a_walk(parents):
    tree, t = Tree(tensor(parents), len(parents)), len(parents[0])
    for row, of_row in enumerate(parents):
        for node in range(t):
            walk = line(of_row, node)
            assert tree.ancestors[row, node].tolist() == walk[::-1] + [-1] * (t - len(walk))
            assert tree.depth[row, node] == len(walk) - 1
            assert tree.before[row, node].nonzero().flatten().tolist() == walk


def test_rows_may_share_a_tree():
    shared, own = Tree(tensor([-1, 0, 0, 1]), 2), Tree(tensor([[-1, 0, 0, 1]] * 2), 2)
    for name in ("parents", "ancestors", "depth", "before"):
        assert torch.equal(getattr(shared, name), getattr(own, name)), name


@given(parents=batches, data=st.data())
def test_a_path_goes_as_far_as_each_node_is_the_child_of_the_one_before_it(parents, data):
    t = len(parents[0])
    path = [data.draw(st.lists(st.integers(-2, t), min_size=t, max_size=t)) for _ in parents]
    for row, of_row in enumerate(parents):  # a line of the tree in front, or none of a random path would go far
        nodes = line(of_row, data.draw(st.integers(-1, t - 1)))
        path[row][: len(nodes)] = nodes
    length = [data.draw(st.integers(0, t)) for _ in parents]
    expected = []
    for of_row, nodes, count in zip(parents, path, length, strict=True):
        last, n = -1, 0
        while n < t and 0 <= nodes[n] < count and of_row[nodes[n]] == last:
            last, n = nodes[n], n + 1
        expected.append(n)
    assert Tree(tensor(parents), len(parents)).prefix(tensor(path), tensor(length)).tolist() == expected


def greedy_walk(parents: list[int], drafts: list[int], targets: list[int]) -> list[int]:
    """All lines from column 0, of which every step is what greedy decoding takes; the longest, then the leftmost."""
    taken = [0]
    for node in range(len(parents)):
        nodes = line(parents, node)
        right = nodes[0] == 0 and all(drafts[b] == targets[a] for a, b in itertools.pairwise(nodes))
        if right and len(nodes) > len(taken):
            taken = nodes
    return taken


@given(parents=batches, ids=st.integers(1, 3), seed=seeds, shared=st.booleans())
def test_the_longest_accepted_path_is_that_of_a_walk(parents, ids, seed, shared):
    parents = [parents[0]] * len(parents) if shared else parents
    generator = torch.Generator().manual_seed(seed)
    drafts, targets = torch.randint(ids, (2, len(parents), len(parents[0])), generator=generator).to(DEVICE)
    n, path = longest_accepted(tensor(parents[0] if shared else parents), drafts, targets)
    expected = [greedy_walk(*row) for row in zip(parents, drafts.tolist(), targets.tolist(), strict=True)]
    assert n.tolist() == [len(nodes) for nodes in expected]
    for row, nodes in enumerate(expected):
        assert path[row].tolist() == nodes + [-1] * (len(parents[0]) - len(nodes))


def test_accepting_a_chain_is_accepting_its_first_drafts():
    drafts, targets = tensor([[5, 1, 2, 3], [5, 1, 2, 3]]), tensor([[1, 2, 9, 3], [1, 2, 3, 9]])
    n, path = longest_accepted(tensor(chain(4)), drafts, targets)
    assert n.tolist() == [3, 4]
    assert torch.equal(path, padded([[0, 1, 2], [0, 1, 2, 3]], filler=-1))


@on_the_host
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parents": tensor([0, 0, 1])}, ["parents must", "further left", "[0, 0, 1]"]),
        ({"parents": tensor([-1, 2, 1])}, ["parents must", "further left"]),
        ({"parents": tensor([-2, 0, 1])}, ["parents must", "further left"]),
        ({"parents": tensor([[-1, 0, 1]])}, ["parents must", "(2, 3)", "(1, 3)"]),
        ({"parents": tensor([-1, 0])}, ["parents must", "(3,)", "(2,)"]),
        ({"parents": tensor([-1.0, 0.0, 1.0])}, ["parents must", "float32"]),
        ({"targets": tensor([[1, 2, 3]])}, ["targets must", "(2, 3)"]),
        ({"drafts": tensor([1, 2, 3])}, ["drafts must", "(3,)"]),
        ({"drafts": torch.zeros(2, 3, device=DEVICE)}, ["drafts must", "float32"]),
        ({"targets": torch.zeros(2, 3, dtype=torch.int64, device="meta")}, ["targets must be on", "meta"]),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(arguments, words):
    ids = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with refused(ValueError, "longest_accepted", *words):
        longest_accepted(**{"parents": tensor([-1, 0, 1]), "drafts": ids, "targets": ids, **arguments})
