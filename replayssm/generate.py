"""The one way through: prefill in pieces, then one step and one commit a token. Read it top to bottom."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from replayssm.cache.packing import has_interior_padding, refuse_interior_padding
from replayssm.cache.state_cache import ReplayStateCache
from replayssm.checks import expect, expect_integers, expect_positive, expect_shape
from replayssm.sampling import Sampler

PREFILL_PIECE = 2048  # most tokens a prefill call; bounds activations, whatever the prompt's length

Prompts = Tensor | Sequence[Sequence[int]]


def generate(
    model: nn.Module,
    ids: Prompts,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    cache: ReplayStateCache | None = None,
    window: int | Literal["auto"] = 16,
    checkpoint: str = "fp32",
    read_format: str | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos: int | Sequence[int] | None = None,
    pad: int = 0,
    vocab_size: int | None = None,
    drafter: None = None,
    num_drafts: int = 4,
    stream: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor | Iterator[Tensor]:
    """Continue prompts by replay.

    Args:
        model: called as ``model(ids, cache, attention_mask=..., logits_to_keep=1)``, as a ``HybridLM`` is.
        ids: (batch, t) int tensor, or a list of lists of different lengths; every prompt has at least 1 token.
        max_new_tokens: most new tokens a row.
        attention_mask: (batch, t), 1 = a token, padding on the left or right; only with a tensor of ids.
        cache: continue these sequences: ids are then what follows everything committed. Afterwards the cache holds
            all but the last token that each row returned. None builds one.
        window, checkpoint, read_format: of the cache that is built; see ``ReplayStateCache``.
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_k, top_p: draw only from the k most probable tokens, from the smallest set of at least this probability.
        seed: of the draws; None draws from torch's global generator.
        eos: a row ends after emitting one of these ids.
        pad: stands in the result behind the end of a row.
        vocab_size: ids from here on are never emitted; None is what the model's config says.
        drafter: reserved for speculative decoding.
        num_drafts: reserved for speculative decoding.
        stream: return an iterator of (batch, n) tensors, as the tokens come.
        progress: called with (prompt tokens done, prompt tokens) after each piece of a long prompt.

    Returns:
        (batch, up to max_new_tokens) int64 on the model's device, new tokens only; with ``stream``, an iterator.

    Raises:
        ValueError: an argument out of range; nothing has been run then.
    """
    if drafter is not None:
        raise NotImplementedError("generate: drafters do not exist yet; pass drafter=None.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    tokens, mask = _prompts(ids, attention_mask, device)
    expect_positive("generate", max_new_tokens=max_new_tokens)
    if vocab_size is None:
        vocab_size = _configured_vocab_size(model)
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, seed=seed, vocab_size=vocab_size, device=device)
    ends = _ends(eos, device)
    expect(isinstance(pad, int), f"generate: pad must be an int; got {pad!r}. Give the id that fills ended rows.")
    if cache is None:
        cache = ReplayStateCache(
            model,
            len(tokens),
            window=window,
            max_seqlen=tokens.shape[1] + max_new_tokens,
            checkpoint=checkpoint,
            read_format=read_format,
        )
    expect(
        cache.batch == len(tokens),
        f"generate: cache must have {len(tokens)} rows, one a prompt; got {cache.batch}. Build a cache of that batch.",
    )
    _expect_room(cache, tokens, mask, max_new_tokens)
    pieces = _decode(model, cache, tokens, mask, max_new_tokens, sampler, ends, pad, progress)
    return pieces if stream else torch.cat(list(pieces), dim=1)


@torch.no_grad()
def _decode(
    model: nn.Module,
    cache: ReplayStateCache,
    tokens: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    sampler: Sampler,
    ends: Tensor,
    pad: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Tensor]:
    """Yield (batch, 1) tokens until every row has ended or has all its tokens."""
    logits = _prefill(model, cache, tokens, mask, progress)
    alive = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    for emitted in range(1, max_new_tokens + 1):  # a row that has ended is fed on, and what it gives is not kept
        token = sampler(logits)
        yield torch.where(alive, token, pad).unsqueeze(1)
        if len(ends):
            alive = alive.logical_and(torch.isin(token, ends).logical_not())
        if emitted == max_new_tokens or (len(ends) and not alive.any()):
            return
        logits = model(token.unsqueeze(1), cache, logits_to_keep=1)[:, -1]
        cache.commit(alive.long() if len(ends) else None)  # a row that has ended does not advance


def _prefill(
    model: nn.Module,
    cache: ReplayStateCache,
    tokens: Tensor,
    mask: Tensor | None,
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    """Feed the prompts in pieces; returns the logits behind each row's last token, (batch, vocab)."""
    total = tokens.shape[1]
    # pieces of about one length: a short last one would be a step, in which a layer's limits do not hold
    pieces = tokens.tensor_split(-(-total // PREFILL_PIECE), dim=1)
    done = 0
    for piece in pieces:
        piece_mask = None if mask is None else mask[:, done : done + piece.shape[1]]
        logits = model(piece, cache, attention_mask=piece_mask, logits_to_keep=1)
        cache.commit()
        done += piece.shape[1]
        if progress is not None and len(pieces) > 1:
            progress(done, total)
    return logits[:, -1]  # prompts are left-padded, so the last column is real in every row


def _prompts(ids: Prompts, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Left-padded ids (batch, t), 0 in the padding, and their mask, or None where nothing is padded."""
    if not isinstance(ids, Tensor):
        expect(
            attention_mask is None,
            "generate: attention_mask must come with a tensor of ids; got a list. Lists need no mask.",
        )
        lengths = [len(row) for row in ids]
        expect(
            len(lengths) > 0 and min(lengths) > 0,
            f"generate: ids must hold at least 1 prompt of at least 1 token each; got lengths {lengths}. "
            "Start an empty prompt with a token of your choice.",
        )
        width = max(lengths)
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids])
        mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)
    else:
        expect_shape("generate", "ids", ids, ("batch", "t"), "Give one row a prompt.")
        expect(ids.numel() > 0, f"generate: ids must hold at least 1 token a row; got {tuple(ids.shape)}. Add one.")
        tokens, mask = ids, torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is not None:
            advice = "Give one entry for each id, 1 for a token and 0 for padding."
            expect_shape("generate", "attention_mask", attention_mask, tuple(ids.shape), advice)
            mask = attention_mask.to(ids.device) != 0
            tokens, mask = _left_padded(tokens, mask)
    expect_integers("generate", "ids", tokens)
    tokens = tokens.long().masked_fill(~mask, 0)  # an id that the model does not have may stand in padding
    return tokens.to(device), None if bool(mask.all()) else mask.to(device)


def _ends(eos: int | Sequence[int] | None, device: torch.device) -> Tensor:
    """The ids that end a row, (n,) int64."""
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    expect(
        all(isinstance(end, int) and not isinstance(end, bool) for end in ids),
        f"generate: eos must be an int, a sequence of ints or None; got {eos!r}. Use the ids of the tokenizer.",
    )
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _expect_room(cache: ReplayStateCache, tokens: Tensor, mask: Tensor | None, max_new_tokens: int) -> None:
    """Refuse what max_seqlen leaves no room for, before anything runs; the last new token is never fed."""
    if cache.max_seqlen is None:
        return
    lengths = tokens.shape[1] if mask is None else mask.sum(1)
    needed = int((cache.seqlen + lengths).max()) + max_new_tokens - 1
    expect(
        needed <= cache.max_seqlen,
        f"generate: cache must have max_seqlen of at least {needed}, tokens committed + prompt + new tokens - 1; got "
        f"{cache.max_seqlen}. Build a longer cache, or ask for fewer tokens.",
    )


def _left_padded(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's tokens to the right end, so that every row's last token is in the last column."""
    expect(
        bool(mask.any(1).all()),
        f"generate: attention_mask must leave at least 1 token a row; got {mask.sum(1).tolist()}. Drop empty rows.",
    )
    refuse_interior_padding("generate", has_interior_padding(mask))
    order = torch.argsort(mask.to(torch.uint8), dim=1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)


def _configured_vocab_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    return config.get("vocab_size") if isinstance(config, dict) else None
