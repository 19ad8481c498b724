"""Conversion: there and back, key for key and bit for bit, whole or not at all. RC-15, RC-21, RC-29, RC-33."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from budgets import assert_same_bits
from draws import DEVICE, draw, seeds
from hybrids import ATTENTION, MAMBA2, MLP, build, config, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import PeakMemory
from refusals import refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK
from test_families import STATE_SPACES
from test_weights import shard

from replayssm import cli, hub
from replayssm.drafters import MTPHead
from replayssm.hub import writing
from replayssm.models import HybridLM, convert, families, from_pretrained

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about files; models load to the CPU")
FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCKS = ["mamba", "attention", "mlp", "moe"]
# Sizes and switches that decide about names and shapes of tensors; a family that is not here keeps its settings.
VARIED = {
    "mamba2": st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(1, 3),
            "state_size": st.integers(1, 5),
            "conv_kernel": st.integers(1, 4),
            "use_bias": st.booleans(),
            "use_conv_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
        }
    ),
    "nemotron_h": st.fixed_dictionaries(
        {
            "layers_block_type": st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4),
            "ssm_state_size": st.integers(1, 5),
            "moe_latent_size": st.sampled_from([None, 5]),
            "use_bias": st.booleans(),
            "use_conv_bias": st.booleans(),
            "mlp_bias": st.booleans(),
        }
    ),
    "qwen3_next": st.fixed_dictionaries(
        {
            "num_experts": st.integers(2, 4),
            "linear_num_value_heads": st.sampled_from([2, 4]),
            "linear_key_head_dim": st.integers(1, 5),
            "mlp_only_layers": st.sampled_from([[], [0, 2]]),
            "tie_word_embeddings": st.booleans(),
            "attention_bias": st.booleans(),
        }
    ),
    "kimi_linear": st.fixed_dictionaries(
        {
            "layer_types": st.permutations(["linear_attention", "full_attention", "linear_attention"]),
            "mlp_layer_types": st.permutations(["dense", "sparse", "sparse"]),
            "num_expert_group": st.just(1),
            "topk_group": st.just(1),
            "num_experts": st.integers(2, 4),
            "attention_bias": st.booleans(),
        }
    ),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of another library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_folder(got: Path, expected: Path) -> None:
    ours, theirs = tensors_of(got), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor, key)
    assert json.loads((got / hub.CONFIG).read_text()) == json.loads((expected / hub.CONFIG).read_text())


def rewrite(folder: Path, dtypes: list[torch.dtype], **extra: torch.Tensor) -> None:
    """Give the tensors of a folder these dtypes in turn, one to those that we join, and add others."""
    tensors = load_file(folder / hub.WEIGHTS)
    adopted = families.adopt("test", json.loads((folder / hub.CONFIG).read_text()), tensors)
    for i, link in enumerate(families.links_of("test", adopted)):
        tensors |= {key: tensors[key].to(dtypes[i % len(dtypes)]) for key in link.theirs}
    save_file({**tensors, **extra}, folder / hub.WEIGHTS, {"format": "pt"})


@given(data=st.data(), name=st.sampled_from(sorted(STOCK)), seed=seeds)
@settings(max_examples=15)
def test_there_and_back_is_the_checkpoint_that_came_bit_for_bit(data, name, seed):
    stock = STOCK[name]
    with tempfile.TemporaryDirectory() as folder:
        source, ours, back = (Path(folder, part) for part in ("source", "ours", "back"))
        stock.write(source, seed, **data.draw(VARIED.get(stock.family, st.just({}))))
        rewrite(source, data.draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=5)))
        if data.draw(st.booleans()):
            shard(source, data.draw(st.integers(500, 20_000)))
        shard_bytes = data.draw(st.integers(500, 50_000))
        report = convert(source, ours, to="replayssm", shard_bytes=shard_bytes)
        convert(ours, back, to="hf", shard_bytes=shard_bytes)
        assert_same_folder(back, source)
        assert report.nbytes == sum(report.dtypes.values())
        direct, converted = HybridLM.from_pretrained(source), HybridLM.from_pretrained(ours)
        assert direct.config == converted.config
        for key, tensor in direct.state_dict().items():
            assert_same_bits(converted.state_dict()[key], tensor, key)


def test_every_family_has_a_stock_model_to_convert() -> None:
    names = {stock.family for stock in STOCK.values()} | {"state-spaces"}  # which transformers does not have
    covered = {id(families.FAMILIES[name]) for name in names}
    assert covered == {id(family) for family in families.FAMILIES.values()}


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_a_model_that_was_trained_goes_back_with_its_new_numbers(tmp_path: Path, name: str) -> None:
    STOCK[name].write(tmp_path / "source")
    model, _ = from_pretrained(tmp_path / "source")
    model.train()(token_ids(2, 7)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "back", to="hf")
    stored, before = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source")
    assert stored.keys() == before.keys()
    assert any(not torch.equal(stored[key], before[key]) for key in stored)
    again = HybridLM.from_pretrained(tmp_path / "back").state_dict()
    for key, tensor in model.state_dict().items():
        assert_same_bits(again[key], tensor.detach(), key)


def test_rc33_what_has_no_place_is_listed_and_carried_along(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path / "source")
    extra = {"mtp.other.weight": draw(1, 24, 48).bfloat16(), "mtp.bias": draw(2, 24)}
    rewrite(tmp_path / "source", [torch.float32], **extra)
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    model, _ = from_pretrained(tmp_path / "source")
    assert sorted(model.not_loaded) == sorted(extra)
    report = convert(tmp_path / "source", tmp_path / "ours", to="replayssm", shard_bytes=2000)
    assert sorted(report.unused) == sorted(extra)
    assert report.companions == ["generation_config.json"]
    back = convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert sorted(back.unused) == sorted(extra)
    assert_same_folder(tmp_path / "back", tmp_path / "source")
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"eos_token_id": [2, 11]}'


def test_names_as_in_memory_of_transformers_come_back_as_they_were(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path / "source")
    path = tmp_path / "source" / hub.WEIGHTS
    save_file({key.replace("backbone.", "model."): tensor for key, tensor in load_file(path).items()}, path)
    convert(tmp_path / "source", tmp_path / "ours", to="replayssm")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_folder(tmp_path / "back", tmp_path / "source")


def test_experts_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / hub.WEIGHTS)
    key = next(key for key in tensors if ".experts.0." in key)
    save_file({**tensors, key: tensors[key].bfloat16()}, tmp_path / "source" / hub.WEIGHTS)
    with pytest.raises(ValueError, match="must be of one dtype") as raised:
        convert(tmp_path / "source", tmp_path / "ours", to="replayssm")
    assert key in str(raised.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_rc29_pickled_weights_are_converted_without_running_what_they_say(tmp_path: Path, sharded: bool) -> None:
    settings = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 112}
    stock = STOCK["mamba2"].build(num_hidden_layers=2, tie_word_embeddings=True, **settings)
    tensors = {key.replace("embeddings.", "embedding."): tensor for key, tensor in stock.state_dict().items()}
    assert tensors["lm_head.weight"].data_ptr() == tensors["backbone.embedding.weight"].data_ptr()
    source = tmp_path / "source"
    source.mkdir()
    (source / hub.CONFIG).write_text(json.dumps(STATE_SPACES))
    if sharded:
        head = {key: tensors.pop(key) for key in ("lm_head.weight", "backbone.embedding.weight")}
        torch.save(head, source / "pytorch_model-1.bin")
        torch.save(tensors, source / "pytorch_model-2.bin")
        files = dict.fromkeys(head, "pytorch_model-1.bin") | dict.fromkeys(tensors, "pytorch_model-2.bin")
        (source / hub.PICKLES[1]).write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(tensors, source / hub.PICKLES[0])
    with refused(FileNotFoundError, "replayssm convert"):
        from_pretrained(source)
    assert cli.main(["convert", str(source), str(tmp_path / "ours")]) == 0
    stored = load_file(tmp_path / "ours" / hub.WEIGHTS)
    assert "lm_head.weight" not in stored
    model, tokenizer = from_pretrained(tmp_path / "ours")
    assert tokenizer is None
    ids = token_ids(2, 9)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        assert model(ids).shape == expected.shape
        assert (model(ids).argmax(-1) == expected.argmax(-1)).all()
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    expected = {**tensors, **(head if sharded else {})}
    back = tensors_of(tmp_path / "back")
    assert back.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same_bits(back[key], tensor.detach(), key)
    assert json.loads((tmp_path / "back" / hub.CONFIG).read_text()) == STATE_SPACES


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("content", ["bomb", "list", "noise", "meta"])
def test_rc29_a_pickle_of_anything_else_is_refused_and_does_not_run(tmp_path: Path, content: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / hub.CONFIG).write_text(json.dumps(STATE_SPACES))
    path = source / hub.PICKLES[0]
    if content == "noise":
        path.write_bytes(b"\x80\x02noise")
    else:
        bomb, meta = Bomb(tmp_path / "marker"), torch.ones(1, device="meta")
        torch.save({"bomb": {"a": bomb}, "list": [torch.ones(1)], "meta": {"a": meta}}[content], path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin must") as raised:
        convert(source, tmp_path / "ours", to="replayssm")
    assert content in ("list", "meta") or "weights_only" in str(raised.value)
    assert not (tmp_path / "marker").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("files", [None, 5, [], {"a": 1}, {"a": 1, "b": "x"}, {"a": [1]}, {"a": "../x"}, {"a": "."}])
def test_an_index_of_pickles_that_is_none_is_refused(tmp_path: Path, files: object) -> None:
    (tmp_path / hub.CONFIG).write_text(json.dumps(STATE_SPACES))
    (tmp_path / hub.PICKLES[1]).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=r"^convert: .*pytorch_model\.bin\.index\.json must .*; got "):
        convert(tmp_path, tmp_path / "ours", to="replayssm")


def test_a_link_to_nowhere_is_in_the_way_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to(tmp_path / "nowhere")
    STOCK["mamba2"].write(tmp_path / "source")
    with pytest.raises(ValueError, match="target must not exist"):
        convert(tmp_path / "source", tmp_path / "target", to="replayssm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("layout", [None, {}, 5], ids=str)
def test_a_layout_that_loading_did_not_write_is_refused(tmp_path: Path, layout: object) -> None:
    STOCK["mamba2"].write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours", to="replayssm")
    path = tmp_path / "ours" / hub.CONFIG
    own = json.loads(path.read_text())
    path.write_text(json.dumps({**own, "source": {**own["source"], "layout": layout}}))
    with refused(ValueError, "layout"):
        HybridLM.from_pretrained(tmp_path / "ours")
        families.links_of("HybridLM.from_pretrained", json.loads(path.read_text()))


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STOCK["mamba2"].write(tmp_path / "source")
    written = []

    def fail(tensors, path, metadata):
        if written:
            raise OSError("no space left")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(writing, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(tmp_path / "source", tmp_path / "ours", to="replayssm", shard_bytes=5000)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    STOCK["mamba2"].write(tmp_path / "source")
    (tmp_path / "there").mkdir()
    own = build(config(MAMBA2, MLP, ATTENTION), dtype=torch.float32)
    own.save_pretrained(tmp_path / "own")
    for source, target, to, words in (
        ("source", "there", "replayssm", ["target", "there"]),
        ("source", "new", "hf", ["to must be replayssm"]),
        ("own", "new", "replayssm", ["to must be hf"]),
        ("own", "new", "hf", ["come from", "checkpoint"]),
        ("source", "new", "gguf", ["gguf"]),
    ):
        with pytest.raises(ValueError, match="convert: ") as raised:
            convert(tmp_path / source, tmp_path / target, to=to)
        assert all(word in str(raised.value) for word in words), raised.value
    assert not (tmp_path / "new").exists()
    model = HybridLM.from_pretrained(tmp_path / "source")
    model.mtp = MTPHead(24, 8)
    model.save_pretrained(tmp_path / "with head")
    with pytest.raises(ValueError, match=r"mtp\.safetensors"):
        convert(tmp_path / "with head", tmp_path / "new", to="hf")
    path = tmp_path / "with head" / hub.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "norm_eps": 0.5}))
    with pytest.raises(ValueError, match="norm_eps"):
        convert(tmp_path / "with head", tmp_path / "new", to="hf")


def test_converting_holds_two_files_at_most(tmp_path: Path) -> None:
    blocks = ["mamba", *["moe"] * 6]
    many = {"hidden_size": 64, "layers_block_type": blocks, "n_routed_experts": 32, "n_group": 1, "topk_group": 1}
    STOCK["nemotron_h"].write(tmp_path / "source", **many)
    shard(tmp_path / "source", 120_000)
    whole = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "source").values())
    largest = 98_304  # the up projections of a block's experts
    for source, target, to in (("source", "ours", "replayssm"), ("ours", "back", "hf")):
        with PeakMemory() as memory:
            convert(tmp_path / source, tmp_path / target, to=to, shard_bytes=120_000)
        assert memory.bytes <= 120_000 + 2 * largest
        assert memory.bytes < whole / 2  # the bound means something for this model


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STOCK["nemotron_h"].write(tmp_path / "source")
    rewrite(tmp_path / "source", [torch.bfloat16], **{"mtp.norm.weight": torch.ones(3)})
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "ours"), "--to", "replayssm"]) == 0
    said = capsys.readouterr().err
    assert "bytes of bfloat16" in said
    assert "mtp.norm.weight" in said
    assert f"{len(load_file(tmp_path / 'ours' / hub.WEIGHTS))} tensors" in said
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "ours")]) == 2
    assert "replayssm convert: target must not exist" in capsys.readouterr().err
