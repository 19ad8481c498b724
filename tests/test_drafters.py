"""Drafters by themselves: what is looked up, what a draft model's cache holds, and the head for further tokens."""

import pytest
import torch
from draws import DEVICE
from hybrids import ALL, build, config, token_ids
from hypothesis import given
from hypothesis import strategies as st

from replayssm.drafters import Context, Drafter, DraftModel, PromptLookup, Run
from replayssm.sampling import Sampler


def looked_up(text: list[int], num: int, longest: int) -> list[int]:
    """The rule, word by word."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                copy = list(text)
                for _ in range(num):
                    copy.append(copy[start + size + len(copy) - len(text)])
                return copy[len(text) :]
    return [-1] * num


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
    num=st.integers(1, 6),
    longest=st.integers(1, 4),
    spare=st.integers(0, 3),
)
def test_what_is_looked_up_is_what_followed_the_longest_and_latest_match(texts, num, longest, spare):
    width = max(map(len, texts)) + spare
    tokens = torch.tensor([text + [-1] * (width - len(text)) for text in texts], device=DEVICE)
    lengths = torch.tensor([len(text) for text in texts], device=DEVICE)
    drafts, probabilities = PromptLookup(longest).propose(Context(tokens, lengths, None), num)
    assert probabilities is None
    assert drafts.tolist() == [looked_up(text, num, longest) for text in texts]


def test_a_draft_models_cache_holds_the_settled_text_and_no_draft():
    """After every call its state is that of a model that has read the text and nothing else."""
    model = build(config(*ALL))
    prompts = token_ids(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4], device=DEVICE)
    prompts = prompts * mask
    sampler = Sampler(0.0, top_k=None, top_p=None, seed=None, vocab_size=None, device=DEVICE)
    drafter: Drafter = DraftModel(model)
    texts = [prompts[0].tolist(), prompts[1, 2:].tolist()]
    with torch.no_grad():
        drafter.begin(Run(model, prompts, mask, 30, 3, 5, sampler, None))
        for step, counts in enumerate([(1, 1), (4, 1), (2, 3), (0, 4), (3, 0), (1, 2)]):
            for row, count in enumerate(counts):
                texts[row] += token_ids(2, 9, seed=step)[row, :count].tolist()
            tokens = torch.tensor([text + [-1] * (40 - len(text)) for text in texts], device=DEVICE)
            lengths = torch.tensor([len(text) for text in texts], device=DEVICE)
            drafts, _ = drafter.propose(Context(tokens, lengths, None), 3)
            assert drafter.cache.seqlen.tolist() == lengths.tolist()
            for row, text in enumerate(texts):
                if counts[row] == 0:
                    continue  # a row that has ended: nobody looks at its drafts
                expected: list[int] = []
                for _ in range(3):
                    expected.append(int(model(torch.tensor([text + expected], device=DEVICE))[0, -1].argmax()))
                assert drafts[row].tolist() == expected


def test_a_lookup_of_nothing_is_refused():
    with pytest.raises(ValueError, match="longest must be an int of at least 1; got 0"):
        PromptLookup(0)
