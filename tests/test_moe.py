"""Mixture of experts: against a loop over tokens and experts, each way of computing it, and against transformers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from budgets import assert_e16, assert_e32, assert_e64, e32
from draws import DEVICE, draw, seeds
from hybrids import build as build_model
from hybrids import config, token_ids
from hypothesis import given
from hypothesis import strategies as st
from oracles import linear, redraw, silu
from refusals import refused
from torch import Tensor, nn

from replayssm.models import MoE

D_MODEL = 24
SIGMOID = {"scores": "sigmoid", "scale": 2.5}
OPTIONS = [
    {},
    {"normalize": False, "shared_hidden": 7, "shared_gate": True},
    {**SIGMOID, "shared_hidden": 9},
    {**SIGMOID, "expert_groups": 3, "top_groups": 2, "normalize": False},
    {**SIGMOID, "activation": "relu2", "latent": 10, "shared_hidden": 6, "bias": True},
    {"top_k": 1, "normalize": False},
    {"top_k": 12},
]


def build(seed: int = 0, dtype: torch.dtype = torch.float64, d_model: int = D_MODEL, **options) -> MoE:
    settings = {"hidden": 5, "num_experts": 12, "top_k": 3, **options}
    layer = MoE(d_model, **settings, device=DEVICE, dtype=dtype)
    redraw(layer, seed)
    for buffer in layer.buffers():
        buffer.copy_(draw(seed + 1, *buffer.shape) / 4)
    return layer


def mlp(x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Weights as (out, in), those of the gate stacked over those of up."""
    y = up @ x
    if activation == "swiglu":
        half = len(y) // 2
        y = silu(y[:half]) * y[half:]
    else:
        y = y.clamp(min=0) ** 2
    return down @ y


def chosen(layer: MoE, x: Tensor) -> dict[int, Tensor]:
    """Experts of one token, by sorting, and their weights."""
    router = layer.gate
    logits = router.weight @ x
    if router.scores == "softmax":
        score = choice = (logits - logits.max()).exp() / (logits - logits.max()).exp().sum()
    else:
        score = 1 / (1 + (-logits).exp())
        choice = score + router.e_score_correction_bias
    size = len(logits) // router.expert_groups
    groups = [list(range(first, first + size)) for first in range(0, len(logits), size)]
    if len(groups) > 1:
        groups.sort(key=lambda group: -sum(sorted(choice[group].tolist())[-2:]))
    allowed = [expert for group in groups[: router.top_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -choice[expert].item())[: router.top_k]
    total = sum(score[expert] for expert in best) if router.normalize else 1
    return {expert: router.scale * score[expert] / total for expert in best}


@torch.no_grad()
def oracle(layer: MoE, x: Tensor) -> Tensor:
    """One token after another, one expert after another: (batch, t, d_model)."""
    experts, outputs = layer.experts, []
    up = experts.gate_up_proj if experts.activation == "swiglu" else experts.up_proj
    for token in x.flatten(0, -2):
        inside = token if layer.fc1_latent_proj is None else linear(token, layer.fc1_latent_proj)
        y = sum(
            weight * mlp(inside, up[e], experts.down_proj[e], experts.activation)
            for e, weight in chosen(layer, token).items()
        )
        if layer.fc2_latent_proj is not None:
            y = linear(y, layer.fc2_latent_proj)
        if layer.shared_expert is not None:
            y = y + shared(layer, token)
        outputs.append(y)
    return torch.stack(outputs).view_as(x)


def shared(layer: MoE, token: Tensor) -> Tensor:
    part = layer.shared_expert
    up = linear(token, part.up_proj)
    inner = silu(linear(token, part.gate_proj)) * up if part.activation == "swiglu" else up.clamp(min=0) ** 2
    y = linear(inner, part.down_proj)
    return y if layer.shared_expert_gate is None else y / (1 + (-linear(token, layer.shared_expert_gate)).exp())


@given(options=st.sampled_from(OPTIONS), batch=st.integers(1, 3), t=st.integers(1, 9), seed=seeds)
def test_every_token_gets_the_weighted_sum_of_its_experts(options, batch, t, seed):
    layer, x = build(seed, **options), draw(seed, batch, t, D_MODEL)
    assert_e64(layer(x).detach(), oracle(layer, x))


@given(options=st.sampled_from(OPTIONS), t=st.integers(1, 9), seed=seeds)
def test_every_way_of_computing_gives_the_same(options, t, seed):
    experts, x = build(seed, **options).experts, draw(seed, t, 10 if "latent" in options else D_MODEL)
    top_k = options.get("top_k", 3)
    index = draw(seed, t, 12).argsort(1)[:, :top_k]
    weights = draw(seed + 1, t, top_k)
    with torch.no_grad():
        exact = experts(x, index, weights)
        gathered = torch.einsum("nkd,nk->nd", experts._gathered(x, index), weights)
        assert_e64(gathered, exact, "gathered")
        assert_e64(experts._through_all(x, index, weights), exact, "all through all")


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has grouped products on GPUs alone")
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4]], ids=str)
def test_products_by_groups_give_the_same(options):
    """In fp32, whose rows must be 16 bytes or several; one expert is hit by nobody."""
    layer = build(**{**options, "hidden": 8, "latent": None}).float()
    x, index = draw(1, 9, D_MODEL, dtype=torch.float32), draw(2, 9, 11).argsort(1)[:, :3]
    weights = draw(3, 9, 3, dtype=torch.float32)
    with torch.no_grad():
        plain, exact = layer.experts(x, index, weights), layer.double().experts(x.double(), index, weights.double())
        grouped = torch.einsum("nkd,nk->nd", layer.float().experts._sorted(x, index, grouped=True), weights)
    assert_e32(grouped, exact, e32(plain, exact))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: run with REPLAYSSM_TEST_DEVICE=cuda")
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_call_on_a_gpu_in_bf16_never_waits_and_equals_the_loop(tokens):
    layer = build(dtype=torch.bfloat16, hidden=64, shared_hidden=32, shared_gate=True, d_model=128)
    x, on_the_host = draw(1, tokens, 1, 128, dtype=torch.bfloat16), copy.deepcopy(layer).to("cpu")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert_e16(y.cpu(), on_the_host(x.cpu()), oracle(copy.deepcopy(on_the_host).double(), x.cpu().double()))


def test_gathered_weights_are_copied_in_pieces(monkeypatch):
    from replayssm.models import experts as module

    experts, x = build().experts, draw(1, 7, D_MODEL)
    index = draw(2, 7, 12).argsort(1)[:, :3]
    whole = experts._gathered(x, index)
    monkeypatch.setattr(module, "GATHERED", 3 * experts.gate_up_proj[0].numel() * 2)
    assert_e64(experts._gathered(x, index).detach(), whole.detach())


def test_an_expert_that_overflows_spoils_those_alone_who_chose_it():
    layer, x = build(), draw(3, 5, D_MODEL)
    index = torch.tensor([[0, 1, 2], [1, 2, 3], [4, 5, 6], [3, 4, 5], [0, 4, 5]], device=DEVICE)
    weights = draw(4, 5, 3)
    clean = layer.experts(x, index, weights).detach()
    with torch.no_grad():
        layer.experts.down_proj[0] = float("inf")
        for y in (layer.experts(x, index, weights), layer.experts._through_all(x, index, weights)):
            assert not torch.isfinite(y[[0, 4]]).all()
            assert_e64(y[1:4], clean[1:4])


@pytest.mark.parametrize("t", [2, 9], ids=["few tokens", "many tokens"])
def test_a_compiled_call_is_one_graph(t):
    layer, x = build(**OPTIONS[2]), draw(1, 1, t, D_MODEL)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_e64(compiled(x).detach(), layer(x).detach())


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_gradients_are_right(options):
    layer, x = build(**options), draw(1, 1, 4, D_MODEL).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_model_of_low_precision_chooses_in_fp32():
    layer = build(dtype=torch.bfloat16)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(12, D_MODEL))
        x = torch.ones(1, D_MODEL, dtype=torch.bfloat16, device=DEVICE)
        x[0, 3] = 1 + 2**-7
        layer.gate.weight.mul_(0.2998046875)  # the products round to neighbours in bf16, or to the same
        experts, weights = layer.gate(x)
    assert weights.dtype == torch.float32
    assert experts[0, 0] == 3
    assert layer(x.unsqueeze(0)).dtype == torch.bfloat16


def test_a_model_with_experts_trains_and_decodes():
    entry = {"type": "moe", "hidden": 7, "num_experts": 6, "top_k": 2, **SIGMOID, "shared_hidden": 5}
    model = build_model(config({"type": "mamba2", "nheads": 6, "headdim": 5, "d_state": 7}, entry))
    x = model.embed(token_ids(2, 5)).detach()
    assert_e64(model.layers[1].mixer(x).detach(), oracle(model.layers[1].mixer, x))
    assert model(token_ids(2, 5)).shape == (2, 5, 61)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_k": 13}, ["top_k", "12"]),
        ({"expert_groups": 5}, ["expert_groups", "12"]),
        ({"expert_groups": 12}, ["expert_groups", "at least 2"]),
        ({"top_groups": 2}, ["top_groups", "expert_groups=1"]),
        ({"expert_groups": 6, "top_groups": 1}, ["top_k", "2 experts"]),
        ({"shared_gate": True}, ["shared_gate"]),
        ({"scores": "tanh"}, ["scores", "sigmoid"]),
        ({"activation": "gelu"}, ["activation", "relu2"]),
        ({"hidden": 0}, ["hidden"]),
        ({"latent": 0}, ["latent"]),
        ({"normalize": "yes"}, ["normalize"]),
    ],
    ids=str,
)
def test_impossible_mixtures_are_refused(arguments, words):
    with refused(ValueError, *words):
        build(**arguments)


HIDDEN, EXPERTS = 5, 12
NEMOTRON = {
    "hidden_size": D_MODEL,
    "layers_block_type": ["moe"],
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": HIDDEN,
    "moe_shared_expert_intermediate_size": 6,
    "routed_scaling_factor": 2.5,
}
QWEN = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": 7,
}
KIMI = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": 3,
    "moe_intermediate_size": HIDDEN,
    "num_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "num_expert_group": 3,
    "topk_group": 2,
}
RELU2 = {**SIGMOID, "activation": "relu2", "shared_hidden": 6}
QWEN_OURS = {"shared_hidden": 7, "shared_gate": True}
STOCK = {
    "nemotron_h": ("nemotron_h", "NemotronHConfig", "NemotronHMoE", NEMOTRON, RELU2),
    "nemotron_h latent": (
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHMoE",
        {**NEMOTRON, "moe_latent_size": 10, "n_group": 2, "topk_group": 1, "mlp_bias": True},
        {**RELU2, "latent": 10, "expert_groups": 2, "bias": True},
    ),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextSparseMoeBlock", QWEN, QWEN_OURS),
    "qwen3_next raw": (
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextSparseMoeBlock",
        {**QWEN, "norm_topk_prob": False},
        {**QWEN_OURS, "normalize": False},
    ),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock", QWEN, QWEN_OURS),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearMoE",
        KIMI,
        {**SIGMOID, "shared_hidden": 2 * HIDDEN, "expert_groups": 3, "top_groups": 2},
    ),
}


def stock_of(layer: nn.Module, family: str, config_name: str, module_name: str, settings: dict) -> nn.Module:
    configs = pytest.importorskip(f"transformers.models.{family}.configuration_{family}")
    modules = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    settings = {**settings, "experts_implementation": "eager"}
    module = getattr(modules, module_name)(getattr(configs, config_name)(**settings)).to(DEVICE)
    values = {key: value.detach().clone() for key, value in layer.state_dict().items()}
    if hasattr(module, "shared_experts"):
        values = {key.replace("shared_expert.", "shared_experts."): value for key, value in values.items()}
    module.to(next(layer.parameters()).dtype).load_state_dict(values)
    return module.eval()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_a_mixture_with_the_weights_of_transformers_equals_it(stock):
    *names, options = stock
    layer, x = build(**options), draw(2, 2, 40, D_MODEL)
    exact = oracle(layer, x)
    single = copy.deepcopy(layer).float()
    with torch.no_grad():
        ours, theirs = single(x.float()), stock_of(single, *names)(x.float())
        allowed = e32(oracle(single, x.float()), exact)
        assert_e64(layer(x), exact, "ours against the loop")
        assert_e32(ours, exact, allowed, "ours in fp32 against the loop")
        assert_e32(theirs, exact, allowed, "theirs in fp32 against the loop")
        # transformers routes in fp32 whatever the dtype, so its fp64 differs by what fp32 makes of the weights
        assert_e32(stock_of(layer, *names)(x), exact, allowed, "theirs in fp64 against the loop")
