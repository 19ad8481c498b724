"""A hybrid of one's own, trained on this file, saved, loaded and continued: python examples/compose.py [FOLDER]

Every block is a residual one. The three replay layers and attention mix tokens; an MLP works on each by itself.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from replayssm import generate
from replayssm.models import HybridLM, from_pretrained

STEPS, BATCH, LENGTH = 30, 4, 64

config = {
    "model_type": "replayssm_hybrid",
    "vocab_size": 256,
    "d_model": 64,
    "tie_embeddings": True,
    "norm_eps": 1e-5,
    "tokenizer": "bytes",
    "layers": [
        {"type": "mamba2", "nheads": 4, "headdim": 32, "d_state": 32},
        {"type": "mlp", "hidden": 128},
        {"type": "gated_deltanet", "nheads": 4, "headdim": 16, "d_state": 16, "ngroups": 2},
        {"type": "mlp", "hidden": 128},
        {"type": "kda", "nheads": 4, "headdim": 16},
        {"type": "attention", "nheads": 4, "headdim": 16, "window": 32, "rope_theta": 1e4},
        {"type": "mlp", "hidden": 128},
    ],
}
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
text = torch.tensor(list(Path(__file__).read_bytes()))
torch.manual_seed(0)

model = HybridLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    first = torch.randint(len(text) - LENGTH, (BATCH, 1))
    ids = text[first + torch.arange(LENGTH)]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step}: {loss.item() / torch.log(torch.tensor(2.0)).item():.2f} bits a byte")

model.save_pretrained(folder)
loaded, tokenizer = from_pretrained(folder)
assert tokenizer is not None
prompt = "import "
tokens = generate(loaded, [tokenizer.encode(prompt)], max_new_tokens=40, window=16)
print(f"{folder}: {prompt}{tokenizer.decode(tokens[0].tolist())}")
