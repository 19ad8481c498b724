"""Text for checkpoints with a tokenizer.json, and what is said where the package that reads it is missing."""

import json
import sys
from pathlib import Path

import pytest
from draws import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from stock_models import STOCK

from replayssm import cli, generate
from replayssm.models import FileTokenizer, from_pretrained

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about text")
TEXT = "the cat sat on the mat; die Größe der Hüte, 😀 and 日本"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of its own making, which opens each text with <s>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_survives(file, text):
    tokenizer = FileTokenizer(file)
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(2, 257), max_size=30), data=st.data())
@settings(max_examples=100)
def test_a_stream_gives_the_whole_text_whatever_the_pieces(file, ids, data):
    tokenizer = FileTokenizer(file)
    stream, pieces, done = tokenizer.stream(), [], 0
    while done < len(ids):
        n = data.draw(st.integers(1, 4))
        pieces.append(stream.push(ids[done : done + n]))
        done += n
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)


def test_a_stream_holds_back_half_a_character(file):
    tokenizer = FileTokenizer(file)
    halves = [tokenizer.encode(letter)[1:] for letter in "éx"]
    assert len(halves[0]) == 2
    stream = tokenizer.stream()
    assert [stream.push([i]) for half in halves for i in half] == ["", "é", "x"]


@pytest.fixture
def folder(file, tmp_path):
    STOCK["mamba2"].write(tmp_path, vocab_size=320)
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def test_a_checkpoint_gives_its_tokenizer_and_where_texts_end(folder):
    model, tokenizer = from_pretrained(folder)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.eos == [2]  # of config.json
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert from_pretrained(folder)[1].eos == [1, 7]
    tokens = generate(model, [tokenizer.encode("the cat")], max_new_tokens=5)
    assert isinstance(tokenizer.decode(tokens[0].tolist()), str)


def test_the_command_continues_a_text_of_a_checkpoint(folder, capsys):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    arguments = ["generate", "the cat", "--model", str(folder), "--max-new-tokens", "6"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    model, tokenizer = from_pretrained(folder)
    ids = tokenizer.encode("the cat")
    tokens = generate(model, [ids], max_new_tokens=6, eos=1, vocab_size=tokenizer.vocab_size)[0].tolist()
    assert printed == "the cat" + tokenizer.decode([token for token in tokens if token != 1]) + "\n"
    assert cli.main([*arguments, "--compare"]) == 0


def test_without_the_package_ids_do_and_text_names_the_extra(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    model, tokenizer = from_pretrained(folder)
    assert generate(model, [[3, 4]], max_new_tokens=3).shape == (1, 3)
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([3]), lambda: tokenizer.vocab_size):
        with pytest.raises(ImportError, match=r"replayssm\[tokenizers\]"):
            use()
    assert cli.main(["generate", "the cat", "--model", str(folder)]) == 2
    assert "replayssm[tokenizers]" in capsys.readouterr().err


def test_a_file_that_is_no_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    _, tokenizer = from_pretrained(folder)
    with refused(ValueError, "tokenizer.json"):
        tokenizer.encode("a")
    with refused(ValueError, "text", "bytes"):
        tokenizer.encode(b"a")
