"""Steps of draft trees in a cache: degenerate trees, whole models, the kernels' u, refusals, graphs."""

import random

import pytest
import torch
from backends import given
from budgets import assert_e64, assert_same_bits
from draft_trees import chain, line, padded, paths, trees
from draws import DEVICE, draw, on_the_host, same_bits_everywhere, seeds
from geometries import CASES, G, K, M, R, windows
from hybrids import ALL, build, config, feed, poison_dead_kv, token_ids
from hypothesis import strategies as st
from passthrough import PASSTHROUGH
from programs import poison
from refusals import assert_unchanged, refused, snapshot
from running import running, step, tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import replayssm.cache.kept
import replayssm.cache.selection
import replayssm.cache.state_cache
import replayssm.cache.step
import replayssm.models.hybrid
import replayssm.trees
from replayssm import ReplayStateCache
from replayssm.models import Attention
from replayssm.trees import longest_accepted

every_layer = pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)
TREE = [-1, 0, 0, 1, 1]  # two ways on from the root, two on from one of them


@same_bits_everywhere
@every_layer
@given(window=windows(4), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), data=st.data(), seed=seeds)
def test_a_tree_that_is_a_chain_leaves_what_the_chain_leaves(geometry, window, sizes, data, seed):
    """Bit for bit, whatever is kept; the outputs are sums of the same terms."""
    layer = geometry.build()
    caches = [ReplayStateCache([layer], 2, window=window, step_tokens=4, backend="torch") for _ in range(2)]
    for number, t in enumerate(sizes):
        x, n = draw(seed + number, 2, t, 24), torch.tensor([data.draw(st.integers(0, t)) for _ in range(2)])
        n, nodes = n.to(DEVICE), torch.arange(t, device=DEVICE).expand(2, t)
        y = step(caches[0], [layer], x)
        caches[0].commit(n)
        assert_e64(step(caches[1], [layer], x, parents=torch.tensor(chain(t), device=DEVICE)), y)
        caches[1].commit(n, path=nodes)
        assert_unchanged(caches[1], snapshot(caches[0]))


@same_bits_everywhere
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "rope_theta": 1e4}, {"window": 3}], ids=str)
def test_attention_over_a_tree_that_is_a_chain_is_the_chain_bit_for_bit(options):
    layer = Attention(24, 6, 4, **options, device=DEVICE, dtype=torch.float64)
    caches = [ReplayStateCache(layer, 2, window=4, step_tokens=4, max_seqlen=20) for _ in range(2)]
    for number, (t, n) in enumerate([(6, None), (3, 2), (4, 4), (4, 0), (2, 1)]):
        x = draw(number, 2, t, 24)
        tree = None if n is None else torch.tensor(chain(t), device=DEVICE)
        with torch.no_grad():
            y = [layer(x, cache.state_of(layer), parents=p) for cache, p in zip(caches, (None, tree), strict=True)]
        assert_same_bits(*y)
        caches[0].commit(n)
        caches[1].commit(n, path=None if n is None else torch.arange(t, device=DEVICE).expand(2, t))
        assert_unchanged(caches[1], snapshot(caches[0]))


@same_bits_everywhere
@pytest.mark.parametrize("kind", PASSTHROUGH, ids=lambda kind: kind.__name__)
def test_rejected_nodes_leave_no_trace(kind):
    """The path's tokens fed as a chain leave the same records, bit for bit, and the same checkpoint after a flush."""
    layer = kind()
    caches = [ReplayStateCache([layer], 2, window=5, step_tokens=5, backend="torch") for _ in range(2)]
    for number, lines in enumerate([[[0, 1, 4], [0, 2]], [[], [0, 1, 3]], [[0], [0, 1]], [[0, 2], []]] * 2):
        x = draw(number, 2, 5, layer.features, dtype=torch.float32)
        counts = tensor(*map(len, lines))
        step(caches[0], [layer], x, parents=tensor(*TREE))
        caches[0].commit(counts, path=padded(lines))
        accepted = torch.zeros_like(x)
        for row, nodes in enumerate(lines):
            accepted[row, : len(nodes)] = x[row, nodes]
        step(caches[1], [layer], accepted)
        caches[1].commit(counts)
        for cache in caches:
            poison(cache)  # the dead slots, in which the two may differ
        assert_unchanged(caches[0], snapshot(caches[1]))


@pytest.mark.parametrize("geometry", [G, K], ids=lambda g: g.kind)
def test_the_write_vectors_that_kernels_read_are_those_of_the_path(geometry):
    pytest.importorskip("triton")
    layer = geometry.build()
    caches = [ReplayStateCache([layer], 2, window=8, step_tokens=5, backend="triton") for _ in range(2)]
    x, lines = draw(1, 2, 5, 24), [[0, 1, 4], [0, 2]]
    accepted = torch.stack([x[row, [*nodes, 0][:3]] for row, nodes in enumerate(lines)])
    step(caches[0], [layer], x, parents=tensor(*TREE))
    caches[0].commit(tensor(3, 2), path=padded(lines))
    step(caches[1], [layer], accepted)
    caches[1].commit(tensor(3, 2))
    for row, nodes in enumerate(lines):
        u = [cache[0].u[row, : len(nodes)] for cache in caches]
        assert_e64(*u, f"u of row {row}")
    token = draw(2, 2, 1, 24)
    assert_e64(*(step(cache, [layer], token) for cache in caches))


@pytest.mark.parametrize(("geometry", "window"), [(M, 5), (G, 8), (K, 16)], ids=lambda v: str(getattr(v, "kind", v)))
def test_the_state_after_many_rounds_is_that_of_the_accepted_paths(geometry, window):
    """As case RC-13, over trees: most nodes are rejected, and NaN is written into their places."""
    layer, rounds, choice = geometry.build(), 60, random.Random(window)
    parents = [[[choice.randint(-1, j - 1) for j in range(5)] for _ in range(3)] for _ in range(rounds)]
    kept = [[line(of_row, choice.randint(-1, 4)) for of_row in of_round] for of_round in parents]
    ends = torch.tensor([list(map(len, lines)) for lines in kept]).cumsum(0)
    stream = geometry.input(3, int(ends.max()))
    exact = geometry.trace(layer, stream)
    cache = ReplayStateCache([layer], 3, window=window, step_tokens=5)
    for number, (of_round, lines) in enumerate(zip(parents, kept, strict=True)):
        x, places = draw(1000 + number, 3, 5, geometry.d_model), []
        for row, nodes in enumerate(lines):
            end = int(ends[number, row])
            places.append(range(end - len(nodes), end))
            x[row, nodes] = stream[row, places[row]]
        y = step(cache, [layer], x, parents=tensor(*of_round))
        cache.commit(tensor(*map(len, lines)), path=padded(lines))
        poison(cache)
        for row, nodes in enumerate(lines):
            if nodes:
                assert_e64(y[row, nodes], exact.output[row, places[row]], f"row {row} of round {number}")
    assert cache.seqlen.tolist() == ends[-1].tolist()
    state = torch.stack([exact.states[row, end - 1] for row, end in enumerate(ends[-1].tolist())])
    assert_e64(cache[0].state(), state, "state")
    assert int(ends[-1].sum()) < rounds * 3 * 5 / 2


@given(window=windows(5), rounds=st.integers(1, 4), data=st.data(), seed=seeds)
def test_a_model_continues_each_path_as_if_it_were_alone(window, rounds, data, seed):
    """Every kind of layer: all nodes of every round, against the model over the accepted ids and the node's line."""
    model, prompt = build(config()), token_ids(2, 4, seed)
    cache = ReplayStateCache(model, 2, window=window, step_tokens=5, max_seqlen=4 + 5 * rounds)
    accepted = [list(row) for row in prompt.tolist()]
    with torch.no_grad():
        model(prompt, cache)
        cache.commit()
        for number in range(rounds):
            t = data.draw(st.integers(1, 5))
            parents = [data.draw(trees(t)) for _ in range(2)]
            ids = token_ids(2, t, seed + number + 1)
            logits = model(ids, cache, parents=torch.tensor(parents, device=DEVICE))
            kept = []
            for row, of_row in enumerate(parents):
                nodes = [line(of_row, node) for node in range(t)]
                alone = [model(tensor(accepted[row] + ids[row, of_node].tolist()))[0, -1] for of_node in nodes]
                assert_e64(logits[row], torch.stack(alone), f"row {row} of round {number}")
                kept.append(data.draw(paths(of_row)))
                accepted[row] += ids[row, kept[row]].tolist()
            cache.commit(tensor(*map(len, kept)), path=padded(kept))
            poison(cache)
            poison_dead_kv(cache)
    assert cache.seqlen.tolist() == [len(row) for row in accepted]


@torch.no_grad()
def test_greedy_decoding_over_trees_gives_the_tokens_of_greedy_decoding():
    """Each tree holds the right continuation up to some depth, among others, at places that differ from row to row."""
    model, prompt, new = build(config(*ALL)), token_ids(3, 5), 24
    ids = prompt
    for _ in range(new + 5):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    cache = ReplayStateCache(model, 3, window=6, step_tokens=5, max_seqlen=60)
    last = model(prompt, cache)[:, -1].argmax(-1)
    cache.commit()
    emitted = [[token] for token in last.tolist()]
    parents, lines = tensor(*TREE), [[0, 1, 4], [0, 2], [0, 1, 3]]
    accepted = 0
    for number in range(100):
        if min(map(len, emitted)) >= new:
            break
        drafts = token_ids(3, 5, number)
        for row in range(3):
            nodes = lines[(row + number) % 3]
            at = prompt.shape[1] + len(emitted[row]) - 1
            drafts[row, nodes] = ids[row, at : at + 3][: len(nodes)] if at + 3 <= ids.shape[1] else last[row]
        drafts[:, 0] = last
        targets = model(drafts, cache, parents=parents).argmax(-1)
        n, path = longest_accepted(parents, drafts, targets)
        cache.commit(n, path=path)
        accepted += int(n.sum()) - 3
        for row, count in enumerate(n.tolist()):
            emitted[row] += targets[row, path[row, :count]].tolist()
        last = tensor(*(row[-1] for row in emitted))
    assert accepted > 10
    for row in range(3):
        assert emitted[row][:new] == ids[row, prompt.shape[1] :][:new].tolist()


@on_the_host
@pytest.mark.parametrize(
    ("parents", "words"),
    [
        (tensor(0, 0), ["parents must", "further left", "[0, 0]"]),
        (tensor(1, 0), ["parents must", "further left"]),
        (tensor(-1, 1), ["parents must", "further left"]),
        (tensor(-1, -2), ["parents must", "further left"]),
        (tensor([-1, 0], [-1, 0], [-1, 1]), ["parents must", "further left"]),
        (tensor(-1, 0, 0), ["parents must", "(2,)", "(3,)"]),
        (tensor([-1, 0], [-1, 0]), ["parents must", "(3, 2)", "(2, 2)"]),
        (tensor(-1.0, 0.0), ["parents must", "float32"]),
        (tensor(False, False), ["parents must", "bool"]),
        (tensor(-1, 0).to("meta"), ["parents must be on", "meta"]),
    ],
    ids=str,
)
@every_layer
def test_parents_that_cannot_be_are_refused(geometry, parents, words):
    layer = geometry.build()
    cache, x = running(layer)
    with refused(ValueError, *words, cache=cache):
        layer(x, cache[0], parents=parents)
    step(cache, [layer], x)


def test_a_tree_needs_a_step_and_no_mask():
    layer = M.build()
    cache, x = running(layer)
    with refused(ValueError, "parents must", "step_tokens=3", "t=4", cache=cache):
        layer(draw(1, 3, 4, 24), cache[0], parents=tensor(-1, 0, 0, 0))
    mask = torch.ones(3, 2, dtype=torch.int64, device=DEVICE)
    with refused(ValueError, "attention_mask must be None with parents", cache=cache):
        layer(x, cache[0], parents=tensor(-1, 0), attention_mask=mask)
    with refused(ValueError, "must come with a state"):
        layer(x, parents=tensor(-1, 0))
    step(cache, [layer], x, parents=tensor(-1, 0))


@pytest.mark.parametrize("second", [None, tensor(-1, 0)], ids=["a chain", "another object"])
def test_modules_of_a_step_must_agree_about_its_tree(second):
    layers = [M.build(seed=1), G.build(seed=2)]
    cache, x = running(*layers)
    parents = tensor(-1, 0)
    step(cache, layers[:1], x, parents=parents)
    with refused(RuntimeError, "parents", cache=cache):
        layers[1](x, cache[1], parents=second)
    with torch.no_grad():
        layers[1](x, cache[1], parents=parents)
    cache.commit(0)


ROOT = tensor([0], [0], [0])


@on_the_host
@pytest.mark.parametrize(
    ("n", "path", "words"),
    [
        (None, None, ["path must be given", "n is the int 0"]),
        (1, None, ["path must be given"]),
        (tensor(0, 0, 0), None, ["path must be given"]),
        (False, None, ["path must be given"]),
        (2, ROOT, ["path must lead", "[2, 2, 2]"]),
        (None, tensor([0, 1], [0, 2], [0, 0]), ["path must lead"]),
        (None, tensor([0, 1], [0, 2], [1, 0]), ["path must lead"]),
        (None, tensor([0, 1], [0, 2], [0, 3]), ["path must lead"]),
        (None, tensor([0, 1], [0, 2], [0, -1]), ["path must lead"]),
        (tensor(1, 2, 2), tensor([0, 1], [0, 2], [1, 2]), ["path must lead"]),
        (tensor(1, 3, 0), tensor([0, 1], [0, 2], [0, 1]), ["path must lead", "[1, 3, 0]"]),
        (tensor(1, 4, 0), tensor([0, 1], [0, 2], [0, 1]), ["n must", "[3, 3, 3]"]),
        (-1, ROOT, ["n must"]),
        (tensor(1, 1), ROOT, ["n must", "(3,)"]),
        (1, ROOT.float(), ["path must", "float32"]),
        (1, tensor(0, 0, 0), ["path must", "(3, n)"]),
        (1, tensor([0], [0]), ["path must", "(3, n)", "(2, 1)"]),
        (1, torch.zeros(3, 4, dtype=torch.int64, device=DEVICE), ["path must", "3; got 4"]),
    ],
    ids=str,
)
def test_a_path_that_cannot_be_is_refused(n, path, words):
    layer = G.build()
    cache, _ = running(layer)
    x = draw(1, 3, 3, 24)
    step(cache, [layer], x, parents=tensor(-1, 0, 0))
    with refused(ValueError, "ReplayStateCache.commit", *words, cache=cache):
        cache.commit(n, path=path)
    cache.commit(tensor(1, 2, 0), path=tensor([0, 9], [0, 2], [9, 9]))
    assert cache.seqlen.tolist() == [9, 10, 8]
    cache.check()


def test_a_path_without_a_tree_is_refused_and_nothing_may_always_be_kept():
    layer = M.build()
    cache, x = running(layer)
    step(cache, [layer], x)
    with refused(ValueError, "path must be None", cache=cache):
        cache.commit(1, path=ROOT)
    with refused(ValueError, "path must be a tensor", "got list", cache=cache):
        cache.commit(1, path=[[0]])
    cache.commit(1)
    before = cache[0].state()
    step(cache, [layer], x, parents=tensor(-1, -1))
    cache.commit(0)
    assert cache.seqlen.tolist() == [9, 9, 9]
    assert_e64(cache[0].state(), before, "state")


@on_the_host
def test_a_row_that_is_off_keeps_no_path():
    layer = K.build()
    cache, x = running(layer)
    step(cache, [layer], x, rows=tensor(2, -1, 0), parents=tensor([-1, -1], [-1, 0], [-1, 0]))
    with refused(ValueError, "n must", cache=cache):
        cache.commit(tensor(1, 1, 1), path=ROOT)
    cache.commit(path=tensor([1], [5], [0]))
    assert cache.seqlen.tolist() == [9, 8, 9]


def test_trees_and_paths_that_cannot_be_read_are_put_right_and_reported(monkeypatch):
    """As on a GPU."""
    modules = replayssm.cache.step, replayssm.cache.kept, replayssm.cache.state_cache, replayssm.cache.selection
    for module in (*modules, replayssm.trees):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    layer, x = G.build(), draw(1, 3, 3, 24)
    for parents, path, kept, words in (
        (tensor(-1, 0, 0), tensor([0, 2, 1], [1, 2, 0], [0, 7, 7]), [2, 0, 1], "path that leaves the tree"),
        (tensor(-9, 5, 0), tensor([0, 1], [0, 2], [0, 1]), [2, 2, 2], "parents had a node"),
    ):
        cache, _ = running(layer)
        step(cache, [layer], x, parents=parents)
        cache.commit(path=path)
        right, _ = running(layer)
        step(right, [layer], x, parents=tensor(-1, 0, 0))
        right.commit(tensor(*kept), path=path)
        right.check()
        assert_unchanged(cache, snapshot(right))
        with pytest.raises(RuntimeError, match=words):
            cache.check()


class Waits(TorchDispatchMode):
    """The operations that look at values, for which a host would wait for its device."""

    found: frozenset[str] = frozenset()
    names = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.names or (name.startswith("index") and any(is_mask(x) for x in tree_leaves(args[1:]))):
            self.found |= {name}
        return func(*args, **(kwargs or {}))


def is_mask(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool


def test_a_step_of_a_tree_and_its_commit_wait_for_nothing(monkeypatch):
    modules = replayssm.cache.step, replayssm.cache.kept, replayssm.cache.state_cache, replayssm.cache.selection
    for module in (*modules, replayssm.trees, replayssm.models.hybrid):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    model = build(config())
    cache = ReplayStateCache(model, 3, window=5, step_tokens=5, max_seqlen=60, backend="torch")
    feed(model, cache, token_ids(3, 6), [6])
    rows, parents, ids = tensor(2, -1, 0), tensor(*TREE), token_ids(3, 5)
    held = {name: x.data_ptr() for name, x in cache.tensors().items()}
    with torch.no_grad(), Waits() as waits:
        for _ in range(3):
            logits = model(ids, cache, rows=rows, parents=parents)
            n, path = longest_accepted(parents, ids, logits.argmax(-1))
            cache.commit(torch.where(rows < 0, 0, n), path=path)
    assert not waits.found
    assert held == {name: x.data_ptr() for name, x in cache.tensors().items()}
    with torch.no_grad(), Waits() as waits:  # it does see one
        int(cache.seqlen[0])
    assert waits.found == {"_local_scalar_dense"}


@on_the_host
def test_a_tree_must_fit_into_max_seqlen():
    layer = M.build()
    cache, x = running(layer, max_seqlen=9)
    with refused(ValueError, "max_seqlen=9", cache=cache):
        layer(x, cache[0], parents=tensor(-1, -1))


def test_nodes_beyond_max_seqlen_are_dropped_and_reported_where_they_cannot_be_counted(monkeypatch):
    for module in (replayssm.cache.step, replayssm.cache.kept):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    layer = M.build()
    cache, x = running(layer, max_seqlen=9)
    step(cache, [layer], x, parents=tensor(-1, -1))
    cache.commit(path=tensor([0], [0], [1]))
    assert cache.seqlen.tolist() == [9, 9, 8]
    with pytest.raises(RuntimeError, match=r"max_seqlen.*path"):
        cache.check()


def test_a_compiled_step_of_a_tree_is_one_graph_and_never_recompiles():
    model = build(config())
    caches = [ReplayStateCache(model, 2, window=6, step_tokens=5, max_seqlen=60) for _ in range(2)]
    for cache in caches:
        feed(model, cache, token_ids(2, 6), [6])
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for number in range(6):
            ids, parents = token_ids(2, 5, number), tensor([-1, 0, 0, 1, number % 3], [-1, 0, 1, 2, 3])
            assert_e64(compiled(ids, caches[0], parents=parents), model(ids, caches[1], parents=parents))
            for cache in caches:
                cache.commit(tensor(2, 3), path=tensor([0, 2, 9], [0, 1, 2]))
    assert len(compilations) == 1
