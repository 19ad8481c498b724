"""One layer of a checkpoint by itself."""

import json
from pathlib import Path

import pytest
import torch
from budgets import assert_same_bits
from draws import DEVICE, draw
from hybrids import ATTENTION, GATED_DELTANET, KDA, MAMBA2, MLP, build, config
from refusals import refused
from safetensors.torch import load_file
from stock_models import STOCK
from test_weights import shard

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer, ReplayMamba2, hub
from replayssm.hub import weights
from replayssm.models import HybridLM

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about files; models load to the CPU")


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_a_layer_of_a_checkpoint_is_that_of_the_model(tmp_path: Path, name: str) -> None:
    STOCK[name].write(tmp_path)
    model = HybridLM.from_pretrained(tmp_path)
    for i, block in enumerate(model.layers):
        if not isinstance(block.mixer, ReplayMamba2):
            continue
        layer = ReplayMamba2.from_pretrained(tmp_path, layer=i)
        x = draw(i, 2, 9, 24, dtype=torch.float32)
        with torch.no_grad():
            assert_same_bits(layer(x), block.mixer(x))
        assert not layer.training
        for key, tensor in block.mixer.state_dict().items():
            assert_same_bits(layer.state_dict()[key], tensor, key)
        halved = ReplayMamba2.from_pretrained(tmp_path, layer=i, dtype=torch.bfloat16)
        assert halved.in_proj.weight.dtype == torch.bfloat16
        assert_same_bits(halved.A_log, layer.A_log, "A_log keeps its precision")


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("qwen3_5", ReplayGatedDeltaNet),
        ("qwen3_5_moe text", ReplayGatedDeltaNet),
        ("qwen3_next", ReplayGatedDeltaNet),
        ("kimi_linear", ReplayKDA),
    ],
    ids=str,
)
def test_a_decoder_layer_of_two_blocks_is_counted_as_in_its_file(tmp_path: Path, name: str, cls: type) -> None:
    STOCK[name].write(tmp_path)
    model, found = HybridLM.from_pretrained(tmp_path), 0
    for i, block in enumerate(list(model.layers)[::2]):
        if not isinstance(block.mixer, cls):
            with refused(ValueError, f"got {i}, which is "):
                cls.from_pretrained(tmp_path, layer=i)
            continue
        layer, found = cls.from_pretrained(tmp_path, layer=i), found + 1
        for key, tensor in block.mixer.state_dict().items():
            assert_same_bits(layer.state_dict()[key], tensor, key)
    assert 0 < found < len(model.layers) / 2


@pytest.mark.parametrize(
    ("cls", "layer"), [(ReplayMamba2, 0), (ReplayGatedDeltaNet, 2), (ReplayKDA, 3)], ids=["mamba2", "gdn", "kda"]
)
def test_a_layer_of_a_saved_model_is_found_by_its_block(tmp_path: Path, cls: type, layer: int) -> None:
    model = build(config(MAMBA2, MLP, GATED_DELTANET, KDA, ATTENTION), dtype=torch.float64)
    model.save_pretrained(tmp_path)
    found = cls.from_pretrained(str(tmp_path), layer=layer)
    for key, tensor in model.layers[layer].mixer.state_dict().items():
        assert_same_bits(found.state_dict()[key], tensor, key)
    with refused(ValueError, f"{cls.__name__}.from_pretrained", "got 4, which is attention", f"Such are: {layer}."):
        cls.from_pretrained(tmp_path, layer=4)
    with refused(ValueError, "got 5, of 5 layers"):
        cls.from_pretrained(tmp_path, layer=5)
    with refused(ValueError, "layer", "-1"):
        cls.from_pretrained(tmp_path, layer=-1)


def test_a_layer_of_the_bundled_model() -> None:
    assert ReplayMamba2.from_pretrained("tiny", layer=0).d_model == 256


def test_the_base_of_all_layers_is_none_of_a_file() -> None:
    with refused(ValueError, "ReplayLayer.from_pretrained", "ReplayMamba2"):
        ReplayLayer.from_pretrained("tiny", layer=0)


def test_only_files_and_tensors_of_the_layer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STOCK["nemotron_h"].write(tmp_path)
    files = shard(tmp_path, 6000)
    needed = {name for key, name in files.items() if key.startswith("backbone.layers.4.")}
    assert 0 < len(needed) < len(set(files.values()))
    for name in set(files.values()) - needed:
        (tmp_path / name).unlink()  # a file of others is not looked for
    read = []
    get = weights.Weights.read
    monkeypatch.setattr(weights.Weights, "read", lambda self, key: read.append(key) or get(self, key))
    ReplayMamba2.from_pretrained(tmp_path, layer=4)
    assert {key for key in files if key.startswith("backbone.layers.4.mixer.")} == set(read)
    (tmp_path / sorted(needed)[0]).unlink()
    with refused(ValueError, f"no {sorted(needed)[0]}"):
        ReplayMamba2.from_pretrained(tmp_path, layer=4)


def test_a_layer_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path)
    path = tmp_path / hub.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "ssm_state_size": 9}))
    rows = load_file(tmp_path / hub.WEIGHTS)["backbone.layers.0.mixer.in_proj.weight"].shape[0]
    with refused(ValueError, "layers.0.mixer.in_proj.weight", f"shape ({rows}, 24) instead of ({rows + 8}, 24)"):
        ReplayMamba2.from_pretrained(tmp_path, layer=0)
