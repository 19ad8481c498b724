"""Attention: against a loop over queries and heads, with its cache against without, and its refusals."""

import pytest
import torch
from budgets import assert_e64, assert_same_bits, e64, rms
from draws import DEVICE, draw, on_the_host, seeds
from hybrids import poison_dead_kv
from hypothesis import given
from hypothesis import strategies as st
from oracles import linear, redraw, rms_norm
from refusals import assert_unchanged, refused, snapshot
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replayssm import ReplayStateCache
from replayssm.models import Attention

D_MODEL = 24
OPTIONS = [
    {},
    {"kv_heads": 2, "bias": True},
    {"kv_heads": 1, "rope_theta": 1e4},
    {"kv_heads": 3, "window": 4},
    {"window": 1, "rope_theta": 100.0},
    {"kv_heads": 2, "window": 9, "rope_theta": 1e4, "bias": True},
    {"kv_heads": 2, "rope_theta": 1e4, "rotary_dim": 2, "gated": True, "qk_norm": True},
    {"scale": 0.3},
]


def build(seed: int = 0, nheads: int = 6, headdim: int = 4, **options) -> Attention:
    layer = Attention(D_MODEL, nheads, headdim, **options, device=DEVICE, dtype=torch.float64)
    redraw(layer, seed)
    return layer


def rotated(x: Tensor, position: int, theta: float, dim: int | None = None) -> Tensor:
    """(heads, headdim): of the first dim channels, i and i + dim / 2 as one complex number, turned."""
    dim = x.shape[-1] if dim is None else dim
    pairs = dim // 2
    turn = [position * theta ** (-2 * i / dim) for i in range(pairs)]
    turn = torch.polar(torch.ones(pairs, dtype=torch.float64), torch.tensor(turn, dtype=torch.float64)).to(x.device)
    y = torch.complex(x[:, :pairs], x[:, pairs:dim]) * turn
    return torch.cat([y.real, y.imag, x[:, dim:]], -1)


def oracle(layer: Attention, x: Tensor, last: int | None = None) -> Tensor:
    """Every query of every head on its own, for one sequence (t, d_model); only the last queries if asked."""
    heads, groups, scale = layer.nheads, layer.kv_heads, layer.scale
    q, k, v = (
        linear(x, module).reshape(len(x), -1, layer.headdim) for module in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if layer.gated:
        q, gates = q[:, 0::2], q[:, 1::2]
    if layer.qk_norm:
        q, k = rms_norm(q, 1 + layer.q_norm.weight, 1e-6), rms_norm(k, 1 + layer.k_norm.weight, 1e-6)
    if layer.rope_theta is not None:
        theta, dim = layer.rope_theta, layer.rotary_dim
        q, k = (torch.stack([rotated(y[s], s, theta, dim) for s in range(len(x))]) for y in (q, k))
    outputs = []
    for s in range(len(x) - (last or len(x)), len(x)):
        first = 0 if layer.window is None else max(0, s + 1 - layer.window)
        row = []
        for h in range(heads):
            group = h // (heads // groups)
            score = (k[first : s + 1, group] @ q[s, h] * scale).exp()
            y = score / score.sum() @ v[first : s + 1, group]
            row.append(y / (1 + (-gates[s, h]).exp()) if layer.gated else y)
        outputs.append(torch.cat(row))
    return linear(torch.stack(outputs), layer.o_proj)


def new_cache(layer: Attention, batch: int, step_tokens: int = 1, max_seqlen: int | None = None) -> ReplayStateCache:
    return ReplayStateCache(layer, batch, window=step_tokens, step_tokens=step_tokens, max_seqlen=max_seqlen)


@torch.no_grad()
def step(layer: Attention, cache: ReplayStateCache, x: Tensor, **arguments) -> Tensor:
    return layer(x, cache.state_of(layer), **arguments)


@torch.no_grad()
def feed(layer: Attention, cache: ReplayStateCache, x: Tensor, pieces: list[int]) -> Tensor:
    outputs = []
    for piece in x.split(pieces, 1):
        poison_dead_kv(cache)
        outputs.append(step(layer, cache, piece))
        cache.commit()
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_whole_sequence_equals_the_loop_over_queries(options):
    layer, x = build(**options), draw(1, 2, 23, D_MODEL)
    exact = torch.stack([oracle(layer, row) for row in x])
    assert_e64(layer(x), exact)


@given(
    options=st.sampled_from(OPTIONS),
    pieces=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    step_tokens=st.integers(1, 5),
    seed=seeds,
)
def test_any_split_into_steps_equals_the_whole_sequence(options, pieces, step_tokens, seed):
    layer, x = build(seed, **options), draw(seed, 2, sum(pieces), D_MODEL)
    cache = new_cache(layer, 2, step_tokens, max_seqlen=sum(pieces) + seed % 3)
    assert_e64(feed(layer, cache, x, pieces), layer(x).detach())


@pytest.mark.parametrize(("window", "t"), [(7, 600), (300, 900)])
def test_a_ring_equals_the_full_computation_far_past_the_window(window, t):
    layer = build(window=window, kv_heads=2, rope_theta=1e4)
    x = draw(2, 2, t, D_MODEL)
    whole = layer(x).detach()
    assert_e64(whole[:, -5:], torch.stack([oracle(layer, row, 5) for row in x]))
    cache = new_cache(layer, 2, step_tokens=3)
    assert cache.state_of(layer).kv["k"].shape[1] == window + 2
    pieces = [t // 2, 1, 2, 3, *([3] * 40), t - t // 2 - 126]
    assert_e64(feed(layer, cache, x, pieces), whole)


@given(options=st.sampled_from(OPTIONS), kept=st.lists(st.integers(0, 4), min_size=1, max_size=8), seed=seeds)
def test_rejected_tokens_leave_no_trace(options, kept, seed):
    layer, x = build(seed, **options), draw(seed, 1, 3 + sum(kept) + 2, D_MODEL)
    cache = new_cache(layer, 1, step_tokens=4, max_seqlen=x.shape[1] + 4)
    outputs = [feed(layer, cache, x[:, :3], [3])]
    done = 3
    for n in kept:
        drafts = torch.full((1, 4 - n, D_MODEL), float("nan"), dtype=torch.float64, device=DEVICE)
        step(layer, cache, torch.cat([x[:, done : done + n], drafts], 1))
        cache.commit(n)
        done += n
    outputs.append(feed(layer, cache, x[:, done:], [1, 1]))
    whole = layer(x).detach()
    assert_e64(torch.cat(outputs, 1), torch.cat([whole[:, :3], whole[:, done:]], 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(options, side):
    layer, x = build(**options), draw(4, 3, 12, D_MODEL)
    lengths = [7, 12, 1]
    place = [slice(12 - n, 12) if side == "left" else slice(0, n) for n in lengths]
    mask = torch.zeros(3, 12, dtype=torch.int64, device=DEVICE)
    for row, where in enumerate(place):
        mask[row, where] = 1
    poisoned = torch.where(mask.unsqueeze(-1) == 0, float("nan"), x)
    cache = new_cache(layer, 3, step_tokens=2, max_seqlen=14)
    poison_dead_kv(cache)
    outputs = {
        "trained": layer(poisoned, attention_mask=mask),
        "cached": step(layer, cache, poisoned, attention_mask=mask),
    }
    cache.commit()
    assert cache.seqlen.tolist() == lengths
    for what, y in outputs.items():
        assert (y[mask == 0] == 0).all(), f"{what}: a masked position is not zero"
        for row, where in enumerate(place):
            assert_e64(y[row, where], layer(x[row : row + 1, where])[0].detach(), f"{what}, row {row}")
    poison_dead_kv(cache)
    more = draw(5, 3, 2, D_MODEL)
    y = step(layer, cache, more)
    for row, where in enumerate(place):
        alone = layer(torch.cat([x[row, where], more[row]]).unsqueeze(0))[0, -2:].detach()
        assert_e64(y[row], alone, f"the turn after, row {row}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("t", [2, 6])
def test_rows_that_are_off_are_zero_and_untouched(options, t):
    layer, x = build(**options), draw(6, 4, 5, D_MODEL)
    cache = new_cache(layer, 4, step_tokens=2, max_seqlen=20)
    feed(layer, cache, x, [5])
    before = snapshot(cache)
    new = draw(7, 3, t, D_MODEL)
    new[1] = float("nan")
    y = step(layer, cache, new, rows=torch.tensor([3, -1, 0], device=DEVICE))
    cache.commit()
    assert cache.seqlen.tolist() == [5 + t, 5, 5, 5 + t]
    assert (y[1] == 0).all()
    for row, source in [(0, 3), (2, 0)]:
        assert_e64(y[row], layer(torch.cat([x[source], new[row]]).unsqueeze(0))[0, 5:].detach())
    for name, tensor in cache.tensors().items():
        assert_same_bits(tensor[1:3], before[name][1:3], name)


def test_a_row_does_not_depend_on_its_neighbours():
    layer, x = build(kv_heads=2, window=4), draw(8, 3, 9, D_MODEL)
    other = torch.cat([x[:1], 100 * draw(9, 2, 9, D_MODEL)])
    results = [feed(layer, new_cache(layer, 3), batch, [4, *[1] * 5]) for batch in (x, other)]
    assert_same_bits(results[0][0], results[1][0])


@given(shift=st.integers(0, 10**5), seed=seeds)
def test_rotary_scores_depend_on_the_distance_alone(shift, seed):
    from replayssm.models.rotary import rotate

    q, k = draw(seed, 2, 1, 6, 1, 4)
    at = torch.arange(6, device=DEVICE).unsqueeze(0)
    score, far = (
        torch.einsum("bthd,bshd->bts", rotate(q, place, 1e4), rotate(k, place, 1e4)) for place in (at, at + shift)
    )
    # an angle of that many radians is known to eps times itself
    assert (score - far).abs().max() <= e64(score) + 4 * torch.finfo(torch.float64).eps * shift * rms(q) * rms(k) * 4


def test_angles_of_a_low_precision_model_are_computed_in_fp32():
    from replayssm.models.rotary import rotate

    x = draw(1, 1, 1, 2, 8, dtype=torch.float32)
    exact = rotate(x.double(), torch.tensor([[4099]], device=DEVICE), 1e4)
    for dtype, allowed in ((torch.float32, 1e-3), (torch.bfloat16, 2.0**-7)):
        got = rotate(x.to(dtype), torch.tensor([[4099]], device=DEVICE), 1e4)
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() <= allowed * x.abs().max()


@pytest.mark.parametrize("options", [{"kv_heads": 2, "rope_theta": 10.0}, {"window": 3, "kv_heads": 3}], ids=str)
def test_gradients_are_right(options):
    layer, x = build(**options), draw(1, 2, 5, D_MODEL).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=DEVICE)
    assert torch.autograd.gradcheck(lambda x: layer(x, attention_mask=mask), (x,), fast_mode=True)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@torch.no_grad()
def test_memory_of_a_sliding_window_grows_with_the_window_and_not_the_square():
    t, window = 2048, 32
    layer = Attention(D_MODEL, 2, 4, window=window, device=DEVICE, dtype=torch.float32)
    x = draw(1, 1, t, D_MODEL, dtype=torch.float32)
    cache = new_cache(layer, 1)
    with Largest() as largest:
        layer(x)
        layer(x, cache.state_of(layer))
    assert largest.elements <= t * 512


@torch.no_grad()
def test_memory_of_a_long_prompt_under_full_attention_is_bounded(monkeypatch):
    from replayssm.models import attend

    monkeypatch.setattr(attend, "MASK_ELEMENTS", 2**14)
    layer, x = build(kv_heads=2), draw(1, 1, 500, D_MODEL)
    cache = new_cache(layer, 1, max_seqlen=600)
    with Largest() as largest:
        y = step(layer, cache, x)
    assert largest.elements <= 2**16
    assert_e64(y, layer(x))


def test_a_windowed_cache_does_not_grow_with_max_seqlen():
    layer = build(window=5)
    sizes = [new_cache(layer, 2, 3, n).nbytes_by_part["kv"] for n in (None, 100, 10**6)]
    assert len(set(sizes)) == 1
    assert new_cache(layer, 2, 3, 4).nbytes_by_part["kv"] == sizes[0] * 4 // 7


@pytest.mark.parametrize("options", [{"kv_heads": 2}, {"kv_heads": 2, "window": 3, "rope_theta": 1e4}], ids=str)
def test_a_compiled_decode_step_is_one_graph_and_never_recompiles(options):
    layer, x = build(**options), draw(1, 2, 21, D_MODEL)
    cache = new_cache(layer, 2, max_seqlen=30)
    feed(layer, cache, x[:, :1], [1])
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    outputs = [layer(x[:, :1]).detach()]
    with torch.no_grad():
        for piece in x[:, 1:].split(1, 1):
            outputs.append(compiled(piece, cache.state_of(layer)))
            cache.commit()
    assert_e64(torch.cat(outputs, 1), layer(x).detach())
    assert len(compilations) == 1


def test_scores_are_scaled_by_the_root_of_the_head_unless_told_otherwise():
    assert build(headdim=16).scale == 0.25
    assert build(scale=0.3).scale == 0.3


def test_full_attention_needs_max_seqlen():
    with refused(ValueError, "max_seqlen", "ReplayStateCache"):
        ReplayStateCache([build()], 2)


@on_the_host
@pytest.mark.parametrize("window", [None, 3])
def test_more_tokens_than_max_seqlen_are_refused(window):
    layer = build(window=window)
    cache = new_cache(layer, 2, step_tokens=2, max_seqlen=6)
    feed(layer, cache, draw(1, 2, 5, D_MODEL), [5])
    for t in (2, 3):
        with refused(ValueError, "max_seqlen", cache=cache):
            step(layer, cache, draw(2, 2, t, D_MODEL))
    step(layer, cache, draw(2, 2, 1, D_MODEL))
    cache.commit()


@on_the_host
def test_bad_arguments_are_refused_and_change_nothing():
    layer = build(kv_heads=2)
    other = build(kv_heads=3)
    cache, other_cache = new_cache(layer, 2, max_seqlen=8), new_cache(other, 2, max_seqlen=8)
    x = draw(1, 2, 3, D_MODEL)
    feed(layer, cache, x, [3])
    state = cache.state_of(layer)
    mask = torch.ones(2, 3, dtype=torch.int64, device=DEVICE)
    interior = torch.tensor([[1, 0, 1], [1, 1, 1]], device=DEVICE)
    bad = {
        "x must": lambda: layer(x[..., :5], state),
        "(2, t, 24)": lambda: layer(draw(1, 3, 3, D_MODEL), state),
        "at least 1 token": lambda: layer(x[:, :0], state),
        "dtype": lambda: layer(x.float(), state),
        "cache.state_of": lambda: layer(x, other_cache.state_of(other)),
        "attention_mask": lambda: layer(x, state, attention_mask=mask[:, :2]),
        "left padding": lambda: layer(x, state, attention_mask=interior),
        "rows": lambda: layer(x, state, rows=torch.tensor([0, 0], device=DEVICE)),
        "must come with a state": lambda: layer(x, rows=torch.tensor([0, 1], device=DEVICE)),
        "attention_mask must": lambda: layer(x, attention_mask=mask[:1]),
        "zeros between tokens": lambda: layer(x, attention_mask=interior),
    }
    for words, call in bad.items():
        with refused(ValueError, words, cache=cache):
            call()
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        layer(x, state)
    assert_unchanged(cache, before)
    assert cache.clock.step is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"nheads": 0}, "nheads"),
        ({"headdim": 2.5}, "headdim"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"window": 0}, "window"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": 1e4, "headdim": 5}, "headdim"),
        ({"rope_theta": 1e4, "rotary_dim": 3}, "rotary_dim"),
        ({"rope_theta": 1e4, "rotary_dim": 6}, "rotary_dim"),
        ({"rope_theta": 1e4, "rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": 2}, "rotary_dim"),
        ({"bias": "no"}, "bias"),
        ({"gated": 1.5}, "gated"),
        ({"qk_norm": "yes"}, "qk_norm"),
        ({"scale": 0.0}, "scale"),
    ],
    ids=str,
)
def test_impossible_attention_is_refused(arguments, word):
    with refused(ValueError, word):
        build(**arguments)


def test_a_state_of_another_dtype_is_refused():
    layer = build(2)
    cache = ReplayStateCache([layer], 2, max_seqlen=8)
    layer.float()
    with refused(ValueError, "Attention.forward", "state must", "float64", cache=cache):
        layer(torch.zeros(2, 1, D_MODEL, device=DEVICE), cache.state_of(layer))
