"""Latent attention: against a loop that makes every head's keys and values, and against transformers.

Rows, padding, rollback and draft trees: it is one of the layers of the hybrid models that those tests run.
"""

import math

import pytest
import torch
from budgets import assert_e32, assert_e64, e32
from draws import DEVICE, draw, seeds
from hybrids import poison_dead_kv
from hypothesis import given
from hypothesis import strategies as st
from oracles import linear, redraw, rms_norm
from refusals import refused
from torch import Tensor

from replayssm import ReplayStateCache
from replayssm.models import Attention, LatentAttention

D_MODEL = 24
SIZES = {"d_key": 4, "d_shared": 3, "kv_rank": 7}


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changed) -> LatentAttention:
    layer = LatentAttention(D_MODEL, 3, 5, **{**SIZES, **changed}, device=DEVICE, dtype=dtype)
    redraw(layer, seed)
    return layer


def oracle(layer: LatentAttention, x: Tensor) -> Tensor:
    """One sequence (t, d_model), every query of every head on its own."""
    rank, outputs = layer.kv_rank, []
    low = linear(x, layer.kv_a_proj_with_mqa)
    shared = low[:, rank:]
    q = linear(x, layer.q_proj).reshape(len(x), layer.nheads, -1)
    both = rms_norm(low[:, :rank], layer.kv_a_layernorm.weight, 1e-6) @ layer.kv_b_proj.weight.T
    both = both.reshape(len(x), layer.nheads, -1)
    for s in range(len(x)):
        row = []
        for h in range(layer.nheads):
            k = torch.cat([both[: s + 1, h, : layer.d_key], shared[: s + 1]], 1)
            score = (k @ q[s, h] / math.sqrt(k.shape[1])).exp()
            row.append(score / score.sum() @ both[: s + 1, h, layer.d_key :])
        outputs.append(torch.cat(row))
    return linear(torch.stack(outputs), layer.o_proj)


@torch.no_grad()
def feed(layer: LatentAttention, x: Tensor, pieces: list[int], step_tokens: int) -> Tensor:
    cache = ReplayStateCache(layer, len(x), window=step_tokens, step_tokens=step_tokens, max_seqlen=x.shape[1] + 2)
    outputs = []
    for piece in x.split(pieces, 1):
        poison_dead_kv(cache)
        outputs.append(layer(piece, cache.state_of(layer)))
        cache.commit()
    return torch.cat(outputs, 1)


@given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    step_tokens=st.integers(1, 4),
    bias=st.booleans(),
    seed=seeds,
)
def test_any_split_into_steps_equals_the_loop_over_queries(pieces, step_tokens, bias, seed):
    layer, x = build(seed, bias=bias), draw(seed, 2, sum(pieces), D_MODEL)
    exact = torch.stack([oracle(layer, row) for row in x]).detach()
    assert_e64(layer(x).detach(), exact, "without a cache")
    assert_e64(feed(layer, x, pieces, step_tokens), exact, "with one")


def test_a_token_leaves_one_latent_vector_whatever_the_number_of_heads():
    few, many = (LatentAttention(D_MODEL, nheads, 5, **SIZES, device=DEVICE) for nheads in (1, 8))
    sizes = [ReplayStateCache(layer, 2, max_seqlen=9).nbytes_by_part["kv"] for layer in (few, many)]
    assert sizes == [2 * 9 * (7 + 3) * 4] * 2


def test_gradients_are_right():
    layer, x = build(), draw(1, 2, 5, D_MODEL).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=DEVICE)
    assert torch.autograd.gradcheck(lambda x: layer(x, attention_mask=mask), (x,), fast_mode=True)


@pytest.mark.parametrize(
    ("arguments", "word"), [({"d_key": 0}, "d_key"), ({"kv_rank": 1.5}, "kv_rank"), ({"bias": "no"}, "bias")], ids=str
)
def test_impossible_latent_attention_is_refused(arguments, word):
    with refused(ValueError, "LatentAttention", word):
        build(**arguments)


def test_a_cache_without_a_length_and_the_state_of_another_layer_are_refused():
    layer, other = build(), build(kv_rank=6)
    with refused(ValueError, "LatentAttention.alloc_state", "max_seqlen"):
        ReplayStateCache([layer], 2)
    for stranger in (other, Attention(D_MODEL, 3, 5, device=DEVICE, dtype=torch.float64)):
        cache = ReplayStateCache(stranger, 2, max_seqlen=4)
        with refused(ValueError, "LatentAttention.forward", "cache.state_of", cache=cache):
            layer(draw(1, 2, 1, D_MODEL), cache.state_of(stranger))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
@pytest.mark.parametrize("bias", [False, True])
def test_latent_attention_with_the_weights_of_transformers_equals_it(bias):
    configs = pytest.importorskip("transformers.models.kimi_linear.configuration_kimi_linear")
    modules = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = configs.KimiLinearConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        v_head_dim=5,
        qk_nope_head_dim=4,
        qk_rope_head_dim=3,
        kv_lora_rank=7,
        attention_bias=bias,
        attn_implementation="eager",
    )
    layer, single, x = build(bias=bias), build(bias=bias).float(), draw(1, 2, 40, D_MODEL)
    theirs = modules.KimiLinearAttention(config, layer_idx=0)
    theirs.load_state_dict(single.state_dict())
    hidden = torch.full((40, 40), -torch.inf).triu(1)
    exact = torch.stack([oracle(layer, row) for row in x])
    allowed = e32(torch.stack([oracle(single, row) for row in x.float()]), exact)
    with torch.no_grad():
        assert_e32(theirs(x.float(), hidden)[0], exact, allowed, "theirs against the loop")
        assert_e32(single(x.float()), exact, allowed, "ours in fp32 against the loop")
        assert_e32(feed(single, x.float(), [20, 1, 1, 2, 16], 2), exact, allowed, "ours, decoding, against the loop")
