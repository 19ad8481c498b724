"""Folders in and out: what is written comes back bit for bit, and what is broken is refused. RC-30, RC-33a."""

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import safetensors
import torch
from budgets import assert_same_bits
from draws import DEVICE
from hybrids import ALL, MAMBA2, MLP, build, config, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import TEMPLATE, refused
from safetensors.torch import load_file, save_file

from replayssm import ReplayMamba2, hub
from replayssm.drafters import MTPHead
from replayssm.hub import writing
from replayssm.models import ByteTokenizer, HybridLM, from_pretrained

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about files; models load to the CPU")
KEPT = ("A_log", "dt_bias", "D")


def keeps_precision(key: str) -> bool:
    return key.rpartition(".")[2] in KEPT or "norm." in key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model on disk."""
    build(config(MAMBA2, MLP), dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changed: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def change_weights(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {**tensors, **{key.replace("__", "."): tensor for key, tensor in changed.items()}}
    tensors = {key: tensor.clone() for key, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, dtype, tied):
    model = build(config(*ALL, tie_embeddings=tied), dtype=dtype)
    model.save_pretrained(tmp_path / "new" / "folder")
    generator = torch.get_rng_state()
    loaded = HybridLM.from_pretrained(tmp_path / "new" / "folder")
    assert_same_bits(torch.get_rng_state(), generator, "state of the random generator")
    assert loaded.config == {**model.config, "dtype": str(dtype).removeprefix("torch.")}
    assert not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, expected in model.state_dict().items():
        assert_same_bits(loaded.state_dict()[key], expected, key)
    ids = token_ids(2, 7)
    assert_same_bits(loaded(ids).detach(), model(ids).detach())
    for parameter, original in zip(loaded.parameters(), model.parameters(), strict=True):
        assert parameter.requires_grad
        assert vars(parameter) == vars(original)  # marks such as "no weight decay"


def test_a_tied_head_is_stored_once_and_stays_tied(tmp_path):
    model = build(config(MAMBA2, MLP, tie_embeddings=True), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == model.state_dict().keys() - {"lm_head.weight"}
    loaded = HybridLM.from_pretrained(tmp_path).train()
    assert loaded.lm_head.weight is loaded.embed.weight
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded(token_ids(2, 5)).square().mean().backward()
    optimizer.step()
    assert loaded.lm_head.weight is loaded.embed.weight
    assert not torch.equal(loaded.embed.weight, model.embed.weight)
    loaded.save_pretrained(tmp_path)
    assert torch.equal(HybridLM.from_pretrained(tmp_path).lm_head.weight, loaded.embed.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_sensitive_parameters_keep_the_precision_of_the_file(folder, dtype):
    stored = load_file(folder / "model.safetensors")
    model = HybridLM.from_pretrained(folder, dtype=dtype)
    for key, tensor in model.state_dict().items():
        expected = stored[key] if keeps_precision(key) else stored[key].to(dtype)
        assert_same_bits(tensor, expected, key)
    assert model(token_ids(2, 5)).dtype == dtype
    model = HybridLM.from_pretrained(folder, dtype=torch.float64)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("load", [HybridLM.from_pretrained, partial(ReplayMamba2.from_pretrained, layer=0)])
@pytest.mark.parametrize("dtype", ["float16", torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_no_model_computes_in_is_refused(folder, load, dtype):
    with refused(ValueError, "dtype must", "bfloat16", repr(dtype)):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_nothing_is_loaded_from_is_not_written(tmp_path, dtype):
    """Cast to it, most weights would be lost."""
    model = build(config(MAMBA2, MLP), dtype=torch.float32)
    model.mtp = MTPHead(model.config["d_model"], 8)
    for write in (lambda: model.save_pretrained(tmp_path, dtype), lambda: model.save_mtp(tmp_path / "mtp", dtype)):
        with refused(ValueError, "dtype must", repr(dtype)):
            write()
    with refused(ValueError, "HybridLM: dtype must"):
        HybridLM(model.config, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_values_is_not_written(tmp_path):
    with refused(ValueError, "weights must", "embed.weight"):
        HybridLM(config(MAMBA2, MLP), device="meta").save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_weights_do_not_go_to_meta(folder):
    with refused(ValueError, "device must", "got meta"):
        HybridLM.from_pretrained(folder, device="meta")


def test_a_file_may_be_smaller_than_the_model_computes_in(tmp_path):
    model = build(config(*ALL), dtype=torch.float32)
    model.save_pretrained(tmp_path, dtype=torch.bfloat16)
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if keeps_precision(key) else torch.bfloat16), key
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = HybridLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert_same_bits(loaded.embed.weight.detach(), model.embed.weight.detach().bfloat16().float())


def test_without_a_dtype_in_the_config_the_file_decides(folder):
    settings = json.loads((folder / "config.json").read_text())
    del settings["dtype"]
    (folder / "config.json").write_text(json.dumps(settings))
    change_weights(folder, embed__weight=load_file(folder / "model.safetensors")["embed.weight"].double())
    assert HybridLM.from_pretrained(folder).lm_head.weight.dtype == torch.float64


def test_loading_under_another_default_device_gives_real_weights(folder):
    with torch.device("meta"):
        model = HybridLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for key, tensor in model.state_dict().items():
        assert_same_bits(tensor, stored[key], key)


def test_a_loaded_model_does_not_live_in_the_file(folder):
    model = HybridLM.from_pretrained(folder)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    content = (folder / "model.safetensors").read_bytes()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(len(content) // 2))
    for key, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[key], key)


def test_an_interrupted_save_leaves_the_old_files(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left")

    monkeypatch.setattr(writing, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        build(config(MAMBA2, MLP), seed=1).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_gives_a_model_and_the_tokenizer_of_its_config(tmp_path):
    build(config(MLP)).save_pretrained(tmp_path / "plain")
    build(config(MLP, vocab_size=300, tokenizer="bytes")).save_pretrained(tmp_path / "bytes")
    model, tokenizer = from_pretrained(tmp_path / "plain")
    assert isinstance(model, HybridLM)
    assert tokenizer is None
    model, tokenizer = from_pretrained(str(tmp_path / "bytes"), dtype=torch.bfloat16)
    assert isinstance(tokenizer, ByteTokenizer)
    assert model.embed.weight.dtype == torch.bfloat16


def test_the_bundled_model_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = from_pretrained("tiny")
    assert isinstance(tokenizer, ByteTokenizer)
    assert model(torch.tensor([tokenizer.encode("def ")])).isfinite().all()


def test_a_name_that_is_no_folder_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "./nowhere", "/nowhere/at/all", "a/b/c", str(tmp_path / "nowhere")):
        with refused(FileNotFoundError, name):
            from_pretrained(name)
    with refused(ValueError, "model.safetensors", "folder"):
        from_pretrained(folder / "model.safetensors")
    with refused(ValueError, "revision", "main"):
        from_pretrained(folder, revision="main")
    with refused(ValueError, "revision", "main"):
        from_pretrained("tiny", revision="main")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with refused(FileNotFoundError, name, "save_pretrained"):
        from_pretrained(folder)


def test_a_pickle_is_never_opened(folder, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "marker",))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with refused(FileNotFoundError, "pytorch_model.bin", "replayssm convert"):
        from_pretrained(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"vocab_size": 61,}', b"[" * 10**5, b"9" * 10**4],
    ids=lambda content: str(content[:20]),
)
def test_a_config_that_is_no_json_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    with refused(ValueError, "config.json"):
        from_pretrained(folder)


def test_a_config_that_is_not_understood_is_refused(folder):
    change_config(folder, rope_scaling=2.0)
    with refused(ValueError, "rope_scaling"):
        from_pretrained(folder)
    change_config(folder, model_type="of_nobody")
    with refused(NotImplementedError, "of_nobody", "mamba2"):
        from_pretrained(folder)


@given(data=st.data())
@settings(max_examples=60)
def test_a_file_cut_short_or_overwritten_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "model"
    build(config(MLP), dtype=torch.float32).save_pretrained(path)
    content = bytearray((path / "model.safetensors").read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        header = int.from_bytes(content[:8], "little")
        start = data.draw(st.integers(0, 8 + header - 8))
        content[start : start + 8] = bytes([255]) * 8
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors must") as raised:
        from_pretrained(path)
    assert TEMPLATE.match(str(raised.value))
    shutil.rmtree(path)


def test_every_tensor_that_does_not_fit_is_listed(folder):
    change_weights(
        folder,
        layers__0__mixer__A_log=torch.zeros(4),
        layers__0__mixer__dt_bias=None,
        norm__weight=None,
        layers__7__norm__weight=torch.ones(24),
    )
    with refused(
        ValueError,
        "layers.0.mixer.A_log of shape (4,) instead of (6,)",
        "no layers.0.mixer.dt_bias",
        "no norm.weight",
        "layers.7.norm.weight, which the model does not have",
        "config.json",
    ):
        from_pretrained(folder)
    change_weights(folder, embed__weight=None)
    with refused(ValueError, "no embed.weight"):
        from_pretrained(folder)


def test_a_head_in_a_tied_file_and_a_missing_one_are_refused(folder):
    change_config(folder, tie_embeddings=True)
    with refused(ValueError, "lm_head.weight"):
        from_pretrained(folder)
    change_config(folder, tie_embeddings=False)
    change_weights(folder, lm_head__weight=None)
    with refused(ValueError, "no lm_head.weight"):
        from_pretrained(folder)


def test_a_tensor_of_a_type_that_is_not_understood_is_refused(folder):
    change_weights(folder, norm__weight=torch.ones(24).to(torch.float8_e4m3fn))
    with refused(ValueError, "F8_E4M3", "BF16"):
        from_pretrained(folder)


@given(text=st.text())
def test_any_text_survives_the_byte_tokenizer(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


some_bytes = st.one_of(st.integers(0, 255), st.sampled_from(list("aé😀".encode())))


@given(ids=st.lists(some_bytes, max_size=40), data=st.data())
def test_a_stream_gives_the_whole_text_whatever_the_pieces(ids, data):
    tokenizer = ByteTokenizer()
    stream, pieces, done = tokenizer.stream(), [], 0
    while done < len(ids):
        n = data.draw(st.integers(1, 5))
        pieces.append(stream.push(ids[done : done + n]))
        done += n
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)


def test_a_stream_holds_back_half_a_character():
    stream = ByteTokenizer().stream()
    assert [stream.push([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.finish() == "\ufffd"


def test_bytes_that_are_no_text_survive_the_way_in():
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # as Python hands over an argument in Latin-1
    assert ByteTokenizer().encode(argument) == list(b"caf\xe9")


def test_ids_that_are_no_bytes_are_refused():
    for call in (ByteTokenizer().decode, ByteTokenizer().stream().push):
        for ids in ([256], [3, -1]):
            with refused(ValueError, "255", str(ids[-1])):
                call(ids)
    with refused(ValueError, "text", "bytes"):
        ByteTokenizer().encode(b"bytes")


def test_integers_in_the_place_of_weights_are_refused(folder):
    tensors = load_file(folder / hub.WEIGHTS)
    key = next(key for key in tensors if key.endswith("in_proj.weight"))
    change_weights(folder, **{key: torch.ones_like(tensors[key], dtype=torch.int32)})
    with refused(ValueError, key, "int32"):
        HybridLM.from_pretrained(folder)


def test_two_writers_leave_a_whole_model(tmp_path):
    models = [build(config(*ALL), seed=seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: models[i % 2].save_pretrained(tmp_path), range(8)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [hub.CONFIG, hub.WEIGHTS]
    loaded = HybridLM.from_pretrained(tmp_path).state_dict()
    assert any(all(torch.equal(loaded[k], v) for k, v in model.state_dict().items()) for model in models)
