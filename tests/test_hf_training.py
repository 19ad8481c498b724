"""A patched model learns what the unpatched one learns, with a fresh cache or without, and never through a used one."""

import pytest
import torch
from budgets import assert_e16, assert_e32, e32
from hf_models import FAMILIES, prompts

from replayssm import hf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def gradients(model, checkpointing=False, **options):
    """Of every parameter, from the loss of a left-padded batch."""
    batch = prompts(20, 17)
    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    output = model(**batch, labels=labels, **options)
    output.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, output


def assert_same_gradients(got, exact, plain):
    """As wrong as stock in fp32 may be, for each parameter and its share of the whole."""
    assert got.keys() == exact.keys()
    floor = e32(torch.cat([plain[n].double().flatten() for n in exact]), torch.cat([exact[n].flatten() for n in exact]))
    for name, gradient in got.items():
        assert_e32(gradient, exact[name], max(e32(plain[name], exact[name]), floor), f"gradient of {name}")


def test_gradients_are_those_of_the_unpatched_model_with_a_cache_and_without(family):
    model, plain = family.build(), family.build(dtype=torch.float32)
    exact, rough = gradients(model, use_cache=False)[0], gradients(plain, use_cache=False)[0]
    hf.patch(model)
    assert_same_gradients(gradients(model, use_cache=False)[0], exact, rough)
    assert_same_gradients(gradients(model)[0], exact, rough)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1"])
def test_gradient_checkpointing_changes_no_gradient(name):
    model = FAMILIES[name].build()
    hf.patch(model)
    plain = gradients(model)[0]
    again = gradients(model, checkpointing=True)[0]
    for parameter, gradient in plain.items():
        torch.testing.assert_close(again[parameter], gradient, msg=parameter)


@pytest.mark.parametrize("name", ["nemotron_h", "mamba2", "qwen3_5", "kimi_linear", "zamba2"])
@pytest.mark.parametrize("length", [3, 20])
def test_a_forward_with_gradients_leaves_its_state_without_a_graph_in_the_cache(name, length):
    model = FAMILIES[name].build()
    hf.patch(model, window=8, step_tokens=4)
    key = "cache_params" if name == "mamba2" else "past_key_values"
    ids = prompts(length + 2)["input_ids"]
    output = model(ids[:, :length], use_cache=True)
    cache = next(output[name] for name in ("cache", "past_key_values", "cache_params") if name in output)
    entries = [layer for layer in cache.layers if hasattr(layer, "replay") and layer.replay is not None]
    assert len(entries) == FAMILIES[name].mixers
    for entry in entries:
        assert not any(tensor.requires_grad for tensor in entry.replay.tensors().values())
        assert entry.replay.flushed.tolist() == entry.replay.seqlen.tolist() == [length]
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        model(ids[:, length:], **{key: cache})
    output.logits.sum().backward()  # the refused call has changed nothing that the graph needs


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_a_cache_that_training_began_can_be_decoded_from(name):
    model = FAMILIES[name].build()
    hf.patch(model, window=8, step_tokens=4)
    key = "cache_params" if name == "mamba2" else "past_key_values"
    ids = prompts(9)["input_ids"]
    output = model(ids[:, :7], use_cache=True)
    cache = next(output[name] for name in ("cache", "past_key_values", "cache_params") if name in output)
    with torch.no_grad():
        got = model(ids[:, 7:], **{key: cache}).logits
        exact = model(ids, use_cache=False).logits[:, 7:]
        plain = FAMILIES[name].build(dtype=torch.float32)(ids, use_cache=False).logits[:, 7:]
    assert_e32(got, exact, e32(plain, exact), "logits after the cache")


def test_decoding_between_two_steps_of_training_changes_no_gradient():
    model = FAMILIES["qwen3_5"].build()
    hf.patch(model)
    before = gradients(model)[0]
    model.generate(**prompts(4, 6), max_new_tokens=5, do_sample=False)
    after = gradients(model)[0]
    for name, gradient in before.items():
        assert torch.equal(after[name], gradient), name


def test_autocast_trains_and_generates():
    model = FAMILIES["qwen3_5"].build(dtype=torch.float32)
    hf.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, output = gradients(model)
        assert model.eval().generate(**prompts(4, 6), max_new_tokens=5, do_sample=False).shape == (2, 11)
    assert output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "glm5_next", "bailing_hybrid"])
def test_a_model_in_bf16_is_as_near_to_fp64_as_the_unpatched_one(name):
    exact_model, model = FAMILIES[name].build(), FAMILIES[name].build(dtype=torch.bfloat16)
    ids = prompts(24)["input_ids"]
    with torch.no_grad():
        exact, stock = exact_model(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        hf.patch(model, window=8, step_tokens=4)
        output = model(ids[:, :20], use_cache=True)
        cache = output.cache if "cache" in output else output.past_key_values
        pieces = [model(part, past_key_values=cache).logits for part in ids[:, 20:].split(1, dim=1)]
    assert_e16(torch.cat([output.logits, *pieces], dim=1), stock, exact, "logits")
