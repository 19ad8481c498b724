"""What ``patch`` changes in a model, what it leaves and says so, and what ``unpatch`` brings back."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import types
import weakref

import pytest
import torch
from budgets import assert_e32, e32, rms
from hf_models import FAMILIES, LATEST, VOCAB, prompts
from torch import nn

from replayssm import hf
from replayssm.hf.mixer import ReplayMixer

transformers = pytest.importorskip("transformers")
from replayssm.hf.mixer import MIXERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def tokens(model, count=8, **options):
    return model.generate(**prompts(4, 6), max_new_tokens=count, do_sample=False, **options)


def snapshot(model):
    """Everything about a model's modules that a patch might touch."""
    return {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}


def assert_same_snapshot(model, before):
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, (cls, attributes) in before.items():
        assert after[name][0] is cls, name
        assert after[name][1].keys() == attributes.keys(), name
        for attribute, value in attributes.items():
            assert after[name][1][attribute] is value, f"{name}.{attribute}"


def test_unpatching_restores_classes_attributes_and_config_exactly(family):
    model = family.build(dtype=torch.float32)
    before, config, keys = snapshot(model), copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    report = hf.patch(model)
    assert len(report.replaced) == family.mixers
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    mixer = model.get_submodule(next(iter(report.replaced)))
    assert isinstance(mixer, before[next(iter(report.replaced))][0]), "code that asks for the stock class finds it"
    hf.unpatch(model)
    assert_same_snapshot(model, before)
    hf.unpatch(model)
    assert_same_snapshot(model, before)


def test_every_known_mixer_is_in_a_family_that_is_tested():
    assert len(MIXERS) == len(FAMILIES) == 14
    assert {entry.family for entry in MIXERS.values()} == {family.folder for family in FAMILIES.values()}


def test_the_report_names_each_mixer_and_the_layer_that_it_equals():
    kinds = {"nemotron_h": "ReplayMamba2", "qwen3_5": "ReplayGatedDeltaNet", "kimi_linear": "ReplayKDA"}
    for name, kind in kinds.items():
        report = hf.patch(FAMILIES[name].build())
        assert set(report.replaced.values()) == {kind}
        assert str(report).startswith("2 of ")
        for mixer in report.replaced:
            assert mixer.rpartition(".")[2] in ("mixer", "linear_attn", "self_attn")


def test_patching_twice_changes_the_arguments_alone():
    model = FAMILIES["qwen3_5"].build()
    before = snapshot(model)
    hf.patch(model, window=8, step_tokens=2)
    report = hf.patch(model, window=5, step_tokens=4)
    assert len(report.replaced) == 2
    with torch.no_grad():
        output = model(**prompts(5))
    cache = output.cache if "cache" in output else output.past_key_values
    assert (cache.layers[0].replay.window, cache.layers[0].replay.step_tokens) == (5, 4)
    hf.unpatch(model)
    assert_same_snapshot(model, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": 3}, ValueError, "at least step_tokens=16; got 3"),
        ({"window": -1}, ValueError, "window must be"),
        ({"step_tokens": 0}, ValueError, "step_tokens must be an int of at least 1; got 0"),
        ({"checkpoint": "fp31"}, NotImplementedError, "checkpoint must be one of"),
        ({"read_format": "fp9"}, NotImplementedError, "read_format must be one of"),
    ],
)
def test_bad_arguments_change_nothing(arguments, error, message):
    model = FAMILIES["nemotron_h"].build(dtype=torch.float32)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        hf.patch(model, **arguments)
    assert_same_snapshot(model, before)
    with pytest.raises(error, match=message):
        hf.register(**arguments)


@pytest.mark.parametrize("call", [hf.patch, hf.unpatch])
def test_what_is_no_model_is_refused(call):
    with pytest.raises(ValueError, match="model must be a module; got str"):
        call("org/name")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0", "5.25.0.dev0", "7.0.0"])
def test_another_release_of_transformers_is_refused_and_the_model_left(version, monkeypatch):
    model = FAMILIES["nemotron_h"].build(dtype=torch.float32)
    before = snapshot(model)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # it puts another there as it loads
    for call in (lambda: hf.patch(model), hf.register):
        with pytest.raises(ImportError, match=rf"5\.17 to 5\.24; got {version}"):
            call()
    assert_same_snapshot(model, before)


def test_without_transformers_the_import_says_what_to_install():
    script = "import sys; sys.modules['transformers'] = None; from replayssm import hf"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "ImportError: replayssm.hf: transformers must be installed, a release from 5.17 to 5.24" in done.stderr
    assert "pip install 'replayssm[hf]'" in done.stderr


def tiny(name, **settings):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**sizes, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


ATTENTION = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda: tiny("Llama", **ATTENTION), []),
        (lambda: FAMILIES["granitemoehybrid"].build(layer_types=["attention"] * 3), []),
        (lambda: tiny("Mamba"), ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]),
        (lambda: tiny("Lfm2", **ATTENTION, layer_types=["conv", "full_attention"]), ["model.layers.0.conv"]),
    ],
    ids=["llama", "attention-only granite", "mamba-1", "lfm2"],
)
def test_a_model_without_a_mixer_that_can_replay_is_refused_and_left(build, left):
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError, match="must have a mixer that can replay") as caught:
        hf.patch(model)
    for name in left:
        assert f"left as it was: {name}: " in str(caught.value)
    assert_same_snapshot(model, before)


class Unknown(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        return self.inner(hidden_states)


def test_unknown_mixers_are_left_listed_and_keep_assisted_generation_refused():
    plain, model = FAMILIES["nemotron_h"].build(), FAMILIES["nemotron_h"].build()
    mixer = model.model.layers[0].mixer

    class Derived(type(mixer)):
        pass

    cases = {
        "derives from NemotronHMamba2Mixer": lambda: setattr(mixer, "__class__", Derived),
        "its activation is gelu": lambda: setattr(mixer, "activation", "gelu"),
        "a forward of its own": lambda: setattr(mixer, "forward", lambda *args, **kwargs: None),
    }
    for why, change in cases.items():
        before = type(mixer), dict(mixer.__dict__)
        change()
        report = hf.patch(model)
        assert list(report.replaced) == ["model.layers.2.mixer"]
        assert why in report.left["model.layers.0.mixer"]
        with pytest.raises(ValueError, match="stateful"):
            model.generate(prompts(5)["input_ids"], prompt_lookup_num_tokens=3, max_new_tokens=4)
        mixer.__class__ = before[0]
        mixer.__dict__.clear()
        mixer.__dict__.update(before[1])
        hf.unpatch(model)
    hf.patch(model)
    model.model.layers[0].mixer = Unknown(nn.Linear(32, 32).double())
    report = hf.patch(model)
    assert "none of the mixers" in report.left["model.layers.0"]
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompts(5)["input_ids"], prompt_lookup_num_tokens=3, max_new_tokens=4)
    assert len(tokens(model)) == len(tokens(plain))


def test_a_model_of_which_half_is_patched_generates_as_before():
    model = FAMILIES["qwen3_5"].build()
    stock = tokens(model)
    report = hf.patch(model.model.layers[2])
    assert list(report.replaced) == ["linear_attn"]
    assert torch.equal(tokens(model), stock)
    assert len(hf.patch(model).replaced) == 2
    assert torch.equal(tokens(model), stock)


def test_a_copy_of_a_patched_model_replays_with_its_own_weights():
    model = FAMILIES["nemotron_h"].build()
    stock = tokens(model)
    hf.patch(model)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(tokens(twin), stock)
    hf.unpatch(model)
    assert torch.equal(tokens(twin), stock)
    assert type(twin.model.layers[0].mixer).__name__ == "ReplayNemotronHMamba2Mixer"


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickled_model_replays_and_can_be_unpatched(family, way):
    model = family.build()
    stock = tokens(model)
    before = {name: type(module) for name, module in model.named_modules()}
    hf.patch(model, window=4, step_tokens=3)
    file = io.BytesIO()
    (pickle.dump if way == "pickle" else torch.save)(model, file)
    file.seek(0)
    twin = pickle.load(file) if way == "pickle" else torch.load(file, weights_only=False)
    for name, module in model.named_modules():
        assert type(twin.get_submodule(name)) is type(module), name
        assert twin.get_submodule(name).__dict__.get("_replay") == module.__dict__.get("_replay"), name
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(tokens(twin), stock)
    assert ("generate" in twin.__dict__) == ("generate" in model.__dict__)
    hf.unpatch(twin)
    assert {name: type(module) for name, module in twin.named_modules()} == before
    assert "generate" not in twin.__dict__
    assert torch.equal(tokens(twin), stock)


def test_a_patched_model_is_freed_without_the_garbage_collector():
    mixer = FAMILIES["mamba2"].build().backbone.layers[0].mixer
    hf.patch(mixer)
    with torch.no_grad():
        mixer(torch.zeros(1, 3, 32, dtype=torch.float64))
    gone = weakref.ref(mixer)
    gc.collect()  # the model around it has circles of its own
    gc.disable()
    try:
        del mixer
        assert gone() is None
    finally:
        gc.enable()


def test_a_patched_model_saves_what_the_unpatched_one_loads(family, tmp_path):
    model = family.build(dtype=torch.float32)
    model.save_pretrained(tmp_path / "stock")
    hf.patch(model)
    model.save_pretrained(tmp_path / "ours")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("stock", "ours")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes(), name


def test_registered_classes_replay_from_the_start(tmp_path):
    if not LATEST:
        pytest.importorskip("torchvision", reason="the registry of 5.17 imports what needs it")
    model = FAMILIES["qwen3_5"].build(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    stock = tokens(model)
    torch.manual_seed(0)
    type(model).from_pretrained(tmp_path)
    rng = torch.random.get_rng_state()
    torch.manual_seed(0)
    hf.register(window=8, step_tokens=4)
    try:
        loaded = type(model).from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="already has a patch"):
            hf.register()
    finally:
        hf.unregister()
    assert torch.equal(torch.random.get_rng_state(), rng), "loading drew other random numbers"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert torch.equal(tokens(loaded), stock)
    assert type(loaded.model.layers[0].linear_attn).__name__ == "ReplayQwen3_5GatedDeltaNet"
    assert len(hf.patch(loaded).replaced) == 2
    lookup = loaded.generate(prompts(6)["input_ids"], prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False)
    assert torch.equal(lookup, model.generate(prompts(6)["input_ids"], max_new_tokens=8, do_sample=False))
    hf.unpatch(loaded)
    assert type(loaded.model.layers[0].linear_attn) is type(model.model.layers[0].linear_attn)
    again = type(model).from_pretrained(tmp_path)
    assert type(again.model.layers[0].linear_attn) is type(model.model.layers[0].linear_attn)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_registered(family, tmp_path):
    if not LATEST:
        pytest.importorskip("torchvision", reason="the registry of 5.17 imports what needs it")
    model = FAMILIES[family].build(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    hf.register()
    try:
        loaded = type(model).from_pretrained(tmp_path)
    finally:
        hf.unregister()
    later = type(model).from_pretrained(tmp_path)
    counts = [sum(isinstance(module, ReplayMixer) for module in each.modules()) for each in (loaded, later)]
    assert counts == [len(hf.patch(model).replaced), 0]


def test_the_multipliers_of_falcon_h1_stay_with_the_model():
    model, plain = FAMILIES["falcon_h1"].build(), FAMILIES["falcon_h1"].build(dtype=torch.float32)
    batch = prompts(6)
    with torch.no_grad():
        stock = model(**batch, use_cache=False).logits
        allowed = e32(plain(**batch, use_cache=False).logits, stock)
        hf.patch(model)
        assert_e32(model.to(torch.float64)(**batch, use_cache=False).logits, stock, allowed, "logits")
        for layer in model.model.layers:
            layer.mamba.mup_vector.fill_(1.0)
        blind = model(**batch, use_cache=False).logits
    assert rms(blind - stock) > 100 * allowed, "the test would not see multipliers that are gone"


class TestArguments:
    """A mixer called as blocks of either release call it."""

    @pytest.fixture
    def mixer(self):
        model = FAMILIES["qwen3_5"].build()
        hf.patch(model)
        return model.model.layers[0].linear_attn, transformers.DynamicCache(config=model.config)

    @pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values", None])
    def test_a_cache_is_found_under_each_of_its_names(self, mixer, name):
        mixer, cache = mixer
        x = torch.randn(1, 4, 32, dtype=torch.float64)
        with torch.no_grad():
            whole = mixer(x)
            args, kwargs = ((cache,), {}) if name is None else ((), {name: cache})
            parts = [mixer(part, *args, attention_mask=None, use_cache=True, **kwargs) for part in x.split(2, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)

    def test_a_cache_under_another_name_or_twice_is_refused(self, mixer):
        mixer, cache = mixer
        x = torch.zeros(1, 4, 32, dtype=torch.float64)
        with torch.no_grad():
            with pytest.raises(TypeError, match="got 0 of these and cache_v2"):
                mixer(x, cache_v2=cache)
            with pytest.raises(TypeError, match="got 2 of these"):
                mixer(x, cache=cache, cache_params=cache)
            mixer(x, cache_v2=object())  # the stock mixer ignores it too

    def test_packed_documents_are_refused(self, mixer):
        with pytest.raises(NotImplementedError, match="packed documents"):
            mixer[0](torch.zeros(1, 4, 32, dtype=torch.float64), cu_seq_lens_q=torch.tensor([0, 2, 4]))

    def test_padding_between_tokens_is_refused_and_the_cache_left(self, mixer):
        mixer, cache = mixer
        x, hole = torch.randn(1, 4, 32, dtype=torch.float64), torch.tensor([[1, 0, 1, 1]])
        with torch.no_grad():
            with pytest.raises(ValueError, match="zeros on the left or on the right"):
                mixer(x, cache, hole)
            expected = mixer(x)
            torch.testing.assert_close(mixer(x, cache), expected)


class TestAccelerate:
    """Modules with hooks of accelerate, which hide a class's forward behind one on the instance."""

    accelerate = pytest.importorskip("accelerate")

    @pytest.mark.parametrize("first", ["hooks", "patch"])
    @pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear"])
    def test_offloaded_weights_are_there_when_they_are_used(self, name, first):
        model = FAMILIES[name].build()
        stock = tokens(model)
        for action in (first, "patch" if first == "hooks" else "hooks"):
            if action == "patch":
                report = hf.patch(model)
            else:
                self.accelerate.cpu_offload(model, execution_device="cpu")
        assert len(report.replaced) == 2
        assert not report.left or "assisted" in str(report)
        mixer = model.get_submodule(next(iter(report.replaced)))
        hooked = "forward" in mixer.__dict__
        assert hooked == (name != "kimi_linear")  # a mixer without parameters of its own gets no hook
        assert not hooked or mixer._old_forward.__func__ is type(mixer).forward
        assert torch.equal(tokens(model), stock)
        hf.unpatch(model)
        assert not hooked or mixer._old_forward == types.MethodType(type(mixer).forward, mixer)
        assert "Replay" not in type(mixer).__name__
        assert torch.equal(tokens(model), stock)

    def test_hooks_that_came_off_again_leave_no_forward_of_the_patch_behind(self):
        model = FAMILIES["qwen3_5"].build()
        self.accelerate.cpu_offload(model, execution_device="cpu")
        hf.patch(model)
        self.accelerate.hooks.remove_hook_from_module(model, recurse=True)
        hf.unpatch(model)
        mixer = model.model.layers[0].linear_attn
        assert mixer.forward.__func__ is type(mixer).forward


class TestAdapters:
    """LoRA of PEFT, whose wrappers stand where projections stood."""

    peft = pytest.importorskip("peft")
    TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")

    def lora(self, model):
        torch.manual_seed(5)
        config = self.peft.LoraConfig(r=2, init_lora_weights=False, target_modules=list(self.TARGETS))
        return self.peft.get_peft_model(model, config).double().eval()

    @pytest.mark.parametrize("first", ["adapters", "patch"])
    def test_tokens_are_those_of_the_unpatched_model_with_the_adapter(self, first):
        stock, model = self.lora(FAMILIES["qwen3_5"].build()), FAMILIES["qwen3_5"].build()
        base = tokens(FAMILIES["qwen3_5"].build())
        if first == "patch":
            hf.patch(model, window=4, step_tokens=2)
            model = self.lora(model)
        else:
            model = self.lora(model)
            assert len(hf.patch(model, window=4, step_tokens=2).replaced) == 2
        assert torch.equal(tokens(model), tokens(stock))
        assert not torch.equal(tokens(model), base)
        with model.disable_adapter():
            assert torch.equal(tokens(model), base)
        assert torch.equal(tokens(model.merge_and_unload()), tokens(stock))

    def test_every_adapter_learns(self):
        model = self.lora(FAMILIES["qwen3_5"].build())
        hf.patch(model)
        model(**prompts(6)).logits.square().mean().backward()
        adapters = {name: p.grad for name, p in model.named_parameters() if "lora" in name}
        assert len(adapters) == 2 * 2 * len(self.TARGETS)
        for name, gradient in adapters.items():
            assert gradient is not None, name
            assert gradient.abs().max() > 0, name
