"""A checkpoint of a known family as a folder of this library, and back: python examples/convert.py SOURCE TARGET

SOURCE is a folder, as transformers' save_pretrained writes it, or org/name of a repository of the Hub. from_pretrained
takes both as they are; a conversion is for pickled weights, for a copy to train, and for handing a trained one back.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from replayssm import generate
from replayssm.models import convert, from_pretrained

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("source")
parser.add_argument("target")
options = parser.parse_args()

report = convert(options.source, options.target, to="replayssm")
print(f"{options.target}: {report.tensors} tensors, {dict(report.dtypes)} bytes, {len(report.unused)} carried along")

model, tokenizer = from_pretrained(options.target)
kinds = [block["type"] for block in model.config["layers"]]
print(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))

ids = tokenizer.encode("The state of a") if tokenizer is not None else torch.arange(1, 9).tolist()
tokens = generate(model, [ids], max_new_tokens=16)[0].tolist()
print(tokenizer.decode(tokens) if tokenizer is not None else tokens)

with tempfile.TemporaryDirectory() as folder:
    back = convert(options.target, Path(folder, "back"), to="hf")
    config = json.loads(Path(folder, "back", "config.json").read_text())
    print(f"and back: {back.tensors} tensors of a {config.get('model_type', 'state-spaces')} checkpoint, bit for bit")
