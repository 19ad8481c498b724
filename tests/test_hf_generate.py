"""A patched model says what the unpatched one says, in every way of generating that transformers has for it."""

import copy

import pytest
import torch
from budgets import FORMAT_ERROR, SLACK32, assert_e32, assert_e32_part, e32, rms
from hf_models import FAMILIES, LATEST, PAD, VOCAB, assert_same_tokens, prompts

from replayssm import hf

NEW_TOKENS, DRAFTED = 64, 48
REPEATED = torch.tensor([[5, 9, 13, 5, 9, 13, 5, 9, 13, 5, 9]])
# of three tokens, an untrained model repeats itself often enough for drafts from its own text
OF_THREE = {"do_sample": False, "suppress_tokens": [token for token in range(VOCAB) if token not in (5, 9, 13)]}
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


@pytest.mark.parametrize(("checkpoint", "read_format"), [("fp32", "int8"), ("bf16_sr", None), ("int16_sr", "bf16")])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1"])
def test_states_are_stored_and_read_in_the_formats_that_were_asked_for(name, checkpoint, read_format):
    model, ids = FAMILIES[name].build(), prompts(30)["input_ids"]
    hf.patch(model, window=4, step_tokens=2, checkpoint=checkpoint, read_format=read_format)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[:, 10:]
        output = model(ids[:, :10], use_cache=True)
        cache = output.cache if "cache" in output else output.past_key_values
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids[:, 10:].split(1, dim=1)], dim=1)
    formats = [name for name in (checkpoint, read_format) if name in FORMAT_ERROR]
    error = rms(got - exact) / rms(exact)
    assert 0 < error <= SLACK32 * sum(FORMAT_ERROR[name][1] for name in formats) / 100, f"{error:.1e}"
    assert [entry.replay[0].index for entry in cache.layers if hasattr(entry, "replay")][-1] > 0
    model.generate(**prompts(4, 6), num_beams=2, max_new_tokens=8)


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize(
    ("name", "limits"), [("nemotron_h", {"time_step_min": 0.4}), ("bamba", {"time_step_limit": (0.3, 0.6)})]
)
def test_limits_of_dt_hold_in_a_prompt_of_any_length_and_in_no_step(name, limits, length):
    model, batch = FAMILIES[name].build(**limits), prompts(length)
    run = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    stock = model.generate(**batch, **run)
    plain = FAMILIES[name].build(dtype=torch.float32, **limits)
    allowed = e32(logits_of(plain, batch), logits_of(model, batch))
    hf.patch(model, window=8, step_tokens=4)
    ours = model.generate(**batch, **run)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_e32_part(torch.stack(ours.logits), torch.stack(stock.logits), allowed, "logits")


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
    """Counts the tokens that a run of a model keeps of its drafts, and takes back."""

    def __init__(self, model, monkeypatch):
        from transformers.cache_utils import Cache

        self.rejected, self.forwards, crop = 0, 0, Cache.crop

        def counted(cache, tokens_to_remove):
            self.rejected -= tokens_to_remove
            crop(cache, tokens_to_remove)

        def forward(*args):
            self.forwards += 1

        monkeypatch.setattr(Cache, "crop", counted)
        model.register_forward_hook(forward)

    def check(self, new_tokens):
        accepted = new_tokens - self.forwards  # a forward gives one token beside the drafts that it accepts
        assert self.rejected >= 20, f"only {self.rejected} drafts were taken back"
        assert accepted >= 2, f"only {accepted} drafts were accepted"


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup_gives_the_greedy_tokens(name, monkeypatch):
    model = FAMILIES[name].build()
    greedy = model.generate(REPEATED, max_new_tokens=DRAFTED, **OF_THREE)
    report = hf.patch(model, window=5, step_tokens=5)
    lookup = {"max_new_tokens": DRAFTED, "prompt_lookup_num_tokens": 4, **OF_THREE}
    if report.left or not keeps_cache_for_assistance(model):
        with pytest.raises((ValueError, RuntimeError), match=r"stateful|cache"):
            model.generate(REPEATED, **lookup)
        return
    drafts = Drafts(model, monkeypatch)
    assert torch.equal(model.generate(REPEATED, **lookup), greedy)
    drafts.check(DRAFTED)


def keeps_cache_for_assistance(model):
    """Older releases of transformers look for a cache under one name only, and Mamba-2 has another."""
    from inspect import signature

    names = signature(model.forward).parameters
    return "cache" in names or "past_key_values" in names


@pytest.mark.parametrize(("name", "window"), list(zip(SPECULATIVE, (0, 6, 8, 16, 9), strict=True)))
def test_an_assistant_model_that_replays_too_gives_the_greedy_tokens(name, window, monkeypatch):
    model, assistant = FAMILIES[name].build(), FAMILIES[name].build()
    greedy = model.generate(REPEATED, max_new_tokens=DRAFTED, do_sample=False)
    torch.manual_seed(1)
    for parameter in assistant.parameters():  # as good as its drafts are often kept and often not
        parameter.data += 0.07 * torch.randn_like(parameter) * parameter.data.abs().mean()
    if hf.patch(model, window=window, step_tokens=6).left:
        pytest.skip("this release of transformers cannot roll this family back")
    hf.patch(assistant, window=window, step_tokens=6)
    drafts = Drafts(model, monkeypatch)
    got = model.generate(
        REPEATED,
        max_new_tokens=DRAFTED,
        do_sample=False,
        assistant_model=assistant,
        num_assistant_tokens=4,
        assistant_confidence_threshold=0.0,
    )
    assert torch.equal(got, greedy)
    drafts.check(DRAFTED)


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


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("layers", [1, 2])
def test_an_early_exit_gives_the_greedy_tokens_or_leaves_the_model_as_it_was(name, layers):
    """Its drafts come from the first layers, over a cache of their own, which transformers cannot always make."""
    model = FAMILIES[name].build()
    greedy = model.generate(REPEATED, max_new_tokens=12, do_sample=False)
    hf.patch(model)
    number = model.config.num_hidden_layers
    try:
        early = model.generate(REPEATED, max_new_tokens=12, do_sample=False, assistant_early_exit=layers)
    except (ValueError, IndexError, TypeError):
        early = greedy
    assert torch.equal(early, greedy)
    assert model.config.num_hidden_layers == number
    assert torch.equal(model.generate(REPEATED, max_new_tokens=12, do_sample=False), greedy)


def test_a_turn_after_assisted_generation_continues_its_cache():
    model, second = FAMILIES["qwen3_5"].build(), prompts(20, seed=2)["input_ids"]
    turns = {"do_sample": False, "max_new_tokens": 12}
    first = model.generate(REPEATED, **turns)
    stock = model.generate(torch.cat([first, second], dim=1), **turns)
    hf.patch(model, window=5, step_tokens=5)
    turn = model.generate(REPEATED, **turns, prompt_lookup_num_tokens=4, return_dict_in_generate=True)
    name = "cache" if "cache" in turn else "past_key_values"
    ids = torch.cat([turn.sequences, second], dim=1)
    assisted = [{"prompt_lookup_num_tokens": 4}] if LATEST else []  # 5.17 feeds a kept cache the whole text again
    for options in [{}, *assisted]:
        cache = copy.deepcopy(turn[name])
        assert torch.equal(model.generate(ids, **turns, **options, **{name: cache}), stock)


@pytest.mark.parametrize("option", ["assistant_model", "prefill_chunk_size"])
def test_a_model_without_attention_still_cannot_tell_transformers_a_length(option):
    """Documented in README's limits and at hf.patch: where a release can, both say so no longer."""
    model, value = FAMILIES["mamba2"].build(), 4
    hf.patch(model)
    if option == "assistant_model":
        value = FAMILIES["mamba2"].build()
        hf.patch(value)
    said = "get_seq_length" if LATEST else "(requires|without) a cache"
    with pytest.raises((ValueError, RuntimeError), match=said):
        model.generate(**prompts(9), max_new_tokens=6, do_sample=False, **{option: value})
