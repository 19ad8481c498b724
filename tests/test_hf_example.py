"""The example for transformers users, on a tiny model."""

import importlib.util
from pathlib import Path

import torch
from hf_models import FAMILIES, LATEST, VOCAB

EXAMPLE = Path(__file__).parent.parent / "examples" / "hf_generate.py"


def test_the_example_prints_what_replays_and_what_the_unpatched_model_says(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{token}": token for token in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    model = FAMILIES["qwen3_5" if LATEST else "bamba"].build(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = "w5 w9 w13 w5 w9 w13 w5 w9"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0])

    spec = importlib.util.spec_from_file_location("hf_generate", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main([str(tmp_path), prompt, "--max-new-tokens", "20"])
    assert capsys.readouterr().out == f"2 of 2 mixers replay\n{expected}\n"
