"""A patched model says what the unpatched one says, in every way of generating that transformers has for it."""

import copy

import pytest
import torch
from budgets import assert_e32, e32
from hf_models import FAMILIES, PAD, VOCAB, assert_same_tokens, prompts

from replayssm import hf

NEW_TOKENS = 64
REPEATED = torch.tensor([[5, 9, 13, 5, 9, 13, 5, 9, 13, 5, 9]])
SPECULATIVE = ("nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1", "zamba2")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that the other release needs


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def logits_of(model, batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]


def test_greedy_tokens_of_a_left_padded_batch_are_those_of_the_unpatched_model(family):
    model, batch = family.build(), prompts(7, 12, 4)
    stock = model.generate(
        **batch, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    exact = logits_of(model, batch)
    allowed = e32(logits_of(family.build(dtype=torch.float32), batch), exact)
    report = hf.patch(model, window=8, step_tokens=4)
    assert len(report.replaced) == family.mixers
    assert_e32(logits_of(model, batch), exact, allowed, "logits")
    got = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert_same_tokens(got, stock, prompt=12, allowed=allowed)
    assert got[:, 12:].unique().numel() > 10, "so few different tokens tell little"


@pytest.mark.parametrize("lengths", [(9,), (5, 9)], ids=["one row", "left-padded"])
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1"])
def test_beam_search_is_that_of_the_unpatched_model_and_of_one_without_a_cache(name, lengths):
    model, batch = FAMILIES[name].build(), prompts(*lengths)
    search = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    stock = model.generate(**batch, **search)
    hf.patch(model, window=8, step_tokens=4)
    assert torch.equal(model.generate(**batch, **search), stock)
    if name != "mamba2":  # its stock model has no beams without a cache
        assert torch.equal(model.generate(**batch, **search, use_cache=False), stock)


def test_samples_of_a_seed_are_those_of_the_unpatched_model(family):
    model, batch = family.build(), prompts(3, 8)

    def sample():
        torch.manual_seed(7)
        return model.generate(**batch, max_new_tokens=20, do_sample=True, top_k=20, num_return_sequences=2)

    stock = sample()
    hf.patch(model, window=8, step_tokens=4)
    assert torch.equal(sample(), stock)


@pytest.mark.parametrize("window", [0, 8, "auto"])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear"])
def test_any_window_gives_the_same_tokens(name, window):
    model, batch = FAMILIES[name].build(), prompts(1, 3)
    stock = model.generate(**batch, max_new_tokens=24, do_sample=False)
    hf.patch(model, window=window, step_tokens=2)
    assert torch.equal(model.generate(**batch, max_new_tokens=24, do_sample=False), stock)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "zamba2"])
def test_a_second_turn_on_the_kept_cache_continues_the_first(name):
    model, second = FAMILIES[name].build(), prompts(6, seed=2)["input_ids"]
    turns = {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True}

    def two_turns():
        first = model.generate(**prompts(9), **turns)
        cache = first.cache if "cache" in first else first.past_key_values
        name = "cache" if "cache" in first else "past_key_values"
        ids = torch.cat([first.sequences, second], dim=1)
        return model.generate(ids, **turns, **{name: cache}).sequences

    stock = two_turns()
    hf.patch(model, window=8, step_tokens=4)
    assert torch.equal(two_turns(), stock)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1"])
def test_a_prompt_in_chunks_gives_the_same_tokens(name):
    model, batch = FAMILIES[name].build(), prompts(13)
    hf.patch(model, window=8, step_tokens=2)
    whole = model.generate(**batch, max_new_tokens=16, do_sample=False)
    chunked = model.generate(**batch, max_new_tokens=16, do_sample=False, prefill_chunk_size=4)
    assert torch.equal(chunked, whole)


class Drafts:
    """Counts what a model's verifications keep and take back, by the calls of its cache."""

    def __init__(self, monkeypatch):
        from transformers.cache_utils import Cache

        self.rejected, crop = 0, Cache.crop

        def counted(cache, tokens_to_remove):
            self.rejected -= tokens_to_remove
            crop(cache, tokens_to_remove)

        monkeypatch.setattr(Cache, "crop", counted)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup_gives_the_greedy_tokens(name, monkeypatch):
    model = FAMILIES[name].build()
    greedy = model.generate(REPEATED, max_new_tokens=NEW_TOKENS, do_sample=False)
    report = hf.patch(model, window=5, step_tokens=5)
    lookup = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "prompt_lookup_num_tokens": 4}
    if report.left or not keeps_cache_for_assistance(model):
        with pytest.raises((ValueError, RuntimeError), match=r"stateful|cache"):
            model.generate(REPEATED, **lookup)
        return
    drafts = Drafts(monkeypatch)
    assert torch.equal(model.generate(REPEATED, **lookup), greedy)
    assert drafts.rejected >= 20, f"only {drafts.rejected} drafts were taken back"


def keeps_cache_for_assistance(model):
    """Older releases of transformers look for a cache under one name only, and Mamba-2 has another."""
    from inspect import signature

    names = signature(model.forward).parameters
    return "cache" in names or "past_key_values" in names


@pytest.mark.parametrize("window", [8, 16])
@pytest.mark.parametrize("name", SPECULATIVE)
def test_an_assistant_model_that_replays_too_gives_the_greedy_tokens(name, window, monkeypatch):
    model, assistant = FAMILIES[name].build(), FAMILIES[name].build()
    greedy = model.generate(REPEATED, max_new_tokens=NEW_TOKENS, do_sample=False)
    torch.manual_seed(1)
    for parameter in assistant.parameters():  # as good as its drafts are often kept and often not
        parameter.data += 0.05 * torch.randn_like(parameter) * parameter.data.abs().mean()
    if hf.patch(model, window=window, step_tokens=6).left:
        pytest.skip("this release of transformers cannot roll this family back")
    hf.patch(assistant, window=window, step_tokens=6)
    drafts = Drafts(monkeypatch)
    got = model.generate(
        REPEATED,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=assistant,
        num_assistant_tokens=4,
        assistant_confidence_threshold=0.0,
    )
    assert torch.equal(got, greedy)
    assert drafts.rejected >= 20, f"only {drafts.rejected} drafts were taken back"


def test_a_llama_can_assist_a_patched_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    assistant = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=None, **sizes)).double()
    model = FAMILIES["qwen3_5"].build()
    greedy = model.generate(REPEATED, max_new_tokens=30, do_sample=False)
    hf.patch(model)
    drafts = {"assistant_model": assistant, "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    assert torch.equal(model.generate(REPEATED, max_new_tokens=30, do_sample=False, **drafts), greedy)


def test_a_turn_after_assisted_generation_continues_its_cache():
    model, second = FAMILIES["qwen3_5"].build(), prompts(20, seed=2)["input_ids"]
    turns = {"do_sample": False, "max_new_tokens": 12}
    first = model.generate(REPEATED, **turns)
    stock = model.generate(torch.cat([first, second], dim=1), **turns)
    hf.patch(model, window=5, step_tokens=5)
    turn = model.generate(REPEATED, **turns, prompt_lookup_num_tokens=4, return_dict_in_generate=True)
    name = "cache" if "cache" in turn else "past_key_values"
    ids = torch.cat([turn.sequences, second], dim=1)
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        cache = copy.deepcopy(turn[name])
        assert torch.equal(model.generate(ids, **turns, **options, **{name: cache}), stock)
