"""Speculative sampling: tokens are distributed as the model's own, whatever the drafts are drawn from."""

import pytest
import torch
from budgets import assert_drawn_from
from drafting import Bigram
from draws import DEVICE, draw
from torch import Tensor

from replayssm import Acceptance, generate
from replayssm.drafters import Context
from replayssm.sampling import Sampler
from replayssm.verify import verify

DRAWS = 200_000
VOCAB = 5
# behind the last token and behind each of two drafts
P = torch.tensor([[1.0, 0.5, 0.0, -1.0, 0.2], [0.0, 0.3, 1.0, 0.5, -0.5], [0.4, 0.0, 0.0, 0.8, 0.1]], device=DEVICE)
Q = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1], [0.3, 0.1, 0.1, 0.3, 0.2]], device=DEVICE)  # of two drafts


def sampler(**options: object) -> Sampler:
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 3, "vocab_size": None, **options}
    return Sampler(**settings, device=DEVICE)


def counted(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=VOCAB)


def drawn(distribution: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.multinomial(distribution, count, replacement=True, generator=generator)


@pytest.mark.parametrize("known", [True, False], ids=["with probabilities", "without"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"vocab_size": 4}], ids=str
)
def test_each_place_is_distributed_as_the_model_has_it(options, known):
    rule = sampler(**options)
    target = rule.probabilities(P)
    vocab = target.shape[1]
    q = Q[:, :vocab] / Q[:, :vocab].sum(1, keepdim=True)
    drafts = torch.stack([drawn(q[0], DRAWS, 1), drawn(q[1], DRAWS, 2)], 1)
    brought = torch.arange(DRAWS, device=DEVICE) % 3  # rows with no draft, with one and with two
    accepted, token = verify(
        rule, P.expand(DRAWS, 3, VOCAB), drafts, brought, q.expand(DRAWS, 2, vocab) if known else None
    )
    assert ((accepted >= 0) & (accepted <= brought)).all()
    for place in range(3):
        for most in range(place, 3):  # a draft that stands is one of the model's tokens, and so is what follows it
            got = (accepted >= place) & (brought == most)
            chosen = torch.where(accepted > place, drafts[:, min(place, 1)], token)[got]
            assert_drawn_from(counted(chosen)[:vocab], target[place], f"place {place} of {most}")
    overlap = torch.minimum(target[0], q[0]).sum() if known else (target[0] * q[0]).sum()
    first = (accepted > 0)[brought > 0].float().mean()
    assert abs(first - overlap) < 5 * 0.5 / DRAWS**0.5  # as many drafts stand as can


def test_a_distribution_that_is_wrong_by_two_percent_is_noticed():
    wrong = P[0].softmax(-1)
    wrong = wrong + torch.tensor([0.02, -0.02, 0.0, 0.0, 0.0], device=DEVICE)
    with pytest.raises(AssertionError, match="over the limit"):
        assert_drawn_from(counted(drawn(wrong, DRAWS // 3, 4)), P[0].softmax(-1))


def test_a_draft_that_the_model_cannot_emit_is_never_accepted():
    rule = sampler(top_k=2)
    drafts = torch.full((1000, 1), 3, device=DEVICE)
    accepted, token = verify(rule, P[:2].expand(1000, 2, VOCAB), drafts, torch.ones_like(drafts[:, 0]), None)
    assert (accepted == 0).all()
    assert set(token.tolist()) == {0, 1}


def test_greedy_accepts_while_the_draft_is_the_most_probable_token():
    best = P.argmax(-1).tolist()
    wrong = [(token + 1) % VOCAB for token in best]
    drafts = torch.tensor([[best[0], best[1]], [best[0], wrong[1]], [wrong[0], best[1]], best[:2]], device=DEVICE)
    brought = torch.tensor([2, 2, 2, 1], device=DEVICE)
    accepted, token = verify(sampler(temperature=0.0), P.expand(4, 3, VOCAB), drafts, brought, None)
    assert accepted.tolist() == [2, 1, 0, 1]
    assert token.tolist() == [best[2], best[1], best[0], best[1]]


class FromBigram:
    """Draws its drafts from a table of its own, and keeps to itself what that was or not."""

    def __init__(self, table: Tensor, known: bool):
        self.table, self.known = table, known
        self.generator = torch.Generator(DEVICE).manual_seed(9)

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        token = context.tokens.gather(1, context.lengths.unsqueeze(1) - 1).squeeze(1)
        tokens, distributions = [], []
        for _ in range(num):
            distributions.append(self.table[token])
            token = torch.multinomial(distributions[-1], 1, generator=self.generator).squeeze(1)
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(distributions, 1) if self.known else None


@pytest.mark.parametrize("drafter", ["none", "model", "prompt_lookup", "known", "unknown"])
def test_the_texts_of_generate_are_distributed_as_the_models(drafter):
    """Which token follows which, over 200,000 of them."""
    table, other = draw(1, VOCAB, VOCAB, dtype=torch.float32), draw(2, VOCAB, VOCAB, dtype=torch.float32)
    drafters = {
        "none": None,
        "model": Bigram(table + 0.7 * other),
        "prompt_lookup": "prompt_lookup",
        "known": FromBigram(other.softmax(-1), True),
        "unknown": FromBigram(other.softmax(-1), False),
    }
    acceptance = Acceptance()
    model = Bigram(table)
    tokens = generate(
        model, [[1, 2, 3]] * 4000, max_new_tokens=51, temperature=0.9, top_k=4, seed=5, drafter=drafters[drafter],
        num_drafts=3, acceptance=acceptance,
    )  # fmt: skip
    target = sampler(temperature=0.9, top_k=4).probabilities(model.logits)
    pairs = (tokens[:, :-1] * VOCAB + tokens[:, 1:]).flatten()
    assert_drawn_from(torch.bincount(pairs, minlength=VOCAB**2).view(VOCAB, VOCAB), target, "pairs")
    assert_drawn_from(counted(tokens[:, 0]), target[3], "first token")
    if drafter != "none":
        assert 0.05 < sum(acceptance.accepted) / sum(acceptance.proposed) < 0.9
