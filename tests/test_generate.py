"""generate: the same text as without a cache, whatever the window, the padding and the cut of the prompt; sampling."""

import copy
import itertools

import pytest
import torch
from drafting import Bigram
from draws import DEVICE, on_the_host
from hybrids import ALL, build, config, token_ids
from refusals import refused
from torch import Tensor, nn

from replayssm import ReplayStateCache, generate, prefill
from replayssm.sampling import Sampler

PROMPTS = [token_ids(1, n, seed=n)[0].tolist() for n in (9, 1, 4)]


@torch.no_grad()
def without_cache(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy, by whole forwards; every choice has a clear margin."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids], device=DEVICE))[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-9, "a tie would make the comparison meaningless"
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [0, 1, 3, 16, "auto"])
def test_ragged_prompts_continue_as_each_would_without_a_cache(window):
    model = build(config(*ALL))
    tokens = generate(model, PROMPTS, max_new_tokens=12, window=window)
    assert tokens.tolist() == [without_cache(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_tensor_is_the_list_of_its_prompts(side):
    model, width = build(config(*ALL)), max(map(len, PROMPTS))
    ids = torch.full((3, width), 7, device=DEVICE)
    mask = torch.zeros(3, width, dtype=torch.int64, device=DEVICE)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt, device=DEVICE), 1
    expected = generate(model, PROMPTS, max_new_tokens=8)
    assert torch.equal(generate(model, ids, attention_mask=mask, max_new_tokens=8), expected)


def test_a_long_prompt_is_read_in_pieces_and_reports_its_progress(monkeypatch):
    model, seen = build(config(*ALL)), []
    expected = generate(model, PROMPTS, max_new_tokens=8)
    monkeypatch.setattr(prefill, "PREFILL_PIECE", 4)
    tokens = generate(model, PROMPTS, max_new_tokens=8, progress=lambda *done: seen.append(done))
    assert torch.equal(tokens, expected)
    done = [0, *(tokens for tokens, _ in seen)]
    assert all(0 < later - earlier <= 4 for earlier, later in itertools.pairwise(done))
    assert seen[-1] == (9, 9)


def test_the_stream_is_the_text_as_it_comes():
    model = build(config(*ALL))
    stream = generate(model, PROMPTS, max_new_tokens=8, stream=True)
    first = next(stream)
    assert first.shape == (3, 1)
    expected = generate(model, PROMPTS, max_new_tokens=8)
    assert torch.equal(torch.cat([first, *stream], 1), expected)


def test_a_second_run_on_a_cache_is_refused_until_the_first_has_ended():
    model = build(config(*ALL))
    cache = ReplayStateCache(model, 3, max_seqlen=60)
    expected = generate(model, PROMPTS, max_new_tokens=8)
    first, waiting = (generate(model, PROMPTS, max_new_tokens=8, cache=cache, stream=True) for _ in range(2))
    pieces = [next(first)]
    twin = copy.deepcopy(cache)
    with refused(RuntimeError, "generate: cache must", "close()", cache=cache):
        next(waiting)
    with refused(RuntimeError, "generate: cache must", "close()", cache=cache):
        generate(model, PROMPTS, max_new_tokens=8, cache=cache)
    generate(model, PROMPTS, max_new_tokens=2, cache=twin)  # a copy is free
    assert torch.equal(torch.cat([*pieces, *first], 1), expected)
    left = generate(model, PROMPTS, max_new_tokens=8, cache=cache, stream=True)
    next(left)
    left.close()
    generate(model, PROMPTS, max_new_tokens=2, cache=cache)


def test_a_second_turn_on_the_same_cache_continues_the_first():
    model, reply = build(config(*ALL)), token_ids(3, 3, seed=8)
    cache = ReplayStateCache(model, 3, window=4, max_seqlen=60)
    first = generate(model, PROMPTS, max_new_tokens=6, cache=cache)
    assert cache.seqlen.tolist() == [len(prompt) + 5 for prompt in PROMPTS]  # all but the last token
    second = generate(model, torch.cat([first[:, -1:], reply], 1), max_new_tokens=6, cache=cache)
    whole = [p + a + b for p, a, b in zip(PROMPTS, first.tolist(), reply.tolist(), strict=True)]
    assert second.tolist() == [without_cache(model, ids, 6) for ids in whole]


def test_rows_that_ended_continue_in_a_second_turn_as_they_ended():
    model, reply = build(config(*ALL)), token_ids(3, 2, seed=8)
    free = generate(model, PROMPTS, max_new_tokens=9)
    ends = [int(free[0, 2]), int(free[2, 5])]
    cache = ReplayStateCache(model, 3, window=4, max_seqlen=60)
    first = generate(model, PROMPTS, max_new_tokens=9, cache=cache, eos=ends, pad=0)
    texts = []
    for row in free.tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), 8)
        texts.append(row[: stop + 1])
    for row, text in enumerate(texts):
        assert first[row].tolist() == text + [0] * (first.shape[1] - len(text))
    last = torch.tensor([[text[-1]] for text in texts], device=DEVICE)
    second = generate(model, torch.cat([last, reply], 1), max_new_tokens=5, cache=cache)
    whole = [p + a + b for p, a, b in zip(PROMPTS, texts, reply.tolist(), strict=True)]
    assert second.tolist() == [without_cache(model, ids, 5) for ids in whole]


class Constant(Bigram):
    """A model without state that always gives the same logits."""

    def __init__(self, logits: Tensor):
        super().__init__(logits.expand(len(logits), -1))


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0], device=DEVICE)


def frequencies(**options: object) -> Tensor:
    tokens = generate(Constant(LOGITS), [[1]] * 200, max_new_tokens=50, seed=1, **options)
    return torch.bincount(tokens.flatten(), minlength=5) / tokens.numel()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 1.0}, 5),
        ({"temperature": 0.5}, 5),
        ({"temperature": 1.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_k": 99}, 5),
        ({"temperature": 1.0, "top_k": 1}, 1),
        ({"temperature": 1.0, "top_p": 0.47}, 2),  # the first has 0.463 of the probability
        ({"temperature": 1.0, "top_p": 0.46}, 1),
        ({"temperature": 1.0, "top_p": 1.0}, 5),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.7}, 3),
        ({"temperature": 0.0}, 1),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_that_was_asked_for(options, kept):
    temperature = options["temperature"] or 1.0
    expected = (LOGITS[:kept] / temperature).softmax(-1)
    got = frequencies(**options)
    assert (got[kept:] == 0).all()
    deviation = (expected * (1 - expected) / 10_000).sqrt()
    assert ((got[:kept] - expected).abs() <= 5 * deviation).all()


def test_a_seed_fixes_the_draws():
    model = build(config(*ALL))
    options = {"max_new_tokens": 12, "temperature": 1.0}
    texts = [generate(model, PROMPTS, seed=seed, **options) for seed in (5, 5, 6)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    state = torch.get_rng_state()
    generate(model, PROMPTS, seed=5, **options)
    assert torch.equal(torch.get_rng_state(), state), "a seeded call draws from the global generator"


def test_equal_probabilities_at_the_edge_of_top_p_keep_the_smallest_set():
    sampler = Sampler(1.0, top_k=None, top_p=0.5, seed=0, vocab_size=None, device=DEVICE)
    probabilities = sampler.probabilities(torch.zeros(1, 4, device=DEVICE))
    assert sorted(probabilities[0].tolist()) == [0.0, 0.0, 0.5, 0.5]


@on_the_host
@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([], {}, ["ids must"]),
        ([[1], []], {}, ["ids must", "[1, 0]"]),
        (torch.zeros(2, 0, dtype=torch.int64), {}, ["ids must", "(2, 0)"]),
        (torch.zeros(3, dtype=torch.int64), {}, ["ids must", "(3,)"]),
        (torch.zeros(1, 3), {}, ["ids must", "float32"]),
        ([[1]], {"max_new_tokens": 0}, ["max_new_tokens must", "got 0"]),
        ([[1]], {"max_new_tokens": 2**63}, ["max_new_tokens must", "64 bits"]),
        ([[1, 2**63]], {}, ["ids must", "64 bits", f"got {2**63}"]),
        ([[1]], {"temperature": -1.0}, ["temperature must", "got -1.0"]),
        ([[1]], {"top_k": 0}, ["top_k must", "got 0"]),
        ([[1]], {"top_p": 0.0}, ["top_p must", "got 0.0"]),
        ([[1]], {"top_p": 1.5}, ["top_p must", "got 1.5"]),
        ([[1]], {"vocab_size": 0}, ["vocab_size must", "got 0"]),
        ([[1]], {"eos": "a"}, ["eos must", "'a'"]),
        ([[1]], {"eos": [None]}, ["eos must", "None"]),
        ([[1]], {"eos": 1.5}, ["eos must", "1.5"]),
        ([[1]], {"eos": torch.tensor(3)}, ["eos must", "tensor(3)"]),
        ([[1]], {"eos": [2, 2**63]}, ["eos must", "64 bits"]),
        ([[1]], {"pad": None}, ["pad must", "None"]),
        ([[1]], {"pad": True}, ["pad must", "True"]),
        ([[1]], {"pad": 2**63}, ["pad must", "64 bits"]),
        ([[1]], {"temperature": None}, ["temperature must", "None"]),
        ([[1]], {"temperature": "1"}, ["temperature must", "'1'"]),
        ([[1]], {"top_p": "1"}, ["top_p must", "'1'"]),
        ([[1]], {"seed": 1.5}, ["seed must", "1.5"]),
        ([[1]], {"seed": 2**63}, ["seed must", "64 bits"]),
        ([[1]], {"cache": "fp32"}, ["cache must", "got str"]),
        ([[1]], {"acceptance": 1}, ["acceptance must", "got int"]),
        ([1, 2], {}, ["ids must", "[1, 2]"]),
        (["ab"], {}, ["ids must", "'ab'"]),
        ([[1.5]], {}, ["ids must", "1.5"]),
        (None, {}, ["ids must", "None"]),
        ([[1]], {"window": -1}, ["window must", "got -1"]),
        ([[1]], {"attention_mask": torch.ones(1, 1)}, ["attention_mask must"]),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.ones(1, 2)}, ["attention_mask must", "(1, 2)"]),
        (
            torch.ones(1, 3, dtype=torch.int64),
            {"attention_mask": torch.tensor([[1, 0, 1]])},
            ["attention_mask must", "left"],
        ),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.zeros(1, 3)}, ["attention_mask must", "[0]"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_generated_is_refused_before_anything_runs(ids, options, words):
    calls = []

    class Watched(Constant):
        def forward(self, *arguments: object) -> Tensor:
            calls.append(arguments)
            raise AssertionError("the model was called")

    with refused(ValueError, *words):
        generate(Watched(LOGITS), ids, **{"max_new_tokens": 4, **options})
    assert not calls


def test_what_from_pretrained_returns_is_not_taken_for_a_model():
    with refused(ValueError, "model must", "got tuple", "tokenizer"):
        generate((build(config(*ALL)), None), PROMPTS, max_new_tokens=1)


def test_a_cache_of_another_batch_is_refused():
    model = build(config(*ALL))
    cache = ReplayStateCache(model, 2, max_seqlen=60)
    with refused(ValueError, "cache must have 3 rows", "got 2", cache=cache):
        generate(model, PROMPTS, max_new_tokens=4, cache=cache)


@pytest.mark.parametrize("cached", [False, True])
def test_room_for_all_new_tokens_is_asked_for_before_the_prompt_runs(cached):
    model = build(config(*ALL))
    cache = ReplayStateCache(model, 3, max_seqlen=12)  # the longest prompt has 9 tokens
    if cached:
        generate(model, PROMPTS, max_new_tokens=2, cache=cache)  # leaves 10 tokens committed
    count = 2 if cached else 4
    assert generate(model, [[1]] * 3 if cached else PROMPTS, max_new_tokens=count, cache=cache).shape == (3, count)
    with refused(ValueError, "max_seqlen", "at least 13", "got 12", cache=cache):
        generate(model, [[1]] * 3, max_new_tokens=1, cache=cache)


def test_a_pad_that_is_no_token_stands_in_the_result_alone():
    model = build(config(*ALL))
    whole = generate(model, PROMPTS, max_new_tokens=8)
    end = int(whole[0, 2])
    tokens = generate(model, PROMPTS, max_new_tokens=8, eos=end, pad=-100)
    expected = whole.clone()
    for row in expected:
        found = (row == end).nonzero()
        if len(found):
            row[int(found[0]) + 1 :] = -100
    assert torch.equal(tokens, expected[:, : tokens.shape[1]])
    ids, mask = torch.tensor([[-100, 3, 4]], device=DEVICE), torch.tensor([[0, 1, 1]], device=DEVICE)
    assert torch.equal(
        generate(model, ids, attention_mask=mask, max_new_tokens=4), generate(model, [[3, 4]], max_new_tokens=4)
    )


def test_a_temperature_too_small_to_divide_by_is_refused_and_a_small_one_is_greedy():
    model = build(config(*ALL))
    with refused(ValueError, "temperature must", "1e-40"):
        generate(model, PROMPTS, max_new_tokens=2, temperature=1e-40)
    sampled = generate(model, PROMPTS, max_new_tokens=6, temperature=1e-5, seed=0)
    assert torch.equal(sampled, generate(model, PROMPTS, max_new_tokens=6))


def test_a_cache_made_in_inference_mode_serves_outside_it():
    model = build(config(*ALL))
    with torch.inference_mode():
        cache = ReplayStateCache(model, 3, max_seqlen=40)
    expected = generate(model, PROMPTS, max_new_tokens=6)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=6, cache=cache), expected)
    cache.reset()
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=6, cache=cache), expected)
