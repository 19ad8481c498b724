"""Heads for further tokens of Qwen's checkpoints: against transformers' own layers, over their cache, and as drafters.

transformers has no such head and drops it; its parts are put together here.
"""

import importlib
from pathlib import Path

import pytest
import torch
from budgets import assert_e32, assert_e64, assert_same_bits, e32
from draws import DEVICE, draw, seeds
from hybrids import VOCAB, build, config, poison_dead_kv, token_ids
from hypothesis import given
from hypothesis import strategies as st
from oracles import redraw
from refusals import refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK
from torch import Tensor, nn

from replayssm import Acceptance, ReplayStateCache, generate
from replayssm.drafters import MTP, MTPHead
from replayssm.models import HybridLM, convert

GATED = {"type": "attention", "nheads": 6, "headdim": 4, "kv_heads": 2, "rope_theta": 100.0, "gated": True}
MTP_BLOCKS = [{**GATED, "qk_norm": True}, {"type": "mlp", "hidden": 31}]
STOCKS = ["qwen3_5 text", "qwen3_5", "qwen3_5_moe text", "qwen3_next"]
on_the_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")


class StockHead(nn.Module):
    """The head, out of transformers' modules."""

    def __init__(self, family: str, text_config: object):
        super().__init__()
        models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[family]
        rotary = "RotaryEmbedding" if family == "qwen3_next" else "TextRotaryEmbedding"
        text_config._attn_implementation = text_config._experts_implementation = "eager"
        size, norm = text_config.hidden_size, getattr(models, f"{prefix}RMSNorm")
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(size, eps=text_config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * size, size, bias=False)
        index = text_config.layer_types.index("full_attention")
        text_config.mlp_only_layers = []
        self.layers = nn.ModuleList([getattr(models, f"{prefix}DecoderLayer")(text_config, layer_idx=index)])
        self.rotary = getattr(models, f"{prefix}{rotary}")(text_config)
        with torch.no_grad():
            redraw(self, 9)
            for parameter in self.parameters():
                if parameter.ndim == 3:
                    parameter.mul_(parameter.shape[-1] ** -0.5)

    @torch.no_grad()
    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        t = x.shape[1]
        places = self.rotary(x, torch.arange(t).unsqueeze(0))
        mask = torch.full((1, 1, t, t), -torch.inf, dtype=x.dtype).triu(1)
        return self.norm(self.layers[0](x, position_embeddings=places, attention_mask=mask))


def write(folder: Path, name: str) -> StockHead:
    """A checkpoint with a head, as Qwen publishes it."""
    stock = STOCK[name].write(folder)
    head = StockHead(STOCK[name].family, stock.config.get_text_config())
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.{key}": value.detach().clone() for key, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return head


@on_the_cpu
@pytest.mark.parametrize("name", STOCKS)
def test_a_head_with_the_weights_of_a_checkpoint_equals_one_of_transformers_parts(tmp_path: Path, name: str) -> None:
    stock = write(tmp_path, name)
    model = HybridLM.from_pretrained(tmp_path)
    assert not [key for key in model.not_loaded if "visual" not in key]
    hidden, embedding = draw(1, 2, 13, 24), draw(2, 2, 13, 24)
    with torch.no_grad():
        ours, theirs = model.mtp(hidden.float(), embedding.float()), stock(hidden.float(), embedding.float())
    exact = stock.double()(hidden, embedding)
    assert_e32(ours, exact, e32(theirs, exact))


@on_the_cpu
@pytest.mark.parametrize("name", STOCKS)
def test_a_head_goes_through_folders_of_ours_and_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    write(tmp_path / "source", name)
    convert(tmp_path / "source", tmp_path / "ours", to="replayssm")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    source, back = (load_file(tmp_path / part / "model.safetensors") for part in ("source", "back"))
    assert {key for key in source if key.startswith("mtp.")} <= back.keys()
    for key, tensor in source.items():
        if "visual" not in key:
            assert_same_bits(back[key], tensor, key)
    first, again = (HybridLM.from_pretrained(tmp_path / part) for part in ("source", "ours"))
    first.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "mtp.safetensors").exists()
    for other in (again, HybridLM.from_pretrained(tmp_path / "saved")):
        for key, tensor in first.state_dict().items():
            assert_same_bits(other.state_dict()[key], tensor, key)


@on_the_cpu
def test_a_head_of_several_layers_is_carried_along_and_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_5 text")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.layers.1.input_layernorm.weight"] = tensors["mtp.layers.0.input_layernorm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = HybridLM.from_pretrained(tmp_path)
    assert model.mtp is None
    assert set(model.not_loaded) == {key for key in tensors if key.startswith("mtp.")}


def with_head(seed: int = 0) -> HybridLM:
    entries = [{"type": "gated_deltanet", "nheads": 6, "headdim": 5, "d_state": 7, "ngroups": 2}, *MTP_BLOCKS]
    return build(config(*entries, norm_plus_one=True, mtp=MTP_BLOCKS), seed=seed)


@given(pieces=st.lists(st.integers(1, 6), min_size=1, max_size=6), step_tokens=st.integers(1, 4), seed=seeds)
def test_a_head_over_its_cache_equals_one_call(pieces, step_tokens, seed):
    head, t = with_head().mtp, sum(pieces)
    hidden, embedding = draw(seed, 2, t, 24), draw(seed + 1, 2, t, 24)
    cache = ReplayStateCache(head, 2, window=step_tokens, step_tokens=step_tokens, max_seqlen=t)
    outputs = []
    with torch.no_grad():
        for pair in zip(hidden.split(pieces, 1), embedding.split(pieces, 1), strict=True):
            poison_dead_kv(cache)
            outputs.append(head(*pair, cache))
            cache.commit()
        assert_e64(torch.cat(outputs, 1), head(hidden, embedding))


def test_the_cache_of_a_model_passes_over_its_head():
    model = with_head()
    cache = ReplayStateCache(model, 2, max_seqlen=9)
    assert not [name for name in cache.tensors() if "mtp" in name]
    with torch.no_grad():
        model(token_ids(2, 5), cache)
    cache.commit()
    assert "layers.0.mixer.kv.k" in ReplayStateCache(model.mtp, 2, max_seqlen=9).tensors()


class Watched(MTP):
    """Keeps what it was asked and what it said."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def propose(self, context, num):
        drafts, distributions = super().propose(context, num)
        self.seen.append((context.tokens.clone(), context.lengths.clone(), drafts))
        return drafts, distributions


@torch.no_grad()
def expected_drafts(model: HybridLM, text: Tensor, num: int) -> list[int]:
    """What the head makes of a whole text (n,), without any cache."""
    _, hidden = model(text[:-1].unsqueeze(0), return_hidden=True)
    after, drafts = text[1:], []
    for _ in range(num):
        last = model.mtp(hidden, model.embed(after).unsqueeze(0))[:, -1:]
        drafts.append(int(model.lm_head(last).argmax()))
        hidden, after = torch.cat([hidden, last], 1), torch.cat([after, after.new_tensor(drafts[-1:])])
    return drafts


@pytest.mark.parametrize("piece", [2048, 4], ids=["one piece", "pieces"])
def test_drafts_are_those_of_a_head_that_has_read_the_whole_text(monkeypatch, piece):
    from replayssm import prefill

    monkeypatch.setattr(prefill, "PREFILL_PIECE", piece)
    model, watched, num, new = with_head(), Watched(), 3, 14
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in (9, 1, 6)]
    texts = generate(model, prompts, max_new_tokens=new, drafter=watched, num_drafts=num, cuda_graphs=False)
    assert torch.equal(texts, generate(model, prompts, max_new_tokens=new))
    checked = 0
    for tokens, lengths, drafts in watched.seen:
        for row, length in enumerate(lengths.tolist()):
            if length < len(prompts[row]) + new:
                assert drafts[row].tolist() == expected_drafts(model, tokens[row, :length], num)
                checked += 1
    assert checked > 2 * new


def test_a_head_that_copies_the_model_drafts_what_the_model_says():
    """All blocks of model and head add nothing and the head's fc takes the embedding, so both see the last token."""
    model = build(config({"type": "mlp", "hidden": 8}, norm_plus_one=True, mtp=MTP_BLOCKS))
    with torch.no_grad():
        for block in [*model.layers, *model.mtp.layers]:
            for parameter in block.mixer.parameters():
                parameter.zero_()
        model.mtp.fc.weight.copy_(torch.eye(24, 48))
        model.mtp.norm.weight.copy_(model.norm.weight)
        model.mtp.pre_fc_norm_embedding.weight.zero_()
    acceptance = Acceptance()
    generate(model, token_ids(3, 5), max_new_tokens=13, drafter="mtp", num_drafts=3, acceptance=acceptance)
    assert acceptance.accepted == acceptance.proposed
    assert sum(acceptance.proposed) > 0


def test_drawn_drafts_come_with_their_distributions():
    model, acceptance = with_head(), Acceptance()
    tokens = generate(model, token_ids(2, 5), max_new_tokens=9, temperature=1.0, seed=3, drafter="mtp", num_drafts=2,
                      acceptance=acceptance)  # fmt: skip
    assert tokens.shape == (2, 9)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_what_a_head_cannot_be_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, "mtp[0]", "unknown key 'hidden_size'"):
        build(config(mtp=[{**GATED, "hidden_size": 3}]))
    with refused(ValueError, "mtp must", "got []"):
        build(config(mtp=[]))
    with refused(ValueError, "HybridLM.save_mtp", "MTPDecoder"):
        with_head().save_mtp(tmp_path / "head.safetensors")
    head, x = with_head().mtp, draw(1, 1, 1, 24)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        head(x, x, ReplayStateCache(head, 1, max_seqlen=2))


def test_another_head_takes_the_place_of_a_checkpoints_own(tmp_path: Path) -> None:
    model = with_head()
    model.mtp = MTPHead(24, 7, device=DEVICE, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    assert isinstance(HybridLM.from_pretrained(tmp_path).mtp, MTPHead)
