"""The head for further tokens that a Nemotron-H checkpoint brings, against blocks of transformers. RC-15."""

import json
from pathlib import Path

import oracles
import pytest
import torch
from budgets import assert_e32, e32
from draws import DEVICE, draw
from hybrids import token_ids
from refusals import refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK
from test_convert import assert_same_folder
from torch import Tensor, nn

from replayssm import Acceptance, ReplayStateCache, generate
from replayssm.models import HybridLM, convert, from_pretrained

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
D = 24  # features of the stock model


class StockHead(nn.Module):
    """The head out of transformers' own blocks; transformers itself drops it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        config = type(model.config)(**{**model.config.to_dict(), "layers_block_type": ["full_attention", "moe"]})
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the other one has no fp64
        block, norm = type(model.model.layers[0]), type(model.model.norm_f)
        self.layers = nn.ModuleList(block(config, i) for i in range(2))
        self.layers[0].enorm, self.layers[0].hnorm = norm(D, eps=1e-5), norm(D, eps=1e-5)
        self.layers[0].eh_proj = nn.Linear(2 * D, D, bias=False)
        self.layers[1].final_layernorm = norm(D, eps=1e-5)
        with torch.no_grad():
            oracles.redraw(self, 5)

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint holds them: each expert by itself."""
        stored = {}
        for key, tensor in self.state_dict().items():
            if ".experts." in key:
                stored |= {
                    f"mtp.{key.replace('.experts.', f'.experts.{i}.')}.weight": expert.clone()
                    for i, expert in enumerate(tensor)
                }
            else:
                stored[f"mtp.{key}"] = tensor
        return stored

    @torch.no_grad()
    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], -1))
        t = x.shape[1]
        mask = torch.full((1, 1, t, t), float("-inf"), dtype=x.dtype).triu(1)
        return last.final_layernorm(last(first(x, attention_mask=mask)))


def write(folder: Path) -> StockHead:
    """A checkpoint with a head."""
    model = STOCK["nemotron_h"].write(folder, num_nextn_predict_layers=1)
    head = StockHead(model)
    save_file({**load_file(folder / "model.safetensors"), **head.tensors()}, folder / "model.safetensors")
    return head


def test_the_head_is_loaded_and_computes_what_blocks_of_transformers_do(tmp_path: Path) -> None:
    stock = write(tmp_path)
    model = HybridLM.from_pretrained(tmp_path)
    assert not model.not_loaded
    hidden, embedding = draw(1, 2, 11, D), draw(2, 2, 11, D)
    plain, exact = stock(hidden.float(), embedding.float()), stock.double()(hidden, embedding)
    cache = ReplayStateCache(model.mtp, 2, max_seqlen=16, step_tokens=2)
    steps = [5, 2, 1, 2, 1]
    pieces = zip(hidden.float().split(steps, 1), embedding.float().split(steps, 1), strict=True)
    with torch.no_grad():
        assert_e32(model.mtp(hidden.float(), embedding.float()), exact, e32(plain, exact), "hidden states of the head")
        outputs = []
        for piece in pieces:
            outputs.append(model.mtp(*piece, cache))
            cache.commit()
    assert_e32(torch.cat(outputs, 1), exact, e32(plain, exact), "hidden states of the head, step by step")


def test_drafts_of_the_head_leave_the_text_as_it_is(tmp_path: Path) -> None:
    write(tmp_path)
    model, _ = from_pretrained(tmp_path)
    ids, acceptance = token_ids(2, 6), Acceptance()
    plain = generate(model, ids, max_new_tokens=24)
    drafted = generate(model, ids, max_new_tokens=24, drafter="mtp", num_drafts=3, acceptance=acceptance)
    assert drafted.tolist() == plain.tolist()
    assert acceptance.proposed[0] > 0


def test_rc15_the_head_survives_a_conversion_and_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "ours", to="replayssm")
    assert not report.unused
    assert HybridLM.from_pretrained(tmp_path / "ours").mtp is not None
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_folder(tmp_path / "back", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    for gone in ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.experts.2.up_proj.weight"):
        save_file({key: tensor for key, tensor in tensors.items() if key != gone}, file)
        with refused(ValueError, f"no {gone}"):
            HybridLM.from_pretrained(tmp_path / "source")


def test_a_pattern_of_the_head_is_read_however_it_is_spelled(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    listed = HybridLM.from_pretrained(tmp_path).config["mtp"]
    del settings["mtp_layers_block_type"]
    path.write_text(json.dumps({**settings, "mtp_hybrid_override_pattern": "*E"}))
    assert HybridLM.from_pretrained(tmp_path).config["mtp"] == listed
    path.write_text(json.dumps({**settings, "mtp_hybrid_override_pattern": "*X"}))
    with refused(ValueError, "mtp_hybrid_override_pattern", "*X"):
        HybridLM.from_pretrained(tmp_path)
