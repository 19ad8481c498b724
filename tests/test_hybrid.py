"""HybridLM: blocks, configs, and whole models decoding through a cache. RC-01, RC-03, RC-04, RC-33a, RC-36, RC-39."""

import copy

import oracles
import pytest
import torch
import torch.nn.functional as F
from budgets import assert_e64, assert_same_bits
from draws import DEVICE, on_the_host
from hybrids import (
    ALL,
    ATTENTION,
    GATED_DELTANET,
    KDA,
    MAMBA2,
    MLA,
    MLP,
    VOCAB,
    WINDOWED,
    build,
    config,
    feed,
    greedy,
    poison_dead_kv,
    token_ids,
)
from hypothesis import given
from hypothesis import strategies as st
from oracles import linear, rms_norm, silu
from refusals import assert_unchanged, refused, snapshot
from test_attention import oracle as attention_oracle
from test_mla import oracle as mla_oracle
from test_moe import oracle as moe_oracle
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from replayssm import ReplayStateCache
from replayssm.models import HybridLM

MOE = {"type": "moe", "hidden": 7, "num_experts": 5, "top_k": 2}
ONE_OF_EACH = [
    MAMBA2,
    GATED_DELTANET,
    KDA,
    ATTENTION,
    WINDOWED,
    MLA,
    MOE,
    MLP,
    {**MLP, "activation": "relu2", "bias": True},
]


def block_oracle(kind: str, mixer: torch.nn.Module, x: Tensor) -> Tensor:
    """What one mixer makes of x (batch, t, d_model), without the library."""
    if kind == "attention":
        return torch.stack([attention_oracle(mixer, row) for row in x])
    if kind == "mla":
        return torch.stack([mla_oracle(mixer, row) for row in x])
    if kind == "moe":
        return moe_oracle(mixer, x)
    if kind == "mlp":
        up = linear(x, mixer.up_proj)
        hidden = silu(linear(x, mixer.gate_proj)) * up if mixer.activation == "swiglu" else up.clamp(min=0) ** 2
        return linear(hidden, mixer.down_proj)
    sizes = (mixer.nheads, mixer.headdim, mixer.d_state)
    options = {"lower_bound": -5.0} if kind == "kda" else {"ngroups": 2}
    return getattr(oracles, kind)(mixer, x, *sizes, **options)[1].output


@torch.no_grad()
def model_oracle(model: HybridLM, ids: Tensor) -> Tensor:
    x = model.embed.weight[ids]
    for entry, block in zip(model.config["layers"], model.layers, strict=True):
        x = x + block_oracle(entry["type"], block.mixer, rms_norm(x, block.norm.weight, 1e-5))
    return linear(rms_norm(x, model.norm.weight, 1e-5), model.lm_head)


@pytest.mark.parametrize("entry", ONE_OF_EACH, ids=str)
def test_a_model_of_one_block_equals_its_oracle_with_and_without_a_cache(entry):
    model, ids = build(config(entry)), token_ids(2, 14)
    exact = model_oracle(model, ids)
    assert_e64(model(ids).detach(), exact, "without a cache")
    cache = ReplayStateCache(model, 2, window=4, step_tokens=3, max_seqlen=14)
    assert_e64(feed(model, cache, ids, [5, 1, 1, 3, 1, 2, 1]), exact, "with a cache")
    assert cache.seqlen.tolist() == [14, 14]


def test_a_hybrid_equals_its_oracle():
    model, ids = build(config(*ALL)), token_ids(2, 11)
    assert_e64(model(ids).detach(), model_oracle(model, ids))


@given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    window=st.sampled_from([0, 3, 4, 7, 16]),
    step_tokens=st.integers(1, 3),
)
def test_any_split_into_steps_equals_one_call(pieces, window, step_tokens):
    model, ids = build(config(*ALL)), token_ids(2, sum(pieces))
    cache = ReplayStateCache(model, 2, window=window, step_tokens=step_tokens, max_seqlen=sum(pieces))
    assert_e64(feed(model, cache, ids, pieces), model(ids).detach())


@given(kept=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_rejected_drafts_leave_no_trace(kept):
    model, ids = build(config(*ALL)), token_ids(2, 4 + 3 * len(kept) + 1)
    cache = ReplayStateCache(model, 2, window=4, step_tokens=3, max_seqlen=60)
    feed(model, cache, ids[:, :4], [4])
    done = torch.tensor([4, 4], device=DEVICE)
    for counts in kept:
        tokens = torch.stack([ids[row, n : n + 3] for row, n in enumerate(done.tolist())])
        n = torch.tensor(counts, device=DEVICE)
        wrong = torch.arange(3, device=DEVICE) >= n.unsqueeze(1)
        with torch.no_grad():
            model(torch.where(wrong, (tokens + 7) % VOCAB, tokens), cache)
        cache.commit(n)
        done += n
        poison_dead_kv(cache)
    last = torch.stack([ids[row, n] for row, n in enumerate(done.tolist())]).unsqueeze(1)
    with torch.no_grad():
        y = model(last, cache)
        for row, n in enumerate(done.tolist()):
            assert_e64(y[row], model(ids[row : row + 1, : n + 1])[0, -1:], f"row {row}")


def ragged(prompts: list[Tensor], pad: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """Prompts of different length as one batch, and its mask."""
    longest = max(len(prompt) for prompt in prompts)
    gaps = [(longest - len(p), 0) if side == "left" else (0, longest - len(p)) for p in prompts]
    ids = torch.stack([F.pad(p, gap, value=pad) for p, gap in zip(prompts, gaps, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(p), gap) for p, gap in zip(prompts, gaps, strict=True)])
    return ids, mask


def continued(model: HybridLM, prompts: list[Tensor], pad: int) -> tuple[Tensor, Tensor, Tensor, ReplayStateCache]:
    """RC-01: prefill a left-padded batch, then 20 greedy steps."""
    ids, mask = ragged(prompts, pad)
    cache = ReplayStateCache(model, len(prompts), window=4, max_seqlen=32)
    with torch.no_grad():
        first = model(ids, cache, attention_mask=mask)[:, -1]
    cache.commit()
    tokens, logits = greedy(model, cache, first, 20)
    return first, tokens, logits, cache


@pytest.mark.parametrize("pad", [0, 5])
def test_a_padded_prompt_generates_what_it_generates_alone(pad):
    model = build(config(MAMBA2, GATED_DELTANET, KDA, ATTENTION, WINDOWED))
    prompts = [token_ids(1, n, seed=n)[0] for n in (12, 7, 1)]
    together = continued(model, prompts, pad)
    swapped = continued(model, prompts[::-1], pad)
    for row, prompt in enumerate(prompts):
        alone = continued(model, [prompt], pad)
        for batch, place in ((together, row), (swapped, 2 - row)):
            assert_e64(batch[0][place], alone[0][0], "logits of the prompt")
            assert torch.equal(batch[1][place], alone[1][0])
            assert_e64(batch[2][place], alone[2][0], "logits of the steps")
            for i in range(3):
                assert_e64(batch[3][i].state()[place], alone[3][i].state()[0], f"state {i}")
                if len(prompt) > 1:  # alone, a single token is a decode step, which flushes later
                    assert_e64(batch[3][i].checkpoint[place], alone[3][i].checkpoint[0], f"checkpoint {i}")


def test_a_padded_prompt_generates_the_same_text_in_fp32():
    model = build(config(MAMBA2, GATED_DELTANET, KDA, ATTENTION), dtype=torch.float32)
    prompts = [token_ids(1, n, seed=n)[0] for n in (12, 7, 1)]
    _, tokens, _, _ = continued(model, prompts, 0)
    for row, prompt in enumerate(prompts):
        first, alone, logits, _ = continued(model, [prompt], 0)
        top = torch.cat([first.unsqueeze(1), logits[:, :-1]], 1)[0].topk(2).values
        for step in range(20):
            if top[step, 0] - top[step, 1] <= 1e-4:
                break  # a tie that rounding may turn; the texts may part here
            assert tokens[row, step] == alone[0, step]


def test_a_padded_second_turn_equals_the_row_alone():
    model, ids = build(config(*ALL)), token_ids(2, 15)
    lengths = [11, 8]
    cache = ReplayStateCache(model, 2, window=4, max_seqlen=32)
    feed(model, cache, ids[:, :6], [6])
    turn, mask = ragged([ids[0, 6:11], ids[1, 6:8]], pad=9)
    with torch.no_grad():
        outputs = model(turn, cache, attention_mask=mask)
        cache.commit()
        assert cache.seqlen.tolist() == lengths
        steps = torch.stack([ids[row, n : n + 4] for row, n in enumerate(lengths)])
        logits = feed(model, cache, steps, [1, 1, 1, 1])
        for row, n in enumerate(lengths):
            alone = model(ids[row : row + 1, : n + 4])[0]
            assert_e64(outputs[row, mask[row] == 1], alone[6:n], f"second turn of row {row}")
            assert_e64(logits[row], alone[n:], f"steps of row {row}")


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_at_masked_places_changes_nothing(side):
    model = build(config(*ALL))
    prompts = [token_ids(1, n, seed=n)[0] for n in (7, 12)]
    results = []
    for pad, poison in ((0, 0.0), (VOCAB - 1, float("nan"))):
        with torch.no_grad():
            model.embed.weight[VOCAB - 1] = poison
        ids, mask = ragged([prompt % (VOCAB - 1) for prompt in prompts], pad, side)
        cache = ReplayStateCache(model, 2, window=4, max_seqlen=32)
        with torch.no_grad():
            y = model(ids, cache, attention_mask=mask)
        cache.commit()
        assert cache.seqlen.tolist() == [7, 12]
        steps = feed(model, cache, ids[:, :1] * 0 + 3, [1])
        results.append((y[mask == 1], steps))
        alone = model(torch.cat([prompts[0] % (VOCAB - 1), ids.new_tensor([3])]).unsqueeze(0)).detach()[0]
        assert_e64(torch.cat([y[0, mask[0] == 1], steps[0]]), alone)
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def test_training_with_a_mask_equals_each_row_alone():
    model = build(config(*ALL))
    prompts = [token_ids(1, n, seed=n)[0] for n in (7, 12, 1)]
    for side in ("left", "right"):
        ids, mask = ragged(prompts, 4, side)
        y = model(ids, attention_mask=mask).detach()
        for row, prompt in enumerate(prompts):
            assert_e64(y[row, mask[row] == 1], model(prompt.unsqueeze(0)).detach()[0], f"row {row}")


def test_rows_name_the_sequences_of_a_call():
    model, ids = build(config(*ALL)), token_ids(4, 9)
    cache = ReplayStateCache(model, 4, window=4, max_seqlen=32)
    feed(model, cache, ids[:, :6], [6])
    rows = torch.tensor([3, -1, 1], device=DEVICE)
    with torch.no_grad():
        for column in (6, 7, 8):
            y = model(ids[[3, 0, 1], column : column + 1], cache, rows=rows)
            cache.commit()
        assert cache.seqlen.tolist() == [6, 9, 6, 9]
        assert_e64(y[[0, 2]], model(ids[[3, 1]])[:, -1:])
        y = model(ids[[0, 2], 6:7], cache, rows=torch.tensor([0, 2], device=DEVICE))
        assert_e64(y, model(ids[[0, 2], :7])[:, -1:])


def test_the_head_is_applied_to_the_kept_columns_alone():
    model, ids = build(config(*ALL)), token_ids(2, 9)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    whole = model(ids).detach()
    for keep in (1, 4, 9):
        assert_e64(model(ids, logits_to_keep=keep).detach(), whole[:, -keep:])
    assert seen == [9, 1, 4, 9]


def test_a_model_without_stateful_modules_takes_steps_too():
    model, ids = build(config(MLP)), token_ids(2, 5)
    cache = ReplayStateCache(model, 2)
    assert_e64(feed(model, cache, ids, [3, 1, 1]), model(ids).detach())
    assert cache.seqlen.tolist() == [5, 5]
    with torch.no_grad():
        model(ids, cache)
        with pytest.raises(RuntimeError, match="commit"):
            model(ids, cache)


def test_a_step_under_gradients_is_refused_before_any_module_is_called():
    model, ids = build(config(*ALL)), token_ids(2, 3)
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)  # the first module alone would let the step pass
    model.embed.weight.requires_grad_(False)
    cache = ReplayStateCache(model, 2, max_seqlen=9)
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(ids, cache)
    assert_unchanged(cache, before)
    feed(model, cache, ids, [3])


@on_the_host
def test_bad_calls_are_refused_and_change_nothing():
    model, ids = build(config(*ALL)), token_ids(2, 3)
    cache = ReplayStateCache(model, 2, max_seqlen=20)
    feed(model, cache, ids, [3])
    bad = {
        "ids must be (batch, t)": lambda: model(ids[0], cache),
        "at least 1 column": lambda: model(ids[:, :0], cache),
        "must hold integers": lambda: model(ids.float(), cache),
        f"vocab_size - 1 = {VOCAB - 1}; got {VOCAB} to": lambda: model(ids.clamp(min=VOCAB), cache),
        "got -1": lambda: model(ids * 0 - 1, cache),
        "device": lambda: model(ids.to("meta"), cache),
        "logits_to_keep": lambda: model(ids, cache, logits_to_keep=4),
        "between 0 (all) and t=3; got -1": lambda: model(ids, cache, logits_to_keep=-1),
        "without a cache": lambda: model(ids, rows=torch.tensor([0, 1], device=DEVICE)),
        "cache": lambda: model(token_ids(3, 2), cache),
        "attention_mask": lambda: model(ids, cache, attention_mask=torch.ones(2, 2, device=DEVICE)),
        "left padding": lambda: model(ids, cache, attention_mask=torch.tensor([[1, 0, 1]] * 2, device=DEVICE)),
        "must be -1 or distinct cache rows": lambda: model(ids, cache, rows=torch.tensor([0, 2], device=DEVICE)),
        "max_seqlen=20": lambda: model(token_ids(2, 18), cache),
    }
    for words, call in bad.items():
        with refused(ValueError, words, cache=cache):
            call()
    with refused(ValueError, "model", cache=cache):
        build(config(*ALL))(ids, cache)
    with refused(ValueError, "parents must", "step_tokens=1", cache=cache):
        model(ids, cache, parents=torch.zeros(3, dtype=torch.int64))
    assert_e64(feed(model, cache, ids, [1, 2]), model(torch.cat([ids, ids], 1)).detach()[:, 3:])


BAD_CONFIGS = [
    ({"hidden_size": 24}, "config", "'hidden_size'", "vocab_size"),
    ({"norm_eps": None}, "norm_eps", "1e-5"),
    ({"norm_eps": 0}, "norm_eps"),
    ({"embed_scale": 0}, "embed_scale"),
    ({"residual_scale": "1"}, "residual_scale"),
    ({"logits_divisor": -1.0}, "logits_divisor"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": "61"}, "vocab_size"),
    ({"d_model": 2.0}, "d_model"),
    ({"tie_embeddings": "no"}, "tie_embeddings"),
    ({"model_type": "qwen3_5"}, "model_type", "replayssm_hybrid"),
    ({"dtype": "int8"}, "dtype", "bfloat16"),
    ({"tokenizer": "bpe"}, "tokenizer", "bytes"),
    ({"tokenizer": "bytes"}, "vocab_size", "256"),
    ({"layers": []}, "layers"),
    ({"layers": "mlp"}, "layers"),
    ({"layers": [MLP, ["mlp"]]}, "layers[1]", "mamba2"),
    ({"layers": [{"type": "lstm"}]}, "layers[0]", "lstm", "attention"),
    ({"layers": [{"type": ["mlp"]}]}, "layers[0]"),
    ({"layers": [{"hidden": 3}]}, "layers[0]", "type"),
    ({"layers": [MLP, {**KDA, "allow_neg_eigval": True}]}, "layers[1]", "kda", "'allow_neg_eigval'", "neg_eigval"),
    ({"layers": [{**MAMBA2, "d_model": 24}]}, "layers[0]", "d_model", "ngroups"),
    ({"layers": [{**MLP, "device": "cpu"}]}, "layers[0]", "device"),
    ({"layers": [{"type": "mamba2", "nheads": 6, "headdim": 5}]}, "layers[0]", "no 'd_state'"),
    ({"layers": [MLP, {**ATTENTION, "kv_heads": 5}]}, "layers[1]", "kv_heads"),
    ({"layers": [{**MLP, "activation": "gelu"}]}, "layers[0]", "activation", "relu2"),
    ({"layers": [{**MLP, "hidden": -1}]}, "layers[0]", "hidden"),
    ({"layers": [{**MLP, "bias": "no"}]}, "layers[0]", "bias"),
    ({"layers": [{**MAMBA2, "nheads": "six"}]}, "layers[0]", "nheads", "int"),
    ({"layers": [{**MAMBA2, "norm_eps": True}]}, "layers[0]", "norm_eps", "float"),
    ({"layers": [{**MAMBA2, "dt_limits": [0, "inf"]}]}, "layers[0]", "dt_limits"),
    ({"layers": [{**MAMBA2, "norm": "gate"}]}, "layers[0]", "norm", "gate_first"),
    ({"layers": [{**KDA, "lower_bound": "-5"}]}, "layers[0]", "lower_bound", "float | None"),
]


@pytest.mark.parametrize(
    ("changed", "words"), [(c[0], c[1:]) for c in BAD_CONFIGS], ids=[str(c[0]) for c in BAD_CONFIGS]
)
def test_a_config_that_is_not_understood_is_refused(changed, words):
    with refused(ValueError, *words):
        HybridLM(config(**changed))


def test_a_missing_key_is_refused():
    for key in config():
        partial = config()
        del partial[key]
        with refused(ValueError, f"no '{key}'"):
            HybridLM(partial)
    with refused(ValueError, "config"):
        HybridLM([1])


@pytest.mark.parametrize(
    ("entry", "changed"),
    [
        (MAMBA2, {"ngroups": 1}),
        (MAMBA2, {"norm": "norm_first"}),
        (MAMBA2, {"norm_eps": 0.1}),
        (MAMBA2, {"dt_limits": [0.0, 0.05]}),
        (MAMBA2, {"conv_bias": False}),
        (GATED_DELTANET, {"neg_eigval": True}),
        (KDA, {"lower_bound": None}),
        (KDA, {"lower_bound": -1.0}),
        (ATTENTION, {"kv_heads": 3}),
        (ATTENTION, {"window": 3}),
        (ATTENTION, {"rope_theta": 1e4}),
        (WINDOWED, {"rope_theta": 1e2}),
        (MLP, {"activation": "relu2"}),
    ],
    ids=str,
)
def test_every_switch_of_a_layer_is_used(entry, changed):
    ids = token_ids(1, 12)
    plain, switched = build(config(entry)), build(config({**entry, **changed}))
    known = plain.state_dict()
    fitting = {k: known[k] for k, v in switched.state_dict().items() if k in known and known[k].shape == v.shape}
    switched.load_state_dict(fitting, strict=False)
    difference = (plain(ids) - switched(ids)).abs().max()
    assert difference > 1e-3


def test_a_config_is_kept_and_not_shared():
    settings = config(*ALL)
    given_settings = copy.deepcopy(settings)
    model = HybridLM(settings)
    settings["layers"][0]["nheads"] = 99
    assert model.config == given_settings
    assert [type(block.mixer).__name__ for block in model.layers][:2] == ["ReplayMamba2", "Attention"]
    assert model.embed.weight.dtype == torch.float32
    assert HybridLM(config(dtype="bfloat16")).embed.weight.dtype == torch.bfloat16
    assert HybridLM(config(dtype="bfloat16"), dtype=torch.float64).embed.weight.dtype == torch.float64


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_built_on_meta_and_materialised_equals_one_built_in_place(tied):
    settings = config(*ALL, tie_embeddings=tied)
    torch.manual_seed(5)
    usual = HybridLM(settings)
    late = HybridLM(settings, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    usual.reset_parameters()
    torch.manual_seed(5)
    late.reset_parameters()
    assert (late.lm_head.weight is late.embed.weight) is tied
    for (name, got), expected in zip(late.named_parameters(), usual.parameters(), strict=True):
        assert_same_bits(got.detach(), expected.detach(), name)
    assert usual.layers[0].mixer.out_proj.weight.std() < HybridLM(config(MAMBA2)).layers[0].mixer.out_proj.weight.std()


def test_a_tied_head_stays_tied_through_a_training_step():
    model, ids = HybridLM(config(*ALL, tie_embeddings=True), device=DEVICE), token_ids(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 0.8 * losses[0]
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_give_equal_gradients(use_reentrant):
    model, ids = build(config(*ALL)), token_ids(2, 9)
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5], device=DEVICE)

    def gradients(recompute: bool) -> dict[str, Tensor]:
        model.zero_grad()
        x = model.embed(ids)
        for block in model.layers:
            if recompute:
                x = (
                    checkpoint(block, x, attention_mask=mask, use_reentrant=False)
                    if not use_reentrant
                    else checkpoint(lambda x, block=block: block(x, attention_mask=mask), x, use_reentrant=True)
                )
            else:
                x = block(x, attention_mask=mask)
        model.lm_head(model.norm(x))[mask == 1].square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain, recomputed = gradients(False), gradients(True)
    assert plain.keys() == recomputed.keys()
    for name in plain:
        assert_same_bits(recomputed[name], plain[name], name)


def test_every_leaf_is_called_as_a_module():
    model, ids = build(config(*ALL)), token_ids(2, 3)
    called = set()
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    for name, module in leaves.items():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.add(name))
    cache = ReplayStateCache(model, 2, max_seqlen=9)
    for call in (lambda: model(ids), lambda: feed(model, cache, ids, [2, 1])):
        called.clear()
        call()
        assert called == leaves.keys()


def test_a_compiled_model_takes_any_length():
    model = build(config(WINDOWED, MLP, ATTENTION))
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for t in (9, 5, 17, 3, 12):
        ids = token_ids(2, t)
        assert_e64(compiled(ids).detach(), model(ids).detach(), f"t={t}")
    assert len(compilations) == 2  # longer than the sliding window, and not
    compiled(ids).sum().backward()


def test_a_compiled_decode_step_is_one_graph_and_never_recompiles():
    model, ids = build(config(WINDOWED, MLP)), token_ids(2, 12)
    cache = ReplayStateCache(model, 2, window=4)
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    outputs = [feed(model, cache, ids[:, :3], [3])]
    with torch.no_grad():
        for piece in ids[:, 3:].split(1, 1):
            outputs.append(compiled(piece, cache, logits_to_keep=1))
            cache.commit()
    assert_e64(torch.cat(outputs, 1), model(ids).detach())
    assert len(compilations) == 1
