"""Weights in shards and repositories of the Hub: read whole, or refused with a list of all that is wrong."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from budgets import assert_same_bits
from draws import DEVICE
from hybrids import ALL, MAMBA2, MLP, build, config, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import PeakMemory
from refusals import refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK

from replayssm import generate, hub
from replayssm.models import HybridLM, from_pretrained

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about files; models load to the CPU")


def shard(folder: Path, shard_bytes: int) -> dict[str, str]:
    """Cut model.safetensors into shards; returns the file of each key."""
    tensors = load_file(folder / hub.WEIGHTS)
    (folder / hub.WEIGHTS).unlink()
    shards = hub.Shards(folder, shard_bytes=shard_bytes)
    for key, tensor in tensors.items():
        shards.add(key, tensor)
    shards.finish()
    return json.loads((folder / hub.INDEX).read_text())["weight_map"]


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in shards."""
    build(config(MAMBA2, MLP), dtype=torch.float32).save_pretrained(tmp_path / "model")
    shard(tmp_path / "model", 4000)
    return tmp_path / "model"


@given(shard_bytes=st.integers(1, 40_000))
@settings(max_examples=10)
def test_a_model_in_shards_is_the_model_in_one_file(tmp_path_factory, shard_bytes):
    path = tmp_path_factory.mktemp("shards")
    model = build(config(*ALL), dtype=torch.float32)
    model.save_pretrained(path)
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    if shard_bytes < sum(tensor.nbytes for tensor in model.state_dict().values()):
        for name in set(shard(path, shard_bytes).values()):
            held = sum(tensor.nbytes for tensor in load_file(path / name).values())
            assert held <= max(shard_bytes, largest)
    loaded = HybridLM.from_pretrained(path)
    for key, tensor in model.state_dict().items():
        assert_same_bits(loaded.state_dict()[key], tensor, key)


def test_shards_that_transformers_writes_are_read(tmp_path):
    model = STOCK["nemotron_h"].build()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size=6000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (HybridLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many"))
    for key, tensor in one.items():
        assert_same_bits(many[key], tensor, key)


def test_loading_holds_the_model_a_tensor_and_less_than_a_file(tmp_path):
    """Also where experts of several files become one tensor."""
    blocks = ["mamba", *["moe"] * 6]
    many = {"hidden_size": 64, "layers_block_type": blocks, "n_routed_experts": 32, "n_group": 1, "topk_group": 1}
    STOCK["nemotron_h"].write(tmp_path, **many)
    files = shard(tmp_path, 120_000)
    sizes = {name: os.path.getsize(tmp_path / name) for name in set(files.values())}
    for dtype in (torch.float32, torch.bfloat16):
        with PeakMemory() as memory:
            model = HybridLM.from_pretrained(tmp_path, dtype=dtype)
        tensors = model.state_dict().values()
        own = sum(tensor.nbytes for tensor in tensors)
        largest = max(4 * tensor.numel() for tensor in tensors)  # the file is fp32
        assert own <= memory.bytes <= own + largest + max(sizes.values())
        assert memory.bytes < own + sum(sizes.values()) / 2  # the bound means something for this model


def test_all_that_is_wrong_with_shards_is_listed_at_once(folder):
    files = json.loads((folder / hub.INDEX).read_text())["weight_map"]
    names = sorted(set(files.values()))
    gone, cut, double = names[0], names[1], names[2]
    missing = next(key for key, name in files.items() if name == double)
    (folder / gone).unlink()
    content = (folder / cut).read_bytes()
    (folder / cut).write_bytes(content[:-3])
    tensors = load_file(folder / double)
    del tensors[missing]
    twice = next(key for key, name in files.items() if name == names[3])
    save_file({**tensors, twice: torch.ones(1), "stranger": torch.ones(1)}, folder / double)
    with refused(
        ValueError,
        f"no {gone}",
        f"{cut}: ",
        f"no {missing} in {double}",
        f"{twice} in {double}, which lies in {names[3]} by the index",
        f"stranger in {double}, which does not exist by the index",
    ):
        HybridLM.from_pretrained(folder)


def test_a_name_that_no_file_can_have_is_listed_as_missing(folder):
    files, name = json.loads((folder / hub.INDEX).read_text())["weight_map"], "a" * 300
    write_index(folder, {**files, "norm.weight": name})
    with refused(ValueError, "must name complete safetensors files", f"no {name}"):
        HybridLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "link"])
def test_a_file_outside_the_folder_is_never_opened(folder, name, monkeypatch):
    secret = folder.parent / "secret.safetensors"
    files = json.loads((folder / hub.INDEX).read_text())["weight_map"]
    save_file({"norm.weight": torch.ones(24)}, secret)
    if name == "link":
        (folder / name).symlink_to(secret)
    if name.startswith("/"):
        name = str(secret)
    write_index(folder, {**files, "norm.weight": name})
    opened = []
    monkeypatch.setattr("replayssm.hub.weights.safe_open", lambda path, **_: opened.append(path) or open_nothing())
    with refused(ValueError, f"{name}, which lies outside the folder"):
        HybridLM.from_pretrained(folder)
    assert secret not in [Path(path).resolve() for path in opened]


def open_nothing():
    raise hub.weights.SafetensorError("not opened by this test")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(folder, content):
    (folder / hub.INDEX).write_text(content)
    with refused(ValueError, hub.INDEX):
        HybridLM.from_pretrained(folder)


def test_a_config_of_other_shapes_lists_every_key_of_the_file(tmp_path):
    STOCK["nemotron_h"].write(tmp_path)
    path = tmp_path / "config.json"
    changed = {"mamba_head_dim": 6, "n_routed_experts": 12, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with refused(
        ValueError,
        "backbone.layers.0.mixer.in_proj.weight of shape (94, 24) instead of (106, 24)",
        "no backbone.layers.1.mixer.experts.8.up_proj.weight",
        "backbone.layers.1.mixer.gate.weight of shape (8, 24) instead of (12, 24)",
        "backbone.layers.4.norm.weight, which the model does not have",
    ):
        HybridLM.from_pretrained(tmp_path)


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    silent, seen = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", silent)
    HybridLM.from_pretrained(folder)
    assert silent.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", seen)
    HybridLM.from_pretrained(folder)
    assert "loading [###" in seen.getvalue()
    assert seen.getvalue().endswith("\r\x1b[K")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(folder, tmp_path, monkeypatch):
    """The Hub's cache with one repository, as huggingface_hub lays it out, and no network."""
    repository = tmp_path / "hub" / "models--org--small"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    for ref in ("main", "v1"):
        (repository / "refs" / ref).write_text(COMMIT)
    return tmp_path / "hub"


LOAD = """
import sys
from replayssm.models import from_pretrained
assert "huggingface_hub" not in sys.modules
for argument in sys.argv[1:]:
    name, _, revision = argument.partition("@")
    try:
        model, _ = from_pretrained(name, revision=revision or None)
        print(sum(parameter.double().abs().sum().item() for parameter in model.parameters()))
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


def load_offline(cache: Path, *names: str) -> list[str]:
    """What came of loading each of name@revision, in a process of its own: huggingface_hub reads its variables once."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", LOAD, *names], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")


def test_a_name_of_the_hub_is_found_in_its_cache_without_a_network(cache):
    snapshot = cache / "models--org--small" / "snapshots" / COMMIT
    model = HybridLM.from_pretrained(snapshot)
    expected = str(sum(parameter.double().abs().sum().item() for parameter in model.parameters()))
    half = cache / "models--org--half"
    shutil.copytree(cache / "models--org--small", half, symlinks=True)
    gone = sorted((half / "snapshots" / COMMIT).glob("*.safetensors"))[1]
    gone.unlink()
    names = ["org/small", "org/small@v1", f"org/small@{COMMIT}", "org/small@v2", "org/large", "org/half"]
    *found, no_revision, no_repository, no_file = load_offline(cache, *names)
    assert found == [expected] * 3
    for said, name in ((no_revision, "org/small"), (no_repository, "org/large")):
        assert said.startswith("FileNotFoundError HybridLM.from_pretrained: ")
        assert name in said
        assert "HF_HUB_OFFLINE" in said or "offline" in said.lower(), said
    assert no_file.startswith("ValueError HybridLM.from_pretrained: ")
    assert f"no {gone.name}" in no_file


def test_pickles_of_a_repository_are_named_and_not_downloaded(tmp_path, monkeypatch):
    fetched = []
    (tmp_path / hub.CONFIG).write_text("{}")
    monkeypatch.setattr("replayssm.hub.folders._download", lambda repository, name, revision: fetched.append(name))
    monkeypatch.setattr("huggingface_hub.file_exists", lambda repository, name, revision: name.endswith(".bin"))
    with refused(FileNotFoundError, "pytorch_model.bin", "replayssm convert"):
        hub.Weights("Test", hub.Folder(tmp_path, "org/name", COMMIT))
    assert fetched == [hub.WEIGHTS, hub.INDEX]


def test_a_folder_comes_before_a_name_of_the_hub(folder, tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import of it would fail
    model, _ = from_pretrained("org/small")
    assert model(token_ids(1, 3)).isfinite().all()


def test_a_long_prompt_of_a_checkpoint_never_has_all_its_logits(tmp_path, monkeypatch):
    monkeypatch.setattr("replayssm.prefill.PREFILL_PIECE", 16)
    STOCK["nemotron_h"].write(tmp_path)
    model, widths = HybridLM.from_pretrained(tmp_path), []
    model.lm_head.register_forward_pre_hook(lambda module, arguments: widths.append(arguments[0].shape[1]))
    generate(model, token_ids(2, 50), max_new_tokens=3)
    assert len(widths) >= 4 + 2  # pieces of the prompt, and steps
    assert set(widths) == {1}
