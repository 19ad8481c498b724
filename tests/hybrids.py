"""Small hybrid models for the tests: odd sizes, every parameter re-drawn, embeddings of scale 1."""

import oracles
import torch
from draws import DEVICE, draw
from torch import Tensor

from replayssm import ReplayStateCache
from replayssm.models import HybridLM

VOCAB = 61
MAMBA2 = {"type": "mamba2", "nheads": 6, "headdim": 5, "d_state": 7, "ngroups": 2}
GATED_DELTANET = {"type": "gated_deltanet", "nheads": 6, "headdim": 5, "d_state": 7, "ngroups": 2}
KDA = {"type": "kda", "nheads": 3, "headdim": 5, "d_state": 7, "lower_bound": -5.0}
ATTENTION = {"type": "attention", "nheads": 6, "headdim": 4, "kv_heads": 2}
WINDOWED = {"type": "attention", "nheads": 4, "headdim": 6, "window": 5, "rope_theta": 1e4}
MLA = {"type": "mla", "nheads": 3, "headdim": 5, "d_key": 4, "d_shared": 3, "kv_rank": 7}
MLP = {"type": "mlp", "hidden": 31}
ALL = [MAMBA2, ATTENTION, GATED_DELTANET, MLP, KDA, WINDOWED, MLA]


def config(*layers: dict[str, object], **changed: object) -> dict[str, object]:
    return {
        "model_type": "replayssm_hybrid",
        "vocab_size": VOCAB,
        "d_model": 24,
        "tie_embeddings": False,
        "norm_eps": 1e-5,
        "layers": [dict(layer) for layer in layers or ALL],
        **changed,
    }


def build(settings: dict[str, object], dtype: torch.dtype = torch.float64, seed: int = 0) -> HybridLM:
    model = HybridLM(settings, device=DEVICE, dtype=dtype)
    oracles.redraw(model, seed)
    with torch.no_grad():
        model.embed.weight.copy_(draw(seed, *model.embed.weight.shape))
    return model


def token_ids(batch: int, t: int, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (batch, t), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@torch.no_grad()
def feed(model: HybridLM, cache: ReplayStateCache, ids: Tensor, pieces: list[int]) -> Tensor:
    """Logits of ids, fed piece by piece and all committed."""
    outputs = []
    for piece in ids.split(pieces, 1):
        outputs.append(model(piece, cache))
        cache.commit()
    return torch.cat(outputs, 1)


@torch.no_grad()
def greedy(model: HybridLM, cache: ReplayStateCache, logits: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Continue every row from its last logits (batch, vocab): the ids (batch, steps) and their logits."""
    ids, seen = [], []
    for _ in range(steps):
        ids.append(logits.argmax(-1))
        logits = model(ids[-1].unsqueeze(1), cache)[:, -1]
        cache.commit()
        seen.append(logits)
    return torch.stack(ids, 1), torch.stack(seen, 1)


def poison_dead_kv(cache: ReplayStateCache) -> None:
    """NaN in every slot of attention's keys and values that holds no committed token."""
    for name, tensor in cache.tensors().items():
        if ".kv." not in name:
            continue
        slots = tensor.shape[1]
        slot = torch.arange(slots, device=tensor.device)
        last = cache.seqlen.unsqueeze(1) - 1
        dead = last - (last - slot).remainder(slots) < 0
        tensor[dead] = float("nan")
