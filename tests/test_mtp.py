"""The head for further tokens: its file, whole or refused (RC-15), and what it drafts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from budgets import assert_same_bits
from draws import DEVICE, draw
from hybrids import ALL, MAMBA2, MLP, build, config, token_ids
from refusals import refused
from safetensors.torch import load_file, save_file

from replayssm import Acceptance, generate
from replayssm.drafters import MTPHead
from replayssm.models import HybridLM, from_pretrained


def with_head(dtype: torch.dtype = torch.float32) -> HybridLM:
    model = build(config(MAMBA2, MLP), dtype=dtype)
    model.mtp = MTPHead(24, 31, device=DEVICE, dtype=dtype)
    for number, parameter in enumerate(model.mtp.parameters()):
        parameter.data.copy_(draw(number, *parameter.shape))
    return model


def test_a_head_is_saved_and_loaded_with_its_model_bit_for_bit(tmp_path: Path) -> None:
    model = with_head()
    model.save_pretrained(tmp_path)
    loaded = HybridLM.from_pretrained(tmp_path, device=DEVICE)
    assert loaded.mtp is not None
    assert not loaded.mtp.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for (key, tensor), other in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert_same_bits(other, tensor, key)
    model.save_pretrained(tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "mtp.safetensors")
    assert {key for key, tensor in stored.items() if tensor.dtype == torch.float32} == {
        "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "mlp_norm.weight", "norm.weight",
    }  # fmt: skip
    assert HybridLM.from_pretrained(tmp_path, dtype=torch.float64).mtp.fc.weight.dtype == torch.float64


def test_a_head_does_not_stay_beside_other_weights(tmp_path: Path) -> None:
    with_head().save_pretrained(tmp_path)
    build(config(MAMBA2, MLP), dtype=torch.float32).save_pretrained(tmp_path)
    assert HybridLM.from_pretrained(tmp_path).mtp is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fc.weight": None}, ["no fc.weight"]),
        ({"up_proj.weight": None}, ["no up_proj.weight"]),
        ({"extra": torch.ones(1)}, ["extra, which the model does not have"]),
        ({"norm.weight": torch.ones(25)}, ["norm.weight of shape (25,) instead of (24,)"]),
    ],
    ids=str,
)
def test_rc15_a_head_that_is_not_whole_is_refused_and_says_what_is_wrong(tmp_path, changed, words):
    with_head().save_pretrained(tmp_path)
    file = tmp_path / "mtp.safetensors"
    save_file({key: x for key, x in {**load_file(file), **changed}.items() if x is not None}, file)
    with refused(ValueError, "HybridLM.load_mtp", str(file), *words):
        HybridLM.from_pretrained(tmp_path)


def test_a_corrupt_head_is_refused(tmp_path: Path) -> None:
    with_head().save_pretrained(tmp_path)
    file = tmp_path / "mtp.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with refused(ValueError, str(file), "corrupt"):
        HybridLM.from_pretrained(tmp_path)


def test_a_model_without_a_head_has_none_to_save(tmp_path: Path) -> None:
    with refused(ValueError, "HybridLM.save_mtp", "MTPHead"):
        build(config(MAMBA2, MLP)).save_mtp(tmp_path / "head.safetensors")


def test_a_head_that_learned_a_rule_drafts_by_it_to_the_last_token():
    """Right drafts are accepted, so hidden states, tokens and depths fit together."""
    torch.manual_seed(0)
    model = build(config(*ALL), dtype=torch.float32)
    prompts = token_ids(16, 5).tolist()
    text = generate(model, prompts, max_new_tokens=24)
    ids = torch.cat([torch.tensor(prompts, device=DEVICE), text], 1)
    with torch.no_grad():
        _, hidden = model(ids[:, :-1], return_hidden=True)
    head = MTPHead(24, 256, device=DEVICE)
    optimizer = torch.optim.AdamW(head.parameters(), 5e-3)
    for _ in range(150):  # learns these texts by heart
        optimizer.zero_grad()
        h, loss, length = hidden[:, 4:], 0.0, ids.shape[1] - 5
        for depth in (1, 2):
            h = head(h[:, : length - depth], model.embed(ids[:, 4 + depth : -1]).detach())
            loss = loss + F.cross_entropy(model.lm_head(h).flatten(0, 1), ids[:, 5 + depth :].flatten())
        loss.backward()
        optimizer.step()
    model.mtp, acceptance = head, Acceptance()
    again = generate(model, prompts, max_new_tokens=24, drafter="mtp", num_drafts=2, acceptance=acceptance)
    assert (again == text).float().mean() > 0.9  # fp32: a tie may fall otherwise
    rates = [a / p for a, p in zip(acceptance.accepted, acceptance.proposed, strict=True)]
    assert rates[0] > 0.6, rates
    assert rates[1] > 0.3, rates


def test_the_training_script_trains_saves_and_measures(tmp_path: Path) -> None:
    file = tmp_path / "mtp.safetensors"
    script = Path(__file__).resolve().parent.parent / "examples" / "train_mtp.py"
    command = [sys.executable, script, "--smoke", "--device", "cpu", "--out", file]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert file.stat().st_size <= 2_000_000
    assert "bits from the model for drafts 1 to 4" in printed
    assert "held out, temperature 0.7, mtp: drafts 1 to 4 accepted" in printed
    model, _ = from_pretrained("tiny")
    model.load_mtp(file)
