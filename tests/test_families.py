"""Checkpoints of other libraries: their configs, keys and numbers, against transformers itself. RC-30, RC-32, RC-36."""

import json
from pathlib import Path

import pytest
import torch
from budgets import assert_e32, assert_same_bits, e32, rms
from draws import DEVICE
from refusals import refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK, VOCAB, stock_decoded, stock_logits

from replayssm import ReplayStateCache, generate
from replayssm.models import HybridLM, families, from_pretrained
from replayssm.models.loading import keeps_precision

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
PUBLISHED = {
    name: (source, family)
    for family in {id(family): family for family in families.FAMILIES.values()}.values()
    for name, source in family.PUBLISHED.items()
}
stocks = pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)


def token_ids(batch: int, t: int) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, t), generator=torch.Generator().manual_seed(7))


@stocks
def test_logits_equal_those_of_transformers(tmp_path: Path, stock) -> None:
    ids = token_ids(2, 37)
    theirs = stock_logits(stock.write(tmp_path), ids)
    model, tokenizer = from_pretrained(tmp_path)
    assert tokenizer is None
    assert not model.not_loaded
    with torch.no_grad():
        ours = model(ids)
        exact = HybridLM.from_pretrained(tmp_path, dtype=torch.float64)(ids)
    assert_e32(ours, exact, e32(theirs, exact), "logits")


@stocks
def test_logits_in_fp64_equal_those_of_transformers(tmp_path: Path, stock) -> None:
    ids = token_ids(2, 37)
    model = stock.build(dtype=torch.float64)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = HybridLM.from_pretrained(tmp_path)(ids)
    assert ours.dtype == torch.float64
    # transformers rounds to fp32 here and there also in fp64: it may miss ours by what it misses in fp32, without slack
    allowed = rms(stock_logits(stock.build(), ids).double() - ours)
    assert_e32(stock_logits(model, ids), ours, allowed, "logits in fp64")


@stocks
def test_decoding_equals_that_of_transformers(tmp_path: Path, stock) -> None:
    ids, prompt = token_ids(2, 24), 9
    theirs = stock_decoded(stock.write(tmp_path), ids, prompt)

    def decode(dtype: torch.dtype) -> torch.Tensor:
        model = HybridLM.from_pretrained(tmp_path, dtype=dtype)
        cache = ReplayStateCache(model, 2, window=4, max_seqlen=24)
        outputs = []
        for piece in ids.split([prompt, *[1] * (24 - prompt)], 1):
            outputs.append(model(piece, cache))
            cache.commit()
        return torch.cat(outputs, 1)

    with torch.no_grad():
        exact, ours = decode(torch.float64), decode(torch.float32)
    assert_e32(ours, exact, e32(theirs, exact), "decoded logits")


@stocks
def test_a_left_padded_batch_equals_that_of_transformers(tmp_path: Path, stock) -> None:
    ids, mask = token_ids(3, 13), torch.ones(3, 13, dtype=torch.long)
    mask[0, :5], mask[2, :1] = 0, 0
    theirs = stock_logits(stock.write(tmp_path), ids, mask)
    real = mask.bool()
    with torch.no_grad():
        ours = HybridLM.from_pretrained(tmp_path)(ids, attention_mask=mask)[real]
        exact = HybridLM.from_pretrained(tmp_path, dtype=torch.float64)(ids, attention_mask=mask)[real]
    assert_e32(ours, exact, e32(theirs[real], exact), "logits of a padded batch")


@stocks
def test_greedy_texts_are_those_of_transformers(tmp_path: Path, stock) -> None:
    ids = token_ids(2, 6)
    theirs = stock.write(tmp_path).generate(ids, do_sample=False, max_new_tokens=20, pad_token_id=0)[:, 6:]
    ours = generate(HybridLM.from_pretrained(tmp_path), ids, max_new_tokens=20, window=5)
    assert ours.tolist() == theirs.tolist()


@stocks
def test_rc30_every_tensor_is_that_of_the_file(tmp_path: Path, stock) -> None:
    stock.write(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for dtype in (None, torch.bfloat16):
        generator = torch.get_rng_state()
        model = HybridLM.from_pretrained(tmp_path, dtype=dtype)
        assert_same_bits(torch.get_rng_state(), generator, "state of the random generator")
        own, seen = model.state_dict(), set()
        for link in families.links_of("HybridLM", model.config):
            seen |= set(link.ours)
            back = link.form.theirs([own[key] for key in link.ours])
            for key, tensor in zip(link.theirs, back, strict=True):
                expected = stored.pop(key) if dtype is None else tensor.to(tensor.dtype)
                kept = dtype is None or keeps_precision(link.ours[0])
                assert tensor.dtype == (torch.float32 if kept else dtype), key
                assert_same_bits(tensor, expected, key)
        assert seen == own.keys() - ({"lm_head.weight"} if model.config["tie_embeddings"] else set())
    assert not stored


@pytest.mark.parametrize("name", PUBLISHED)
def test_links_of_a_published_geometry_cover_the_model_exactly(name: str) -> None:
    source, _ = PUBLISHED[name]
    config = families.adopt("HybridLM", source, {})
    model = HybridLM(config, device="meta", dtype=torch.bfloat16)
    links = families.links_of("HybridLM", config)
    ours = [key for link in links for key in link.ours]
    theirs = [key for link in links for key in link.theirs]
    tied = {"lm_head.weight"} if config["tie_embeddings"] else set()
    assert sorted(ours) == sorted(model.state_dict().keys() - tied)
    assert len(set(theirs)) == len(theirs)


# (rows of in_proj, channels of the convolution, inner width, hidden), layers by kind, some keys of the file
SHAPES = {
    "Nemotron-3-Nano-4B": {
        "backbone.layers.0.mixer.in_proj.weight": (17504, 3136),
        "backbone.layers.0.mixer.conv1d.weight": (9728, 1, 4),
        "backbone.layers.12.mixer.q_proj.weight": (5120, 3136),
        "backbone.layers.12.mixer.k_proj.weight": (1024, 3136),
        "backbone.layers.41.mixer.up_proj.weight": (12544, 3136),
        "lm_head.weight": (131072, 3136),
    },
    "Nemotron-3-Nano-30B-A3B": {
        "backbone.embeddings.weight": (131072, 2688),
        "backbone.layers.0.mixer.in_proj.weight": (10304, 2688),
        "backbone.layers.0.mixer.conv1d.weight": (6144, 1, 4),
        "backbone.layers.0.mixer.out_proj.weight": (2688, 4096),
        "backbone.layers.1.mixer.experts.127.up_proj.weight": (1856, 2688),
        "backbone.layers.1.mixer.experts.0.down_proj.weight": (2688, 1856),
        "backbone.layers.1.mixer.shared_experts.up_proj.weight": (3712, 2688),
        "backbone.layers.1.mixer.gate.e_score_correction_bias": (128,),
        "backbone.norm_f.weight": (2688,),
    },
    "Nemotron-3-Super-120B-A12B": {
        "backbone.layers.0.mixer.in_proj.weight": (18560, 4096),
        "backbone.layers.0.mixer.conv1d.weight": (10240, 1, 4),
        "backbone.layers.1.mixer.fc1_latent_proj.weight": (1024, 4096),
        "backbone.layers.1.mixer.experts.511.up_proj.weight": (2688, 1024),
        "backbone.layers.1.mixer.shared_experts.down_proj.weight": (4096, 5376),
    },
    "mamba-codestral-7B": {
        "backbone.embeddings.weight": (32768, 4096),
        "backbone.layers.63.mixer.in_proj.weight": (18560, 4096),
        "backbone.layers.0.mixer.norm.weight": (8192,),
    },
}
SHAPES |= {
    "mamba2-130m": {
        "backbone.embedding.weight": (50288, 768),
        "backbone.layers.23.mixer.in_proj.weight": (3352, 768),
    },
    "mamba2-370m": {"backbone.layers.0.mixer.in_proj.weight": (4384, 1024)},
}
LAYERS = {
    "Nemotron-3-Nano-4B": {"mamba2": 21, "attention": 4, "mlp": 17},
    "Nemotron-3-Nano-30B-A3B": {"mamba2": 23, "attention": 6, "moe": 23},
    "Nemotron-3-Super-120B-A12B": {"mamba2": 40, "attention": 8, "moe": 40},
}


@pytest.mark.parametrize("name", SHAPES)
def test_rc32_shapes_of_published_checkpoints_are_those_of_their_files(name: str) -> None:
    config = families.adopt("HybridLM", PUBLISHED[name][0], {})
    own = HybridLM(config, device="meta", dtype=torch.bfloat16).state_dict()
    found = {}
    for link in families.links_of("HybridLM", config):
        found |= zip(link.theirs, link.form.theirs([own[key] for key in link.ours]), strict=True)
    assert {key: tuple(found[key].shape) for key in SHAPES[name]} == SHAPES[name]
    kinds = [block["type"] for block in config["layers"]]
    assert {kind: kinds.count(kind) for kind in LAYERS.get(name, {})} == LAYERS.get(name, {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_rc36_a_field_that_is_not_understood_is_refused(name: str) -> None:
    source, family = PUBLISHED[name]
    with refused(ValueError, "rope_interleave_factor"):
        family.read_config({**source, "rope_interleave_factor": 2})


@pytest.mark.parametrize(
    ("stock", "changed"),
    [
        ("mamba2", {"hidden_act": "gelu"}),
        ("mamba2", {"rms_norm": False}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("nemotron_h", {"sliding_window": 8}),
        ("nemotron_h", {"attention_bias": True}),
        ("nemotron_h", {"rms_norm_eps": 0.5}),
        ("nemotron_h", {"n_shared_experts": 2}),
    ],
    ids=str,
)
def test_rc36_a_setting_that_we_do_not_have_is_refused(tmp_path: Path, stock: str, changed: dict) -> None:
    STOCK[stock].write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    (name,) = changed
    with refused(NotImplementedError, name, repr(changed[name])):
        HybridLM.from_pretrained(tmp_path)


STATE_SPACES = {
    "d_model": 64,
    "n_layer": 2,
    "vocab_size": 97,
    "ssm_cfg": {"layer": "Mamba2"},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


@pytest.mark.parametrize("head_stored", [False, True])
def test_rc29_a_checkpoint_of_the_authors_library_is_read_by_its_own_names(tmp_path: Path, head_stored: bool) -> None:
    settings = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 112}
    stock = STOCK["mamba2"].build(num_hidden_layers=2, tie_word_embeddings=True, **settings)
    tensors = {key.replace("embeddings.", "embedding."): tensor for key, tensor in stock.state_dict().items()}
    if not head_stored:
        del tensors["lm_head.weight"]
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(STATE_SPACES))
    model, ids = HybridLM.from_pretrained(tmp_path), token_ids(2, 21)
    with torch.no_grad():
        ours, exact = model(ids), HybridLM.from_pretrained(tmp_path, dtype=torch.float64)(ids)
    assert ours.shape == (2, 21, 112)
    assert_e32(ours, exact, e32(stock_logits(stock, ids), exact), "logits")
    assert model.lm_head.weight is model.embed.weight
    assert generate(model, ids, max_new_tokens=200).max() < 97  # rows that only pad the vocabulary are never drawn
    if head_stored:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
        save_file(tensors, tmp_path / "model.safetensors")
        with refused(ValueError, "lm_head.weight", "backbone.embedding.weight"):
            HybridLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ssm_cfg": {}}, ["Mamba-1"]),
        ({"attn_layer_idx": [1]}, ["attn_layer_idx"]),
        ({"d_intermediate": 32}, ["d_intermediate"]),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, ["D_has_hdim"]),
    ],
    ids=str,
)
def test_rc29_what_that_library_can_do_beyond_mamba2_is_refused(changed: dict, words: list[str]) -> None:
    with refused(NotImplementedError, *words):
        families.FAMILIES["state-spaces"].read_config({**STATE_SPACES, **changed})
