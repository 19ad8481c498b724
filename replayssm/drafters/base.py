"""What ``generate`` asks of a drafter, what it tells it, and how it looks at the answer."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from replayssm.checks import expect, expect_device, expect_integers, expect_shape, readable
from replayssm.sampling import Sampler

SUM_ERROR = 1e-3  # that probabilities of 16 bits may have


class Context(NamedTuple):
    """The texts so far, on the model's device: buffers that ``generate`` goes on writing to. Read, never keep or write.

    Row b's text is ``tokens[b, :lengths[b]]``: the prompt of this call and all tokens since, the newest of which no
    model has read yet.
    """

    tokens: Tensor  # (batch, n) int64, -1 behind a row's text; n is the same at every step
    lengths: Tensor  # (batch,) int64
    hidden: Tensor | None  # (batch, d_model) of the token before the newest; for drafters that ask for it


class Run(NamedTuple):
    """What a drafter may know before the first draft."""

    model: nn.Module  # whose tokens are drafted
    tokens: Tensor  # (batch, t) int64, the prompts, left-padded
    mask: Tensor | None  # (batch, t), 1 = a token; None is all
    max_new_tokens: int
    num_drafts: int
    window: int  # of the model's cache
    sampler: Sampler  # to draw as the model's tokens are drawn
    vocab_size: int | None  # ids from here on are never emitted; None is unknown


@runtime_checkable
class Proposer(Protocol):
    """All that a drafter of one's own needs."""

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        """Guess what follows each text.

        Args:
            context: the texts so far.
            num: most drafts a row.

        Returns:
            tokens: (batch, num) int, on the same device. A row with fewer drafts has -1 behind its last one; an id
                that the model never emits ends the drafts as well.
            probabilities: (batch, num, vocab) floating point, the distribution that each draft was drawn from, over
                the ids below ``vocab_size``; anything behind a row's last draft. None: the drafts were not drawn, or
                nobody knows from what; the output is right all the same, with fewer drafts accepted.
                Ignored at temperature 0. Always given or never.
        """
        ...


class Drafter:
    """Base of the drafters that want more than texts: the prompts beforehand, hidden states, or a place in CUDA graphs.

    Attributes:
        reads_hidden: ``context.hidden`` is wanted; the model must know ``return_hidden``.
        capturable: ``propose`` never waits for the device, and writes what it keeps in place: it can be recorded.
    """

    reads_hidden = False
    capturable = False

    def begin(self, run: Run) -> None:
        """Prepare for texts that begin with these prompts; called before the model has read them.

        Raises:
            ValueError: it cannot draft for this model; nothing has changed then.
        """

    def read_prompt(self, tokens: Tensor, mask: Tensor | None, hidden: Tensor) -> None:
        """Take note of a piece of the prompts that the model has read; only with ``reads_hidden``.

        Args:
            tokens: (batch, t) int64, columns of ``Run.tokens``, piece after piece.
            mask: (batch, t), 1 = a token; None is all.
            hidden: (batch, t, d_model), what the model's head would be given for each.
        """

    def read_step(self, hidden: Tensor) -> None:
        """Take note of a step of the model: the newest token and the drafts; only with ``reads_hidden``.

        Args:
            hidden: (batch, 1 + num_drafts, d_model), arbitrary for tokens that were not kept. Copy it, never keep it.
        """

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        """As ``Proposer.propose``."""
        raise NotImplementedError


class PlainDrafter(Drafter):
    """An object that has ``propose`` and nothing else."""

    def __init__(self, proposer: Proposer):
        self.proposer = proposer

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        return self.proposer.propose(context, num)


def name_of(drafter: Drafter) -> str:
    """How errors name a drafter."""
    return type(drafter.proposer if isinstance(drafter, PlainDrafter) else drafter).__name__


def check_proposal(
    drafter: Drafter, tokens: Tensor, probabilities: Tensor | None, asked: Tensor, vocab_size: int
) -> None:
    """Refuse an answer of ``propose`` that is not what it has to be; values are looked at where that is free.

    Args:
        asked: (batch, num), a tensor of the shape that was asked for, on the model's device.
        vocab_size: ids from here on are never emitted.

    Raises:
        ValueError: shape, dtype or device; probabilities that are negative, do not sum to 1, or say that a draft could
            not have been drawn.
    """
    where = f"{name_of(drafter)}.propose"
    advice = "Give one draft for each row and place, -1 for none."
    expect(isinstance(tokens, Tensor), f"{where}: tokens must be a tensor; got {type(tokens).__name__}. Convert them.")
    expect_shape(where, "tokens", tokens, tuple(asked.shape), advice)
    expect_integers(where, "tokens", tokens)
    expect_device(where, "tokens", tokens, asked.device)
    if probabilities is None:
        return
    advice = "Give the distribution of each draft over the ids that the model emits, or None."
    expect_shape(where, "probabilities", probabilities, (*asked.shape, vocab_size), advice)
    expect(
        probabilities.is_floating_point(),
        f"{where}: probabilities must be floating point; got {probabilities.dtype}. Convert them.",
    )
    expect_device(where, "probabilities", probabilities, tokens.device)
    if not (readable(tokens) and readable(probabilities)):
        return
    drafted = tokens.ge(0).logical_and(tokens < vocab_size).long().cumprod(1).bool()
    rows = probabilities[drafted].float()
    sums = rows.sum(-1)
    wrong = (sums - 1).abs() > SUM_ERROR
    expect(
        not bool(wrong.any()),
        f"{where}: probabilities must sum to 1 for each draft; got {sums[wrong][:5].tolist()}. Normalise them.",
    )
    drawn = rows.gather(1, tokens[drafted].long().unsqueeze(1))
    expect(
        bool((rows >= 0).all()) and bool((drawn > 0).all()),
        f"{where}: probabilities must be at least 0, and above 0 for the draft itself; got {rows.amin().item():g} and "
        f"{drawn.amin().item():g}. Give the distribution that the drafts were drawn from.",
    )


def leading(flags: Tensor) -> Tensor:
    """(batch, n) bool -> (batch,) int64, how many are true before the first that is not."""
    return flags.long().cumprod(1).sum(1)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; a model without any is on the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def configured_vocab_size(model: nn.Module) -> int | None:
    """What a model's config says, where it has one."""
    config = getattr(model, "config", None)
    return config.get("used_vocab_size", config.get("vocab_size")) if isinstance(config, dict) else None
