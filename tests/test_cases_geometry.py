"""Cases RC-24, RC-25 and RC-28: sizes of every kind, heads and their groups, memory of long inputs.

On plain PyTorch alone: the kernels meet sizes and groups in test_triton_decode.py, with fewer programs to interpret.
"""

import pytest
import torch
from budgets import assert_e64, assert_gradient
from draws import DEVICE, draw
from geometries import G, Geometry, M, decode_in_pieces
from peak_memory import PeakMemory
from refusals import refused
from running import step

import replayssm
from replayssm import ReplayStateCache
from replayssm.models import HybridLM

SIZES = [
    (16, 1, 5, 7, 1),
    (64, 2, 64, 128, 1),
    (24, 6, 5, 7, 3),
    (40, 3, 40, 24, 1),
    (7, 1, 1, 1, 1),
    (24, 12, 2, 3, 4),
]


def layouts(x):
    """The same numbers, laid out in memory in other ways."""
    batch, t, d_model = x.shape
    larger = draw(9, batch + 1, t + 2, d_model + 3)
    larger[:batch, 1 : t + 1, 2 : d_model + 2] = x
    return {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "a slice": larger[:batch, 1 : t + 1, 2 : d_model + 2],
        "features first": x.transpose(1, 2).contiguous().transpose(1, 2),
    }


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rc24_any_positive_sizes_work(sizes, batch):
    d_model, nheads, headdim, d_state, ngroups = sizes
    geometry = Geometry("mamba2", d_model, nheads, headdim, d_state, {"ngroups": ngroups})
    layer, x = geometry.build(), geometry.input(batch, 22)
    some = sorted({0, batch // 2, batch - 1})
    exact = geometry.trace(layer, x[some])
    y, cache = decode_in_pieces(layer, x, [2, *[1] * 20], window=7)
    assert_e64(y[some], exact.output, "decoding")
    assert_e64(cache[0].state()[some], exact.states[:, -1], "state")
    for name, same in layouts(x).items():
        with torch.no_grad():
            assert_e64(layer(same)[some], exact.output, f"forward of {name}")
    cache = ReplayStateCache([layer], batch, window=7, step_tokens=2)
    for piece in layouts(x)["a slice"].split([6, *[2] * 8], 1):
        last = step(cache, [layer], piece)
        cache.commit()
    assert_e64(last[some], exact.output[:, -2:], "decoding of a slice")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rc24_gradients_of_an_expanded_input(sizes):
    """A row that is repeated with stride 0 gets the sum of the gradients of its copies."""
    d_model, nheads, headdim, d_state, ngroups = sizes
    geometry = Geometry("mamba2", d_model, nheads, headdim, d_state, {"ngroups": ngroups})
    layer, row = geometry.build(), geometry.input(1, 12)
    gradients = []
    for run in (layer, lambda x: geometry.trace(layer, x).output):
        x = row.clone().requires_grad_()
        (run(x.expand(3, -1, -1)) * draw(4, 3, 12, d_model)).sum().backward()
        gradients.append(x.grad)
    assert_gradient(*gradients, "gradient")


@pytest.mark.parametrize("geometry", [M, G], ids=lambda g: g.kind)
def test_rc24_heads_that_do_not_divide_into_groups_are_refused(geometry):
    with refused(ValueError, "nheads must be a multiple of ngroups=4; got 6"):
        geometry.but(ngroups=4).build()


def test_rc25_mamba2_heads_read_their_own_group():
    """With B of group 1 silent, heads 3, 4, 5 stay empty; tiled groups would empty heads 1, 3, 5."""
    layer, inner, keys = M.build(), 30, 7
    group_1 = slice(inner + keys, inner + 2 * keys)
    with torch.no_grad():
        layer.in_proj.weight[inner:][group_1] = 0
        layer.conv1d.weight[group_1] = 0
        layer.conv1d.bias[group_1] = 0
    _, cache = decode_in_pieces(layer, M.input(2, 5), [5], window=4)
    assert_only_group_0_is_written(cache[0].checkpoint)


def test_rc25_gated_deltanet_heads_read_their_own_key_head():
    layer, keys = G.build(), 7
    with torch.no_grad():
        layer.in_proj_qkv.weight[3 * keys : 4 * keys] = 0  # rows: q of 2 key heads, k of 2 key heads, v
    _, cache = decode_in_pieces(layer, G.input(2, 5), [5], window=4)
    assert_only_group_0_is_written(cache[0].checkpoint)


def assert_only_group_0_is_written(checkpoint):
    silent, heard = checkpoint[:, 3:], checkpoint[:, :3]
    assert torch.equal(silent, torch.zeros_like(silent))
    assert (heard.abs().amax((-2, -1)) > 1e-3).all()


def long_layer(kind):
    return Geometry(kind, 64, 8, 64, 128, {"ngroups": 2}).build(torch.float32)


@pytest.mark.parametrize("kind", ["mamba2", "gated_deltanet"])
def test_rc28_memory_grows_with_the_length_and_not_with_length_times_state(kind):
    """T x state would be 1 GiB in one tensor at 4,096 tokens."""
    layer = long_layer(kind)
    forward, training = {}, {}
    for t in (2048, 4096):
        x = draw(1, 1, t, 64, dtype=torch.float32)
        with torch.no_grad(), PeakMemory() as peak:
            layer(x)
        forward[t] = peak.bytes
        assert peak.largest <= 64 * 2**20
        with PeakMemory() as peak:
            layer(x).sum().backward()
        training[t] = peak.bytes
        assert peak.largest <= 64 * 2**20
    assert forward[4096] / forward[2048] <= 2.2
    assert training[4096] / training[2048] <= 2.2


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mamba2", "gated_deltanet"])
def test_rc28_memory_at_8192_tokens(kind):
    layer, peaks = long_layer(kind), {}
    for t in (4096, 8192):
        with PeakMemory() as peak:
            layer(draw(1, 1, t, 64, dtype=torch.float32)).sum().backward()
        peaks[t] = peak.bytes
    assert peaks[8192] / peaks[4096] <= 2.2


@pytest.mark.nightly
def test_rc28_a_prompt_of_64k_tokens_is_read_in_bounded_memory():
    t, d_model = 65536, 64
    entry = {"nheads": 8, "headdim": 64, "d_state": 128, "ngroups": 2}
    config = {
        "model_type": "replayssm_hybrid",
        "vocab_size": 50,
        "d_model": d_model,
        "tie_embeddings": True,
        "norm_eps": 1e-5,
        "layers": [{"type": "mamba2", **entry}, {"type": "gated_deltanet", **entry}],
    }
    model = HybridLM(config, device=DEVICE, dtype=torch.float32)
    ids = torch.randint(50, (1, t), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with PeakMemory() as peak:
        replayssm.generate(model, ids, max_new_tokens=2)
    assert peak.bytes < 20 * t * d_model * 4
