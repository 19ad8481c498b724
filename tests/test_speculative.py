"""Speculation in generate: the text is that of plain decoding, whoever drafts and however little of it is right."""

import functools

import pytest
import torch
from drafting import Bigram, Scripted
from draws import DEVICE, draw, on_the_host, seeds
from hybrids import ALL, ATTENTION, VOCAB, build, config, token_ids
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor, nn

from replayssm import Acceptance, ReplayStateCache, generate
from replayssm.drafters import Context, Drafter, MTPHead
from replayssm.graphs import Verdicts
from replayssm.models import HybridLM

LONGEST = 32
# the first repeats itself, so that looking things up finds something
PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],
    token_ids(1, 1, seed=1)[0].tolist(),
    token_ids(1, 4, seed=4)[0].tolist(),
]


@functools.cache
def hybrid(seed: int = 0) -> HybridLM:
    model = build(config(*ALL), seed=seed)
    model.mtp = MTPHead(24, 31, device=DEVICE, dtype=torch.float64)
    return model


@functools.cache
def plain() -> Tensor:
    """(3, LONGEST) greedy tokens behind ``PROMPTS``, each with a clear margin."""
    model = hybrid()
    tokens = generate(model, PROMPTS, max_new_tokens=LONGEST)
    for prompt, text in zip(PROMPTS, tokens.tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text[:-1]], device=DEVICE), logits_to_keep=LONGEST)[0]
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-9, "a tie would make the comparison meaningless"
        assert logits.argmax(-1).tolist() == text
    return tokens


def cut(rows: Tensor, count: int, ends: list[int], pad: int) -> tuple[Tensor, list[int]]:
    """What greedy decoding returns: the first ``count`` tokens up to the first end, padded; and the lengths."""
    texts = []
    for row in rows[:, :count].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), count)
        texts.append(row[:stop])
    width = max(map(len, texts))
    padded = [text + [pad] * (width - len(text)) for text in texts]
    return torch.tensor(padded, device=DEVICE), [len(text) for text in texts]


def scripted(seed: int, right: float) -> Scripted:
    return Scripted(plain(), torch.tensor([len(prompt) for prompt in PROMPTS], device=DEVICE), seed, right, VOCAB)


def test_the_text_is_that_of_plain_decoding_whatever_is_drafted():
    @given(
        seed=seeds,
        right=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
        num=st.integers(1, 6),
        count=st.integers(1, LONGEST),
        window=st.sampled_from([0, 7, 8, 16]),
        ends=st.lists(st.sampled_from(plain().flatten().tolist()), max_size=2),
        spare=st.integers(0, 8),
    )
    def check(seed, right, num, count, window, ends, spare):
        model, acceptance = hybrid(), Acceptance()
        room = max(map(len, PROMPTS)) + count - 1 + spare
        cache = ReplayStateCache(model, 3, window=window, step_tokens=1 + num, max_seqlen=room)
        tokens = generate(
            model, PROMPTS, max_new_tokens=count, cache=cache, eos=ends, pad=-1, drafter=scripted(seed, right),
            num_drafts=num, acceptance=acceptance,
        )  # fmt: skip
        expected, lengths = cut(plain(), count, ends, -1)
        assert torch.equal(tokens, expected)
        committed = [len(prompt) + n - 1 for prompt, n in zip(PROMPTS, lengths, strict=True)]
        assert cache.seqlen.tolist() == committed  # all but the last token
        assert acceptance.tokens == sum(lengths) - 3
        cache.check()

    check()


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "mtp", "other", "itself"])
def test_every_drafter_leaves_the_text_as_it_is(drafter, num):
    drafters = {"other": hybrid(1), "itself": hybrid()}
    acceptance = Acceptance()
    tokens = generate(
        hybrid(), PROMPTS, max_new_tokens=LONGEST, drafter=drafters.get(drafter, drafter), num_drafts=num,
        acceptance=acceptance,
    )  # fmt: skip
    assert torch.equal(tokens, plain())
    assert sum(acceptance.proposed) > 0
    if drafter == "itself":
        assert acceptance.accepted == acceptance.proposed


def test_a_model_that_drafts_for_itself_is_always_right_when_tokens_are_drawn():
    acceptance = Acceptance()
    generate(hybrid(), PROMPTS, max_new_tokens=20, temperature=1.0, top_k=20, seed=1, drafter=hybrid(),
             acceptance=acceptance)  # fmt: skip
    assert sum(acceptance.accepted) >= sum(acceptance.proposed) - 1  # two sums may round apart


@pytest.mark.parametrize("ends", [[], [int(plain()[2, 20])]], ids=["to the end", "with an end"])
def test_streamed_pieces_are_final_and_make_up_the_text(ends):
    pieces = []
    for piece in generate(
        hybrid(), PROMPTS, max_new_tokens=LONGEST, eos=ends, pad=-1, drafter=scripted(3, 0.8), num_drafts=5, stream=True
    ):
        assert piece.shape[0] == 3
        assert piece.shape[1] > 0
        pieces.append(piece.clone())
    assert max(piece.shape[1] for piece in pieces) > 1
    assert torch.equal(torch.cat(pieces, 1), cut(plain(), LONGEST, ends, -1)[0])


@pytest.mark.parametrize("drafter", ["prompt_lookup", "other"])
def test_a_second_turn_continues_what_drafts_have_left(drafter):
    """After rejected drafts and ends in the middle of accepted ones, turn by turn as without drafts."""
    ends = [int(plain()[0, 4]), int(plain()[2, 9])]
    drafted = {"drafter": hybrid(1) if drafter == "other" else drafter, "num_drafts": 3}
    texts = []
    for options in ({}, drafted):
        cache = ReplayStateCache(hybrid(), 3, window=5, step_tokens=4, max_seqlen=80)
        first = generate(hybrid(), PROMPTS, max_new_tokens=15, cache=cache, eos=ends, pad=-1, **options)
        real = (first >= 0).sum(1, keepdim=True)
        turn = torch.cat([first.gather(1, real - 1), token_ids(3, 2, seed=8)], 1)
        texts.append((first, generate(hybrid(), turn, max_new_tokens=15, cache=cache, **options)))
    assert torch.equal(texts[0][0], texts[1][0])
    assert torch.equal(texts[0][1], texts[1][1])


class Whole:
    """Drafts the whole text, all of it right."""

    def propose(self, context: Context, num: int) -> tuple[Tensor, None]:
        begins = torch.tensor([len(prompt) for prompt in PROMPTS], device=DEVICE)
        place = (context.lengths - begins).unsqueeze(1) + torch.arange(num, device=DEVICE)
        return plain().gather(1, place.clamp(max=LONGEST - 1)), None


def test_acceptance_counts_steps_and_drafts_by_place_over_calls():
    acceptance = Acceptance()
    assert acceptance.mean_length == 0
    assert "no drafts" in str(acceptance)
    options = {"max_new_tokens": 11, "acceptance": acceptance}
    generate(hybrid(), PROMPTS, drafter=Whole(), num_drafts=4, **options)
    # 1 token out of the prompt, then 5 and 5
    assert (acceptance.steps, acceptance.tokens) == (6, 30)
    assert acceptance.proposed == acceptance.accepted == [6, 6, 6, 6]
    assert acceptance.mean_length == 5
    assert "5.00 tokens a step, 100% of 24 drafts" in str(acceptance)
    generate(hybrid(), PROMPTS, **options)  # without drafts
    assert (acceptance.steps, acceptance.tokens, acceptance.mean_length) == (36, 60, 60 / 36)
    assert acceptance.accepted == [6, 6, 6, 6]


def test_an_end_among_accepted_drafts_counts_them_up_to_it():
    acceptance, end = Acceptance(), int(plain()[1, 3])
    assert end not in plain()[1, :3].tolist()
    generate(hybrid(), PROMPTS, max_new_tokens=6, eos=end, drafter=Whole(), num_drafts=5, acceptance=acceptance)
    _, lengths = cut(plain(), 6, [end], -1)
    assert acceptance.tokens == sum(lengths) - 3
    # of the others 4 drafts and the token behind them, of the row that ends its 3 drafts
    assert sum(acceptance.accepted) == sum(length - 2 if length == 6 else length - 1 for length in lengths)


@pytest.mark.parametrize("drafter", [None, "prompt_lookup", "mtp", "model"])
def test_verdicts_that_come_one_step_late_change_nothing(drafter, monkeypatch):
    """As on a GPU: a step more is begun when every row has ended, and must keep nothing."""
    end, results = int(plain()[1, 13]), []
    for late in (0, 1):
        monkeypatch.setattr(Verdicts, "due", property(lambda self, late=late: len(self) > late))
        for eos, count in (([], 9), (plain()[:, 5].tolist(), LONGEST), ([end], LONGEST)):
            model, acceptance = hybrid(), Acceptance()
            cache = ReplayStateCache(model, 3, window=5, step_tokens=4, max_seqlen=max(map(len, PROMPTS)) + count - 1)
            tokens = generate(model, PROMPTS, max_new_tokens=count, cache=cache, eos=eos, pad=-1, num_drafts=3,
                              drafter=hybrid(1) if drafter == "model" else drafter, acceptance=acceptance)  # fmt: skip
            assert torch.equal(tokens, cut(plain(), count, eos, -1)[0])
            results.append((cache.seqlen.tolist(), acceptance.tokens, acceptance.steps, acceptance.accepted))
    assert results[:3] == results[3:]


class Watching(Drafter):
    """Keeps what it is told; its drafts are right now and then."""

    reads_hidden = True

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def propose(self, context: Context, num: int) -> tuple[Tensor, None]:
        assert context.hidden is not None
        self.seen.append((context.tokens.clone(), context.lengths.clone(), context.hidden.clone()))
        tokens = Whole().propose(context, num)[0]
        tokens[:, len(self.seen) % (num + 1) :] = -1
        return tokens, None


def test_a_drafter_is_told_the_texts_and_the_hidden_state_before_the_newest_token():
    model, watching = hybrid(), Watching()
    tokens = generate(model, PROMPTS, max_new_tokens=12, drafter=watching, num_drafts=3)
    texts = [prompt + row for prompt, row in zip(PROMPTS, tokens.tolist(), strict=True)]
    assert len(watching.seen) >= 3
    for seen, lengths, hidden in watching.seen:
        for row, length in enumerate(lengths.tolist()):
            assert seen[row, :length].tolist() == texts[row][:length]
            assert (seen[row, length:] == -1).all()
            with torch.no_grad():
                ids = torch.tensor([texts[row][: length - 1]], device=DEVICE)
                _, expected = model(ids, logits_to_keep=1, return_hidden=True)
            torch.testing.assert_close(hidden[row], expected[0, -1], rtol=0, atol=1e-9)


class Answering:
    """Always the same answer."""

    def __init__(self, tokens: object, probabilities: object = None):
        self.answer = tokens, probabilities

    def propose(self, context: Context, num: int) -> tuple[object, object]:
        return self.answer


ONE = torch.ones(1, 2, dtype=torch.int64, device=DEVICE)
EVEN = torch.full((1, 2, 5), 0.2, device=DEVICE)
BROKEN = [
    (Answering(torch.ones(1, 3, dtype=torch.int64, device=DEVICE)), ["tokens must be (1, 2)", "got (1, 3)"]),
    (Answering(torch.ones(2, dtype=torch.int64, device=DEVICE)), ["tokens must be (1, 2)", "got (2,)"]),
    (Answering([[1, 1]]), ["tokens must be a tensor", "got list"]),
    (Answering(ONE.to("meta")), ["tokens must be on cpu", "got meta"]),
    (Answering(ONE.float()), ["tokens must hold integers"]),
    (Answering(ONE, EVEN[..., :4]), ["probabilities must be (1, 2, 5)", "got (1, 2, 4)"]),
    (Answering(ONE, EVEN.long()), ["probabilities must be floating point"]),
    (Answering(ONE, EVEN * 1.01), ["probabilities must sum to 1", "1.0"]),
    (Answering(ONE, torch.tensor([1.5, 0.5, -1.0, 0, 0], device=DEVICE).expand(1, 2, 5)), ["must be at least 0"]),
    (Answering(ONE, torch.tensor([1.0, 0, 0, 0, 0], device=DEVICE).expand(1, 2, 5)), ["above 0 for the draft"]),
]  # fmt: skip


@on_the_host
@pytest.mark.parametrize(("drafter", "words"), BROKEN, ids=lambda value: str(value)[:40])
def test_an_answer_that_is_none_is_refused(drafter, words):
    with refused(ValueError, "Answering.propose", *words):
        generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=6, temperature=1.0, drafter=drafter, num_drafts=2)


def test_probabilities_behind_the_last_draft_may_be_anything():
    tokens = torch.tensor([[1, -1]], device=DEVICE)
    probabilities = EVEN.clone()
    probabilities[:, 1] = torch.nan
    drafter = Answering(tokens, probabilities)
    text = generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=40, temperature=1.0, drafter=drafter, num_drafts=2)
    assert text.shape == (1, 40)
    assert ((text >= 0) & (text < 5)).all()


def test_ids_that_the_model_does_not_have_end_the_drafts():
    expected = generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=9)
    for id_ in (-7, 4, 5, 10**9):
        drafter = Answering(torch.full((1, 2), id_, device=DEVICE))
        model = Bigram(draw(1, 5, 5))
        assert torch.equal(generate(model, [[1]], max_new_tokens=9, drafter=drafter, num_drafts=2), expected)
    limited = generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=60, vocab_size=4, temperature=1.0,
                       drafter=Answering(ONE * 4), num_drafts=2)  # fmt: skip
    assert limited.max() < 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_behind_a_gap_is_none(temperature):
    acceptance = Acceptance()
    gap = Answering(torch.tensor([[-1, 1]], device=DEVICE))
    generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=30, temperature=temperature, drafter=gap, num_drafts=2,
             acceptance=acceptance)  # fmt: skip
    assert acceptance.proposed == [0, 0]
    assert acceptance.steps == 29


class Changing:
    """Knows its probabilities the first time only."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        return ONE, EVEN if self.calls == 1 else None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "oracle"}, ["drafter must", "'prompt_lookup', 'mtp'", "'oracle'"]),
        ({"drafter": 3}, ["drafter must", "got 3"]),
        ({"drafter": "mtp"}, ["drafter must", "Bigram", "examples/train_mtp.py"]),
        ({"drafter": "prompt_lookup", "num_drafts": 0}, ["num_drafts must", "got 0"]),
        ({"drafter": "prompt_lookup", "num_drafts": 20}, ["window must", "step_tokens=21"]),
        ({"drafter": Changing(), "num_drafts": 2, "temperature": 1.0}, ["Changing.propose", "always or never"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_draft_is_refused(options, words):
    with refused(ValueError, *words):
        generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=9, **options)


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_more_drafts_than_a_step_of_the_cache_takes_are_refused(drafter):
    cache = ReplayStateCache(hybrid(), 3, window=4, step_tokens=3, max_seqlen=60)
    with refused(ValueError, "step_tokens of at least 4", "num_drafts=3", "got 3", cache=cache):
        generate(hybrid(), PROMPTS, max_new_tokens=5, cache=cache,
                 drafter=hybrid(1) if drafter == "model" else drafter, num_drafts=3)  # fmt: skip


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_runs():
    cache = ReplayStateCache(hybrid(), 3, step_tokens=5, max_seqlen=60)
    other = build(config(ATTENTION, vocab_size=VOCAB + 3))
    with refused(ValueError, "DraftModel", f"vocabulary of {VOCAB} ids", f"got {VOCAB + 3}", cache=cache):
        generate(hybrid(), PROMPTS, max_new_tokens=5, cache=cache, drafter=other)


def test_a_module_that_proposes_is_asked_and_not_taken_for_a_draft_model():
    class Both(nn.Module, Answering):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            Answering.__init__(self, ONE)

    model = Bigram(draw(1, 5, 5))
    expected = generate(model, [[1]], max_new_tokens=9)
    assert torch.equal(generate(model, [[1]], max_new_tokens=9, drafter=Both(), num_drafts=2), expected)


def test_a_prompt_of_less_than_a_step_goes_the_same_way():
    for length, num in ((1, 5), (2, 1), (5, 5)):
        prompt = [PROMPTS[2][:1] * length]
        expected = generate(hybrid(), prompt, max_new_tokens=10)
        assert torch.equal(generate(hybrid(), prompt, max_new_tokens=10, drafter=hybrid(1), num_drafts=num), expected)
