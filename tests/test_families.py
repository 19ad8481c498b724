"""Checkpoints of other libraries: their configs, keys and numbers, against transformers itself. RC-30, RC-32, RC-36."""

import json
from pathlib import Path

import pytest
import torch
from budgets import assert_e16, assert_e32, assert_same_bits, e32, rms
from draws import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import TEMPLATE, refused
from safetensors.torch import load_file, save_file
from stock_models import STOCK, VOCAB, stock_decoded, stock_logits

from replayssm import ReplayStateCache, cli, generate
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
    theirs, exact = stock_logits(stock.write(tmp_path), ids), stock_logits(stock.build(dtype=torch.float64), ids)
    model, tokenizer = from_pretrained(tmp_path)
    assert tokenizer is None
    with torch.no_grad():
        ours = model(ids)
    assert_e32(ours, exact, e32(theirs, exact), "logits")


@stocks
def test_logits_in_fp64_equal_those_of_transformers(tmp_path: Path, stock) -> None:
    ids = token_ids(2, 37)
    model = stock.build(dtype=torch.float64)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = HybridLM.from_pretrained(tmp_path)(ids)
    assert ours.dtype == torch.float64
    theirs = stock_logits(model, ids)  # rounded to fp32 here and there inside
    assert_e32(ours, theirs, e32(stock_logits(stock.build(), ids), theirs), "logits in fp64")


@stocks
def test_decoding_equals_that_of_transformers(tmp_path: Path, stock) -> None:
    ids, prompt = token_ids(2, 24), 9
    theirs = stock_decoded(stock.write(tmp_path), ids, prompt)
    exact = stock_decoded(stock.build(dtype=torch.float64), ids, prompt)
    model = HybridLM.from_pretrained(tmp_path)
    cache = ReplayStateCache(model, 2, window=4, max_seqlen=24)
    outputs = []
    with torch.no_grad():
        for piece in ids.split([prompt, *[1] * (24 - prompt)], 1):
            outputs.append(model(piece, cache))
            cache.commit()
    assert_e32(torch.cat(outputs, 1), exact, e32(theirs, exact), "decoded logits")


@stocks
def test_rows_of_a_left_padded_batch_equal_those_of_transformers_alone(tmp_path: Path, stock) -> None:
    """Alone, as transformers lets padding reach the convolution where projections have biases."""
    ids, mask = token_ids(3, 13), torch.ones(3, 13, dtype=torch.long)
    mask[0, :5], mask[2, :1] = 0, 0
    models = stock.write(tmp_path), stock.build(dtype=torch.float64)
    theirs, exact = (
        torch.cat([stock_logits(model, ids[row : row + 1, mask[row] == 1])[0] for row in range(3)]) for model in models
    )
    with torch.no_grad():
        ours = HybridLM.from_pretrained(tmp_path)(ids, attention_mask=mask)[mask.bool()]
    assert_e32(ours, exact, e32(theirs, exact), "logits of a padded batch")


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
        assert set(model.not_loaded) == {key for key in stored if "visual" in key}
        for link in families.links_of("HybridLM", model.config):
            seen |= set(link.ours)
            back = link.form.theirs([own[key] for key in link.ours])
            for key, tensor in zip(link.theirs, back, strict=True):
                expected = stored.pop(key) if dtype is None else tensor.to(tensor.dtype)
                kept = dtype is None or keeps_precision(link.ours[0])
                assert tensor.dtype == (torch.float32 if kept else dtype), key
                assert_same_bits(tensor, expected, key)
        assert seen == own.keys() - ({"lm_head.weight"} if model.config["tie_embeddings"] else set())
    assert stored.keys() == set(model.not_loaded)


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
    "Nemotron-H-8B": {"backbone.layers.7.mixer.q_proj.weight": (4096, 4096)},
    "mamba2-130m": {
        "backbone.embedding.weight": (50288, 768),
        "backbone.layers.23.mixer.in_proj.weight": (3352, 768),
    },
    "mamba2-370m": {"backbone.layers.0.mixer.in_proj.weight": (4384, 1024)},
}
SHAPES |= {
    "Qwen3.5-4B": {
        "model.language_model.embed_tokens.weight": (248320, 2560),
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": (8192, 2560),
        "model.language_model.layers.0.linear_attn.in_proj_z.weight": (4096, 2560),
        "model.language_model.layers.0.linear_attn.in_proj_b.weight": (32, 2560),
        "model.language_model.layers.31.self_attn.q_proj.weight": (2 * 16 * 256, 2560),
        "model.language_model.layers.31.self_attn.k_proj.weight": (4 * 256, 2560),
        "model.language_model.layers.31.self_attn.k_norm.weight": (256,),
        "model.language_model.layers.31.mlp.up_proj.weight": (9216, 2560),
    },
    "Qwen3.5-27B": {
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": (10240, 5120),
        "model.language_model.layers.0.linear_attn.in_proj_z.weight": (6144, 5120),
        "model.language_model.layers.62.linear_attn.A_log": (48,),
        "model.language_model.layers.63.self_attn.o_proj.weight": (5120, 24 * 256),
        "lm_head.weight": (248320, 5120),
    },
    "Qwen3.5-35B-A3B": {
        "model.language_model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
        "model.language_model.layers.39.mlp.gate.weight": (256, 2048),
        "model.language_model.layers.39.mlp.shared_expert_gate.weight": (1, 2048),
    },
    "Qwen3.5-122B-A10B": {
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": (12288, 3072),
        "model.language_model.layers.0.linear_attn.in_proj_z.weight": (8192, 3072),
        "model.language_model.layers.47.self_attn.q_proj.weight": (2 * 32 * 256, 3072),
        "model.language_model.layers.47.mlp.shared_expert.down_proj.weight": (3072, 1024),
    },
    "Qwen3-Next-80B-A3B": {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": (12288, 2048),
        "model.layers.0.linear_attn.in_proj_ba.weight": (64, 2048),
        "model.layers.47.mlp.experts.511.down_proj.weight": (2048, 512),
        "model.layers.47.self_attn.q_proj.weight": (2 * 16 * 256, 2048),
    },
    "Kimi-Linear-48B-A3B": {
        "model.layers.0.self_attn.q_conv1d.weight": (4096, 1, 4),
        "model.layers.0.self_attn.A_log": (1, 1, 32, 1),
        "model.layers.0.self_attn.f_b_proj.weight": (4096, 128),
        "model.layers.0.mlp.up_proj.weight": (9216, 2304),
        "model.layers.1.block_sparse_moe.experts.255.w1.weight": (1024, 2304),
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": (256,),
        "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight": (2304, 1024),
        "model.layers.26.self_attn.kv_a_proj_with_mqa.weight": (576, 2304),
        "model.layers.26.self_attn.kv_b_proj.weight": (32 * 256, 512),
        "model.layers.26.self_attn.q_proj.weight": (32 * 192, 2304),
    },
}
SHAPES |= {
    "Granite-4.0-H-Micro": {
        "model.layers.0.mamba.in_proj.weight": (2 * 4096 + 2 * 128 + 64, 2048),
        "model.layers.5.self_attn.k_proj.weight": (512, 2048),
        "model.layers.0.shared_mlp.input_linear.weight": (2 * 8192, 2048),
    },
    "Granite-4.0-H-Tiny": {
        "model.layers.0.mamba.conv1d.weight": (3072 + 256, 1, 4),
        "model.layers.5.block_sparse_moe.input_linear.weight": (64, 1024, 1536),
        "model.layers.5.block_sparse_moe.router.layer.weight": (64, 1536),
    },
    "Granite-4.0-H-Small": {"model.layers.35.self_attn.q_proj.weight": (4096, 4096)},
    "Bamba-9B": {
        "model.layers.31.mamba.norm.weight": (8192,),
        "model.layers.27.self_attn.v_proj.weight": (1024, 4096),
        "model.layers.0.feed_forward.up_proj.weight": (14336, 4096),
        "model.final_layernorm.weight": (4096,),
    },
}
LAYERS = {
    "Nemotron-H-8B": {"mamba2": 24, "attention": 4, "mlp": 24},
    "Granite-4.0-H-Micro": {"mamba2": 36, "attention": 4, "mlp": 40},
    "Granite-4.0-H-Tiny": {"mamba2": 36, "attention": 4, "moe": 40},
    "Granite-4.0-H-Small": {"mamba2": 36, "attention": 4, "moe": 40},
    "Bamba-9B": {"mamba2": 29, "attention": 3, "mlp": 32},
    "Qwen3.5-4B": {"gated_deltanet": 24, "attention": 8, "mlp": 32},
    "Qwen3.5-27B": {"gated_deltanet": 48, "attention": 16, "mlp": 64},
    "Qwen3.5-35B-A3B": {"gated_deltanet": 30, "attention": 10, "moe": 40},
    "Qwen3.5-122B-A10B": {"gated_deltanet": 36, "attention": 12, "moe": 48},
    "Qwen3-Next-80B-A3B": {"gated_deltanet": 36, "attention": 12, "moe": 48},
    "Kimi-Linear-48B-A3B": {"kda": 20, "mla": 7, "mlp": 1, "moe": 26},
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


def test_rc15_the_head_of_a_published_geometry_has_the_names_of_its_file() -> None:
    source, _ = PUBLISHED["Nemotron-3-Super-120B-A12B"]
    shapes = {
        "mtp.layers.0.enorm.weight": (4096,),
        "mtp.layers.0.hnorm.weight": (4096,),
        "mtp.layers.0.eh_proj.weight": (4096, 8192),
        "mtp.layers.0.norm.weight": (4096,),
        "mtp.layers.0.mixer.k_proj.weight": (256, 4096),
        "mtp.layers.1.mixer.experts.511.down_proj.weight": (1024, 2688),
        "mtp.layers.1.mixer.fc2_latent_proj.weight": (4096, 1024),
        "mtp.layers.1.final_layernorm.weight": (4096,),
    }
    config = families.adopt("HybridLM", source, dict.fromkeys(shapes))
    own = HybridLM(config, device="meta", dtype=torch.bfloat16).own_tensors()
    found = {}
    for link in families.links_of("HybridLM", config):
        if link.theirs[0].startswith("mtp."):
            found |= zip(link.theirs, link.form.theirs([own[key] for key in link.ours]), strict=True)
    assert {key: tuple(found[key].shape) for key in shapes} == shapes


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
        ("nemotron_h", {"quantization_config": {"quant_method": "modelopt"}}),
        ("qwen3_5 text", {"attn_output_gate": False}),
        ("qwen3_5 text", {"output_gate_type": "sigmoid"}),
        ("qwen3_5 text", {"rope_scaling": {"type": "yarn"}}),
        ("qwen3_5_moe text", {"norm_topk_prob": False}),
        ("qwen3_next", {"hidden_act": "gelu"}),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}),
        ("granitemoehybrid", {"normalization_function": "layernorm"}),
        ("bamba", {"rope_scaling": {"type": "yarn"}}),
        ("kimi_linear", {"q_lora_rank": 3}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
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
    changed = {"num_hidden_layers": 2, "tie_word_embeddings": True, **settings}
    stock = STOCK["mamba2"].build(**changed)
    tensors = {key.replace("embeddings.", "embedding."): tensor for key, tensor in stock.state_dict().items()}
    if not head_stored:
        del tensors["lm_head.weight"]
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(STATE_SPACES))
    model, ids = HybridLM.from_pretrained(tmp_path), token_ids(2, 21)
    exact = stock_logits(STOCK["mamba2"].build(dtype=torch.float64, **changed), ids)
    with torch.no_grad():
        ours = model(ids)
    assert ours.shape == (2, 21, 112)
    assert_e32(ours, exact, e32(stock_logits(stock, ids), exact), "logits")
    assert model.lm_head.weight is model.embed.weight
    drawn = generate(model, ids, max_new_tokens=100, temperature=9.0, seed=0)
    assert 90 < drawn.max() < 97  # rows that only pad the vocabulary are never drawn
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


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("Qwen3.5-4B", {"layer_types": ["linear_attention"] * 31}, ["layer_types", "32 of"]),
        ("Qwen3.5-4B", {"layer_types": ["sliding_attention"] * 32}, ["layer_types", "sliding_attention"]),
        ("Qwen3.5-4B", {"rope_parameters": {"factor": 2.0}}, ["rope_parameters", "factor"]),
        ("Qwen3.5-4B", {"hidden_size": None}, ["hidden_size"]),
        ("Kimi-Linear-48B-A3B", {"mlp_layer_types": ["sparse"]}, ["mlp_layer_types", "27 of"]),
        ("Kimi-Linear-48B-A3B", {"num_hidden_layers": 28}, ["layer_types", "28 of"]),
        ("Kimi-Linear-48B-A3B", {"linear_attn_config": {"head_dim": 128, "num_heads": 32}}, ["short_conv_kernel_size"]),
    ],
    ids=str,
)
def test_rc36_a_config_that_contradicts_itself_is_refused(name: str, changed: dict, words: list[str]) -> None:
    source, family = PUBLISHED[name]
    if "text_config" in source:
        text = {key: value for key, value in {**source["text_config"], **changed}.items() if value is not None}
        changed = {"text_config": text}
    with refused(ValueError, *words):
        family.read_config({**source, **changed})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """config.json of a tiny model of each family."""
    found = {}
    for name, stock in STOCK.items():
        folder = tmp_path_factory.mktemp("source")
        stock.write(folder)
        found[name] = json.loads((folder / "config.json").read_text())
    return found


def assert_understood_or_refused(source: dict) -> None:
    """The config of a file leads to a model and its links, or to an error that says what is wrong."""
    said = None
    try:
        config = families.adopt("HybridLM.from_pretrained", source, {})
        HybridLM(config, device="meta")
        families.links_of("HybridLM.from_pretrained", config)
    except NotImplementedError:
        return
    except ValueError as error:
        said = str(error)
    assert said is None or TEMPLATE.match(said), said


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "kimi_linear", "mamba2", "qwen3_next"])
def test_more_blocks_than_any_model_has_are_refused_before_they_are_written_out(sources: dict, name: str) -> None:
    with refused(ValueError, "num_hidden_layers must be at most 10000", "got 1000000000000"):
        families.adopt(
            "HybridLM.from_pretrained", {**sources[name], "num_hidden_layers": 10**12, "layer_types": None}, {}
        )


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("bamba", {"hidden_size": None}),
        ("bamba", {"num_attention_heads": 0}),
        ("bamba", {"attn_layer_indices": 1}),
        ("bamba", {"rope_parameters": "default"}),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": float("inf")}}),
        ("kimi_linear", {"layer_types": 3}),
        ("kimi_linear", {"num_shared_experts": None}),
        ("granitemoehybrid", {"shared_intermediate_size": None}),
        ("qwen3_next", {"linear_num_key_heads": None}),
        ("qwen3_5", {"text_config": {}}),
        ("qwen3_5", {"text_config": 5}),
        ("qwen3_5", {"text_config": {"hidden_size": 24, "vocab_size": 61}}),
    ],
    ids=str,
)
def test_a_value_of_another_kind_in_a_config_is_refused(sources: dict[str, dict], name: str, changed: dict) -> None:
    with refused(ValueError, "must"):
        families.adopt("HybridLM.from_pretrained", {**sources[name], **changed}, {})
    assert_understood_or_refused({**sources[name], **changed})


@given(data=st.data(), name=st.sampled_from(sorted(STOCK)))
@settings(max_examples=60)
def test_any_change_of_a_config_is_understood_or_refused(sources: dict[str, dict], data, name: str) -> None:
    source = json.loads(json.dumps(sources[name]))
    part = source["text_config"] if "text_config" in source and data.draw(st.booleans()) else source
    field = data.draw(st.sampled_from(sorted(part)))
    values = [None, True, -1, 0, 3, 1.5, float("inf"), "silu", [], [0], [None], {}, {"a": 1}]
    if data.draw(st.booleans()):
        part[field] = data.draw(st.sampled_from(values))
    else:
        del part[field]
    assert_understood_or_refused(source)


def test_experts_stacked_in_the_file_and_each_by_itself_are_the_same_model(tmp_path: Path) -> None:
    STOCK["qwen3_5_moe text"].write(tmp_path)
    each = HybridLM.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, block in enumerate(block for block in each.layers if block.mixer.state_dict().keys() >= {"gate.weight"}):
        for name in ("gate_proj", "up_proj", "down_proj"):
            for expert in range(6):
                del tensors[f"model.layers.{i}.mlp.experts.{expert}.{name}.weight"]
        for name in ("gate_up_proj", "down_proj"):
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = getattr(block.mixer.experts, name).detach()
    save_file(tensors, tmp_path / "model.safetensors")
    stacked = HybridLM.from_pretrained(tmp_path)
    assert families.links_of("HybridLM", stacked.config) != families.links_of("HybridLM", each.config)
    for key, tensor in each.state_dict().items():
        assert_same_bits(stacked.state_dict()[key], tensor, key)


def test_transformers_reads_keys_of_published_files_as_we_do(tmp_path: Path) -> None:
    """MLPs of dense layers have other names in Kimi's own files than in those that transformers writes."""
    stock = STOCK["kimi_linear"].write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = {key: key.replace("layers.0.block_sparse_moe", "layers.0.mlp") for key in tensors}
    save_file({names[key]: tensor for key, tensor in tensors.items()}, file)
    again, ids = type(stock).from_pretrained(tmp_path), token_ids(1, 5)
    again.set_experts_implementation("eager")
    assert_same_bits(stock_logits(again, ids), stock_logits(stock, ids))
    model = HybridLM.from_pretrained(tmp_path)
    assert not model.not_loaded
    assert "model.layers.0.mlp.up_proj.weight" in {
        key for link in families.links_of("HybridLM", model.config) for key in link.theirs
    }


SETTINGS = [
    ("mamba2", {"layer_norm_epsilon": 0.1}),
    ("mamba2", {"time_step_limit": (0.3, 0.9)}),
    ("mamba2", {"use_conv_bias": False}),
    ("mamba2", {"n_groups": 3}),
    ("nemotron_h", {"layer_norm_epsilon": 0.1}),
    ("nemotron_h", {"time_step_min": 0.5}),
    ("nemotron_h", {"norm_topk_prob": False}),
    ("nemotron_h", {"routed_scaling_factor": 0.5}),
    ("nemotron_h", {"n_group": 1, "topk_group": 1}),
    ("nemotron_h", {"topk_group": 1, "num_experts_per_tok": 2}),
    ("nemotron_h", {"num_key_value_heads": 6}),
    ("nemotron_h", {"mlp_bias": True}),
    ("nemotron_h", {"use_bias": True}),
]


@pytest.mark.parametrize(("name", "changed"), SETTINGS, ids=str)
def test_rc36_a_setting_changes_our_model_as_it_changes_that_of_transformers(tmp_path, name, changed) -> None:
    ids, stock = token_ids(2, 21), STOCK[name]
    before = stock_logits(stock.build(), ids)
    theirs = stock_logits(stock.write(tmp_path, **changed), ids)
    exact = stock_logits(stock.build(dtype=torch.float64, **changed), ids)
    assert rms(theirs - before) > 100 * e32(theirs, exact)  # an ignored setting would be seen
    with torch.no_grad():
        assert_e32(HybridLM.from_pretrained(tmp_path)(ids), exact, e32(theirs, exact), "logits")


def test_fields_that_are_said_to_be_harmless_are(tmp_path: Path) -> None:
    ids, stock = token_ids(2, 21), STOCK["nemotron_h"]
    changed = {"chunk_size": 7, "expand": 3, "time_step_max": 0.3, "time_step_limit": (0.2, 0.3), "rope_theta": 7.0}
    plain = stock_logits(stock.build(), ids)
    theirs = stock_logits(stock.write(tmp_path, **changed, mamba_ssm_cache_dtype="bfloat16"), ids)
    assert_e32(theirs, plain, e32(plain, stock_logits(stock.build(dtype=torch.float64), ids)), "logits of transformers")
    with torch.no_grad():
        ours = HybridLM.from_pretrained(tmp_path)(ids)
    assert_e32(ours, plain, e32(plain, stock_logits(stock.build(dtype=torch.float64), ids)), "our logits")


def test_a_checkpoint_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STOCK["nemotron_h"].write(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # config.json is enough
    capsys.readouterr()
    assert cli.main(["plan", "--model", str(tmp_path), "--batch", "2", "--gpu", "H200", "--max-seqlen", "64"]) == 0
    assert "2 ReplayMamba2" in capsys.readouterr().out


def test_a_router_keeps_the_precision_of_the_file(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {key: tensor.dtype for key, tensor in model.layers[1].mixer.state_dict().items()}
    wide = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"gate.weight", "gate.e_score_correction_bias"}
    with torch.no_grad():
        assert model(token_ids(2, 9)).isfinite().all()


def test_a_residual_stream_in_fp32_is_one_in_a_model_of_16_bits(tmp_path: Path) -> None:
    ids, stock = token_ids(2, 21), STOCK["mamba2"]
    stock.write(tmp_path)
    exact = stock_logits(stock.build(dtype=torch.float64), ids)
    theirs = stock_logits(stock.build(dtype=torch.bfloat16), ids)
    model, seen = HybridLM.from_pretrained(tmp_path, dtype=torch.bfloat16), []
    for block in model.layers:
        block.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
        block.mixer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
    cache = ReplayStateCache(model, 2)
    with torch.no_grad():
        ours, cached = model(ids), model(ids, cache)
    assert seen == [torch.float32, torch.bfloat16] * 6
    for logits in (ours, cached):
        assert logits.dtype == torch.bfloat16
        assert_e16(logits, theirs, exact, "logits in bf16")
