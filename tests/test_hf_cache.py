"""The cache entry of a patched mixer: any order of forwards, crops and reorderings leaves what a fresh run would."""

import copy
import pickle

import pytest
import torch
from budgets import assert_e32_part, e32
from hf_models import FAMILIES, VOCAB, prompts
from hypothesis import given
from hypothesis import strategies as st

from replayssm import hf
from replayssm.hf.cache_layer import ReplayLinearLayer
from replayssm.hf.lockstep import Lockstep

transformers = pytest.importorskip("transformers")
NAMES = ("nemotron_h", "mamba2", "qwen3_5", "kimi_linear", "falcon_h1", "zamba2")
STEP_TOKENS, WINDOW = 4, 5
_models: dict[str, object] = {}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def patched(name):
    """A model and its twin, the unpatched one; built once."""
    if name not in _models:
        model, stock = FAMILIES[name].build(), FAMILIES[name].build()
        hf.patch(model, window=WINDOW, step_tokens=STEP_TOKENS)
        ids = prompts(40)["input_ids"]
        with torch.no_grad():
            exact, plain = stock(ids).logits, FAMILIES[name].build(dtype=torch.float32)(ids).logits
        _models[name] = model, stock, e32(plain, exact)
    return _models[name]


def cache_name(model):
    return "cache_params" if "Mamba2" in type(model).__name__ else "past_key_values"


def step(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **{cache_name(model): cache}, use_cache=True, **options).logits


def fresh_cache(model):
    return transformers.DynamicCache(config=model.config.get_text_config())


def assert_continues(name, model, sequences, cache, seed=0):
    """The next logits of a cache that holds ``sequences`` are those of a run over all tokens."""
    _, stock, allowed = patched(name)
    ids = torch.randint(1, VOCAB, (len(sequences), 2), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = stock(torch.cat([sequences, ids], dim=1)).logits[:, -2:]
    assert_e32_part(step(model, ids, cache), expected, allowed, "logits after the cache")


@given(st.data())
def test_any_order_of_forwards_crops_and_reorderings_is_as_if_only_what_was_kept_had_come(data):
    name = data.draw(st.sampled_from(NAMES))
    model = patched(name)[0]
    cache, sequences = fresh_cache(model), torch.zeros(2, 0, dtype=torch.long)
    recording = verifying = False
    outstanding = 0  # tokens that may be cropped
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 8))):
        actions = ["forward", "forward", "crop", "crop", "record", "reorder", "copy", "select"]
        action = data.draw(st.sampled_from(actions if sequences.shape[1] else ["forward", "record"]))
        if action == "record":
            cache.activate_past_recording()
            recording, verifying = True, False
        elif action == "forward":
            t = data.draw(st.integers(1, STEP_TOKENS if verifying else 9))
            ids = torch.randint(1, VOCAB, (len(sequences), t), generator=generator)
            step(model, ids, cache)
            sequences = torch.cat([sequences, ids], dim=1)
            outstanding = min(STEP_TOKENS, outstanding + t) if recording else 0
        elif action == "crop" and recording:
            removed = data.draw(st.integers(0, outstanding))
            cache.crop(-removed)
            sequences, outstanding, verifying = sequences[:, : sequences.shape[1] - removed], 0, True
        elif action == "reorder":
            index = torch.tensor(data.draw(st.permutations(range(len(sequences)))))
            cache.reorder_cache(index)
            sequences, outstanding = sequences[index], 0
        elif action == "copy":
            kept, cache = cache, copy.deepcopy(cache)
            kept.reset()
            outstanding = 0
        elif action == "select" and name != "nemotron_h":  # blocks without a state have an entry that cannot
            index = torch.tensor(data.draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=3)))
            cache.batch_select_indices(index)
            sequences, outstanding = sequences[index], 0
    assert_continues(name, model, sequences, cache)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_rows_can_be_repeated_and_chosen(name):
    model = patched(name)[0]
    cache, ids = fresh_cache(model), prompts(6, 6)["input_ids"]
    step(model, ids, cache)
    cache.batch_repeat_interleave(2)
    assert_continues(name, model, ids.repeat_interleave(2, dim=0), copy.deepcopy(cache))
    chosen = torch.tensor([3, 0])
    cache.batch_select_indices(chosen)
    assert_continues(name, model, ids.repeat_interleave(2, dim=0)[chosen], cache)


def test_a_padded_second_turn_is_as_if_the_padding_were_not_there():
    model = patched("mamba2")[0]  # no positions, so that the rows alone say what is right
    cache, first, second = fresh_cache(model), prompts(6, 6)["input_ids"], prompts(5, 2, seed=2)
    step(model, first, cache)
    mask = torch.cat([torch.ones(2, 6, dtype=torch.long), second["attention_mask"]], dim=1)
    last = step(model, second["input_ids"], cache, attention_mask=mask)[:, -1]
    for row, length in enumerate((5, 2)):
        alone = torch.cat([first[row], second["input_ids"][row, -length:]]).unsqueeze(0)
        with torch.no_grad():
            expected = patched("mamba2")[1](alone).logits[:, -1]
        assert_e32_part(last[row : row + 1], expected, patched("mamba2")[2], f"row {row}")


def test_a_right_padded_batch_equals_its_rows_alone():
    model, stock, allowed = patched("mamba2")
    ids, mask = prompts(9, 9)["input_ids"], torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    cache = fresh_cache(model)
    step(model, ids, cache, attention_mask=mask)
    following = prompts(1, 1, seed=3)["input_ids"]
    got = step(model, following, cache)
    with torch.no_grad():
        expected = stock(torch.cat([ids[1:, :5], following[1:]], dim=1)).logits[:, -1:]
    assert_e32_part(got[1:], expected, allowed, "the padded row")


ORDERS = {
    "a mixer first": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mamba"]}),
    "attention first": ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
    "both in a block, the mixer first": ("falcon_h1", {}),
    "both in a block, attention first": ("zamba2", {"layers_block_type": ["hybrid", "mamba"], "num_hidden_layers": 2}),
}


@pytest.mark.parametrize(("name", "changes"), ORDERS.values(), ids=ORDERS)
def test_drafts_that_could_not_be_taken_back_are_refused_before_anything_changes(name, changes):
    model, plain = (FAMILIES[name].build(dtype=dtype, **changes) for dtype in (torch.float64, torch.float32))
    ids = prompts(12)["input_ids"]
    with torch.no_grad():
        exact, rough = (run(ids, use_cache=False).logits[:, -3:] for run in (model, plain))
    hf.patch(model, window=WINDOW, step_tokens=STEP_TOKENS)
    cache = fresh_cache(model)
    cache.activate_past_recording()
    step(model, ids[:, :9], cache)
    step(model, ids[:, :3], cache)
    cache.crop(-3)
    with pytest.raises(ValueError, match="drafts must be at most step_tokens - 1 = 3 tokens; got 6"):
        step(model, ids[:, :7], cache)
    assert cache.get_seq_length() == 9
    assert_e32_part(step(model, ids[:, 9:], cache), exact, e32(rough, exact), "logits after the refusal")


def test_a_prompt_of_any_length_may_follow_once_the_past_is_recorded_again():
    model = patched("qwen3_5")[0]
    cache, ids = fresh_cache(model), prompts(18)["input_ids"]
    cache.activate_past_recording()
    step(model, ids[:, :9], cache)
    cache.crop(0)
    cache.activate_past_recording()
    step(model, ids[:, 9:], cache)
    assert_continues("qwen3_5", model, ids, cache)


def test_a_copy_is_whole_while_tokens_are_held_back():
    model = patched("falcon_h1")[0]
    cache, ids = fresh_cache(model), prompts(7)["input_ids"]
    cache.activate_past_recording()
    step(model, ids, cache)
    twin = copy.deepcopy(cache)
    assert_continues("falcon_h1", model, ids, cache)
    assert_continues("falcon_h1", model, ids, twin, seed=1)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_a_pickled_cache_continues_where_it_is_loaded(name):
    model = patched(name)[0]
    cache, ids = fresh_cache(model), prompts(7)["input_ids"]
    step(model, ids, cache)
    step(model, ids[:, :1], cache)  # a record that is not in the checkpoint yet
    twin = pickle.loads(pickle.dumps(cache))
    assert torch.equal(step(model, ids[:, :2], twin), step(model, ids[:, :2], cache))
    assert pickle.loads(pickle.dumps(fresh_cache(model))).get_seq_length() == 0


def test_padding_is_remembered_while_tokens_are_held_back():
    model, stock, allowed = patched("mamba2")
    batch, drafts = prompts(3, 2), prompts(1, 1, seed=3)["input_ids"]
    cache = fresh_cache(model)
    cache.activate_past_recording()
    step(model, batch["input_ids"], cache, attention_mask=batch["attention_mask"])
    step(model, drafts, cache)
    cache.crop(-1)
    got = step(model, drafts, cache)
    for row, length in enumerate((3, 2)):
        alone = torch.cat([batch["input_ids"][row, -length:], drafts[row]]).unsqueeze(0)
        with torch.no_grad():
            expected = stock(alone).logits[:, -1:]
        assert_e32_part(got[row : row + 1], expected, allowed, f"row {row}")


def test_what_cannot_be_cropped_is_refused_before_anything_changes():
    model = patched("qwen3_5")[0]
    cache, ids = fresh_cache(model), prompts(9)["input_ids"]
    step(model, ids, cache)
    entry = cache.layers[0]
    with pytest.raises(RuntimeError, match="at most the 0 tokens"):
        entry.crop(-1)
    with pytest.raises(ValueError, match="at most 0; got 2"):
        entry.crop(2)
    cache.activate_past_recording()
    ids = torch.cat([ids, prompts(3, seed=2)["input_ids"]], dim=1)
    step(model, ids[:, 9:], cache)
    with pytest.raises(RuntimeError, match="at most the 3 tokens"):
        entry.crop(-4)
    assert_continues("qwen3_5", model, ids, cache)


def test_a_batch_of_another_size_is_refused_until_the_cache_is_reset():
    model = patched("mamba2")[0]
    cache = fresh_cache(model)
    step(model, prompts(5, 5)["input_ids"], cache)
    with pytest.raises(ValueError, match=r"\(batch=2, t, d_model\)"):
        step(model, prompts(5)["input_ids"], cache)
    cache.reset()
    ids = prompts(5)["input_ids"]
    step(model, ids, cache)
    assert_continues("mamba2", model, ids, cache)


def test_caches_that_do_not_fit_are_refused():
    model, stock, _ = patched("qwen3_5")
    ids = prompts(5)["input_ids"]
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match="must be a DynamicCache"):
        step(model, ids, static)
    with pytest.raises(NotImplementedError, match="must be a DynamicCache"):
        model.generate(ids, max_new_tokens=4, cache_implementation="static")
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        step(model, ids, transformers.DynamicCache())
    used = fresh_cache(stock)
    step(stock, ids, used)
    with pytest.raises(RuntimeError, match="state of the unpatched"):
        step(model, ids, used)
    ours = fresh_cache(model)
    step(model, ids, ours)
    with pytest.raises(RuntimeError, match=r"patched with replayssm\.hf"):
        step(stock, ids, ours)


def test_an_entry_that_was_offloaded_continues():
    model, ids = patched("falcon_h1")[0], prompts(5)["input_ids"]
    cache = fresh_cache(model)
    step(model, ids, cache)
    for entry in cache.layers:
        entry.offload()
        entry.prefetch()
    assert_continues("falcon_h1", model, ids, cache)


def test_a_decode_step_costs_one_token():
    model = patched("qwen3_5")[0]
    lengths = []
    handle = model.model.layers[0].linear_attn.register_forward_hook(
        lambda m, args, kwargs, y: lengths.append(y.shape[1]), with_kwargs=True
    )
    model.generate(prompts(5)["input_ids"], max_new_tokens=4, do_sample=False)
    handle.remove()
    assert lengths == [5, 1, 1, 1]


def test_a_forward_without_tokens_is_refused_by_the_layer_that_gets_none():
    model = FAMILIES["qwen3_5"].build()
    hf.patch(model)
    with torch.no_grad(), pytest.raises(ValueError, match=r"\(layer 0\): a step must have at least 1 token; got t=0"):
        model(torch.zeros(2, 0, dtype=torch.int64), use_cache=True)


def test_a_cache_serves_a_copy_of_its_model_with_the_weights_of_the_copy():
    model, ids = patched("qwen3_5")[0], prompts(9)["input_ids"]
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.out_proj.weight.data *= -1
    cache = fresh_cache(model)
    step(model, ids, cache)
    untouched = copy.deepcopy(cache)
    expected = step(other, ids[:, :1], untouched)
    assert torch.equal(step(other, ids[:, :1], cache), expected)
    assert not torch.equal(step(model, ids[:, 1:2], cache), step(other, ids[:, 1:2], untouched))


def test_a_copy_of_a_cache_holds_no_model():
    model = patched("qwen3_5")[0]
    cache = fresh_cache(model)
    step(model, prompts(9)["input_ids"], cache)
    entries = [layer for layer in copy.deepcopy(cache).layers if isinstance(layer, ReplayLinearLayer)]
    assert len(entries) == 2
    assert not any(isinstance(value, torch.nn.Module) for entry in entries for value in vars(entry).values())


def entries_of(cache):
    return [layer for layer in cache.layers if isinstance(layer, ReplayLinearLayer)]


def apart(cache):
    """Let every layer make its own steps."""
    for entry in entries_of(cache):
        entry.lockstep = Lockstep()


CHANGES = {
    "nothing": lambda entries: None,
    "one layer is reordered": lambda entries: entries[0].reorder_cache(torch.tensor([1, 0])),
    "one layer is reset": lambda entries: entries[1].reset(),
    "all layers are reset": lambda entries: [entry.reset() for entry in entries],
    "one layer holds tokens back": lambda entries: entries[0].activate_past_recording(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "nemotron_h"])
def test_layers_that_share_a_step_compute_what_each_would_alone(name, change):
    model, batch = patched(name)[0], prompts(7, 4)
    shared, alone = fresh_cache(model), fresh_cache(model)
    for number in range(2 * WINDOW + 2):
        ids = prompts(1, 1, seed=number)["input_ids"] if number else batch["input_ids"]
        mask = torch.cat([batch["attention_mask"], torch.ones(2, number, dtype=torch.long)], dim=1)
        apart(alone)
        assert torch.equal(*(step(model, ids, cache, attention_mask=mask) for cache in (shared, alone)))
        if number == WINDOW:
            for cache in (shared, alone):
                change(entries_of(cache))
            shared = copy.deepcopy(shared)


def test_layers_that_have_come_the_same_way_take_the_same_step_and_others_do_not():
    model, batch = patched("qwen3_5")[0], prompts(7, 4)
    cache = fresh_cache(model)
    step(model, batch["input_ids"], cache, attention_mask=batch["attention_mask"])
    first, second = entries_of(cache)
    assert first.past is second.past is not None
    step(model, prompts(1, 1)["input_ids"], cache)
    assert first.past is second.past
    first, second = entries_of(copy.deepcopy(cache))
    assert first.past is second.past
    first.reorder_cache(torch.tensor([1, 0]))
    assert first.past is not second.past


def test_layers_with_other_masks_take_other_steps():
    model = patched("mamba2")[0]
    x, masks = torch.randn(2, 3, 32, dtype=torch.float64), prompts(3, 2)["attention_mask"]
    outputs = []
    for separate in (False, True):
        cache = fresh_cache(model)
        step(model, prompts(6, 6)["input_ids"], cache)
        if separate:
            apart(cache)
        with torch.no_grad():
            for block, mask in zip(model.backbone.layers, (masks, masks.flip(0)), strict=True):
                outputs.append(block.mixer(x, cache, attention_mask=mask))
    assert torch.equal(torch.stack(outputs[:2]), torch.stack(outputs[2:]))


def test_a_copy_of_a_cache_that_was_filled_in_inference_mode_continues_outside():
    model, ids = patched("qwen3_5")[0], prompts(9)["input_ids"]
    cache = fresh_cache(model)
    with torch.inference_mode():
        step(model, ids, cache)
    assert_continues("qwen3_5", model, ids, copy.deepcopy(cache))
