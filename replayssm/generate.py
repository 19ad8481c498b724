"""The one way through: prefill in pieces, then steps and commits, with drafts or without. Read it top to bottom."""

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from replayssm.acceptance import Acceptance
from replayssm.cache.packing import has_interior_padding, refuse_interior_padding
from replayssm.cache.state_cache import ReplayStateCache
from replayssm.checks import expect, expect_int64, expect_integers, expect_positive, expect_shape
from replayssm.decoding import Decoding
from replayssm.drafters import MTP, Drafter, DraftModel, PromptLookup, Proposer, Run
from replayssm.drafters.base import PlainDrafter, configured_vocab_size, device_of
from replayssm.graphs import Captured, Verdicts
from replayssm.prefill import prefill
from replayssm.sampling import Sampler

Prompts = Tensor | Sequence[Sequence[int]]

# caches that a run has begun on and not left; not an attribute of theirs, which a copy of a cache would carry on
_running: WeakSet[ReplayStateCache] = WeakSet()


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
    drafter: str | nn.Module | Proposer | Drafter | None = None,
    num_drafts: int = 4,
    acceptance: Acceptance | None = None,
    stream: bool = False,
    cuda_graphs: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor | Iterator[Tensor]:
    """Continue prompts by replay.

    With a drafter this is speculative decoding: a step reads the newest token of each row and its drafts together, and
    keeps those that the model would have chosen itself. Texts are the same as without (greedy), or distributed the
    same (sampled), up to rounding.

    Args:
        model: called as ``model(ids, cache, attention_mask=..., logits_to_keep=n)``, as a ``HybridLM`` is.
        ids: (batch, t) int tensor, or a list of lists of different lengths; every prompt has at least 1 token.
        max_new_tokens: most new tokens a row.
        attention_mask: (batch, t), 1 = a token, padding on the left or right; only with a tensor of ids.
        cache: continue these sequences: ids are then what follows everything committed. Afterwards the cache holds
            all but the last token that each row returned. None builds one. With a drafter it must have step_tokens of
            at least 1 + num_drafts.
        window, checkpoint, read_format: of the cache that is built; see ``ReplayStateCache``.
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_k, top_p: draw only from the k most probable tokens, from the smallest set of at least this probability.
        seed: of the draws; None draws from torch's global generator. Also of stochastic rounding in a cache that is
            built, there 0 for None.
        eos: a row ends after emitting one of these ids.
        pad: stands in the result behind the end of a row.
        vocab_size: ids from here on are never emitted; None is what the model's config says.
        drafter: who guesses: "prompt_lookup" copies from the text, "mtp" is the model's own head; or a smaller model
            with the same vocabulary, or an object with ``propose`` (see ``drafters.Proposer``). A drafter knows the
            ids of this call, not what the cache held before.
        num_drafts: most guesses a step and row.
        acceptance: counts how many were right.
        stream: return an iterator of (batch, n) tensors, as the tokens come: the next columns that are final in every
            row. Joined they are the result without ``stream``. Its cache is free again at its end or ``close()``.
        cuda_graphs: on a GPU, record a step once and replay it. False for a model that reads values on the host or has
            hooks that must run at every step.
        progress: called with (prompt tokens done, prompt tokens) after each piece of a long prompt.

    Returns:
        (batch, up to max_new_tokens) int64 on the model's device, new tokens only; with ``stream``, an iterator.

    Raises:
        ValueError: an argument out of range; nothing has been run then. Or the answer of ``propose`` is none.
        RuntimeError: another run on the cache has not ended; it goes on as if this one had not been asked for.
    """
    _expect_types(model, cache, acceptance)
    device = device_of(model)
    tokens, mask = _prompts(ids, attention_mask, device)
    expect_positive("generate", max_new_tokens=max_new_tokens)
    if vocab_size is None:
        vocab_size = configured_vocab_size(model)
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, seed=seed, vocab_size=vocab_size, device=device)
    ends = _ends(eos, device)
    expect_int64("generate", "pad", pad, "Give the id that fills ended rows.")
    chosen = _drafter(drafter)
    if chosen is None:
        num_drafts = 0
    else:
        expect_positive("generate", num_drafts=num_drafts)
    if cache is None:
        cache = ReplayStateCache(
            model,
            len(tokens),
            window=window,
            step_tokens=1 + num_drafts,
            max_seqlen=tokens.shape[1] + max_new_tokens + num_drafts,
            checkpoint=checkpoint,
            read_format=read_format,
            seed=0 if seed is None else seed,
        )
    expect(
        cache.batch == len(tokens),
        f"generate: cache must have {len(tokens)} rows, one a prompt; got {cache.batch}. Build a cache of that batch.",
    )
    expect(
        cache.step_tokens > num_drafts,
        f"generate: cache must have step_tokens of at least {1 + num_drafts}, a token and num_drafts={num_drafts}; got "
        f"{cache.step_tokens}. Build it with step_tokens={1 + num_drafts}, or ask for fewer drafts.",
    )
    _expect_free(cache)
    lengths = torch.full_like(cache.seqlen, tokens.shape[1]) if mask is None else mask.sum(1)
    needed = _expect_room(cache, lengths, max_new_tokens)
    if chosen is not None:
        with torch.no_grad():
            chosen.begin(Run(model, tokens, mask, max_new_tokens, num_drafts, cache.window, sampler, vocab_size))
    decoding = Decoding(
        model,
        cache,
        tokens,
        lengths,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        ends=ends,
        pad=pad,
        drafter=chosen,
        num_drafts=num_drafts,
        spare=cache.max_seqlen is None or needed + 1 + num_drafts <= cache.max_seqlen,
    )
    pieces = _decode(decoding, tokens, mask, acceptance, cuda_graphs, progress)
    return pieces if stream else torch.cat(list(pieces), dim=1)


@torch.no_grad()
def _decode(
    decoding: Decoding,
    tokens: Tensor,
    mask: Tensor | None,
    acceptance: Acceptance | None,
    cuda_graphs: bool,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Tensor]:
    """Read the prompts, then yield the next columns of the result until every row has ended."""
    with _claimed(decoding.cache):
        drafter = decoding.drafter
        observe = drafter.read_prompt if drafter is not None and drafter.reads_hidden else None
        read = prefill(decoding.model, decoding.cache, tokens, mask, observe=observe, progress=progress)
        decoding.start(*read)
        verdicts = Verdicts(tokens.device)
        generators = [] if decoding.sampler.generator is None else [decoding.sampler.generator]
        # held here and not by what it runs: a cycle would keep memory of the GPU until Python looks for cycles
        advance = Captured(decoding.advance, tokens.device if cuda_graphs else torch.device("cpu"), generators)
        shown, steps = 0, 0
        try:
            while True:
                verdicts.put(decoding.verdict)
                more = steps < decoding.max_new_tokens - 1  # each step gives a row at least 1 token
                while verdicts.due or (len(verdicts) and not more):
                    final, alive = verdicts.take()
                    if final > shown:
                        yield decoding.tokens[:, shown:final]
                        shown = final
                    if not alive:
                        return
                decoding.prepare()
                advance()
                steps += 1
        finally:
            if acceptance is not None:
                acceptance.add(decoding.counts)


def _drafter(drafter: str | nn.Module | Proposer | Drafter | None) -> Drafter | None:
    """What stands for each way to name a drafter."""
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str) and drafter in _BY_NAME:
        return _BY_NAME[drafter]()
    if isinstance(drafter, Proposer):
        return PlainDrafter(drafter)
    expect(
        isinstance(drafter, nn.Module),
        f"generate: drafter must be {', '.join(map(repr, _BY_NAME))}, a model, an object with propose, or None; got "
        f"{drafter!r}. Choose one of these.",
    )
    assert isinstance(drafter, nn.Module)
    return DraftModel(drafter)


_BY_NAME: dict[str, type[Drafter]] = {"prompt_lookup": PromptLookup, "mtp": MTP}


def _expect_types(model: object, cache: object, acceptance: object) -> None:
    """Refuse what is easily taken for a model, a cache or a count of drafts."""
    for name, value, kind, advice in (
        ("model", model, nn.Module, "from_pretrained returns a model and its tokenizer: give the model alone."),
        ("cache", cache, ReplayStateCache, "Build one for this model, or leave it out."),
        ("acceptance", acceptance, Acceptance, "Give Acceptance(), or leave it out."),
    ):
        expect(
            isinstance(value, kind) or (value is None and kind is not nn.Module),
            f"generate: {name} must be of type {kind.__name__}; got {type(value).__name__}. {advice}",
        )


def _prompts(ids: Prompts, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Left-padded ids (batch, t), 0 in the padding, and their mask, or None where nothing is padded."""
    if not isinstance(ids, Tensor):
        expect(
            attention_mask is None,
            "generate: attention_mask must come with a tensor of ids; got a list. Lists need no mask.",
        )
        rows = _listed(ids)
        lengths = [len(row) for row in rows]
        expect(
            len(lengths) > 0 and min(lengths) > 0,
            f"generate: ids must hold at least 1 prompt of at least 1 token each; got lengths {lengths}. "
            "Start an empty prompt with a token of your choice.",
        )
        for extreme in (min(map(min, rows)), max(map(max, rows))):
            expect_int64("generate", "ids", int(extreme), "Use ids of the tokenizer.")
        width = max(lengths)
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
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


def _listed(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts of ints."""
    try:
        return [[operator.index(token) for token in row] for row in ids]
    except TypeError as error:
        raise ValueError(
            f"generate: ids must be a (batch, t) tensor or a list of lists of ints; got {ids!r:.80}. Give one list a "
            "prompt, also for a single one."
        ) from error


def _ends(eos: object, device: torch.device) -> Tensor:
    """The ids that end a row, (n,) int64."""
    if eos is None:
        ids = []
    elif isinstance(eos, Collection) and not isinstance(eos, Tensor):
        ids = list(eos)
    else:
        ids = [eos]
    for end in ids:
        expect_int64("generate", "eos", end, "Use ids of the tokenizer: one, several, or None for no end.")
    return torch.tensor(ids, dtype=torch.int64, device=device)


@contextlib.contextmanager
def _claimed(cache: ReplayStateCache) -> Iterator[None]:
    """The cache is this run's own, until it ends or is given up."""
    _expect_free(cache)
    _running.add(cache)
    try:
        yield
    finally:
        _running.discard(cache)


def _expect_free(cache: ReplayStateCache) -> None:
    """Refuse a cache that another run is still continuing: tokens of both would mix in its rows."""
    if cache in _running:
        raise RuntimeError(
            "generate: cache must be free, with no other run on it; got one whose stream has not ended. Take the "
            "stream to its end or close() it first, or give this run a copy.deepcopy of the cache."
        )


def _expect_room(cache: ReplayStateCache, lengths: Tensor, max_new_tokens: int) -> int:
    """Tokens of the longest row at the end without the last one, which is never fed; there must be room for them."""
    if cache.max_seqlen is None:
        return 0
    needed = int((cache.seqlen + lengths).max()) + max_new_tokens - 1
    expect(
        needed <= cache.max_seqlen,
        f"generate: cache must have max_seqlen of at least {needed}, tokens committed + prompt + new tokens - 1; got "
        f"{cache.max_seqlen}. Build a longer cache, or ask for fewer tokens.",
    )
    return needed


def _left_padded(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's tokens to the right end, so that every row's last token is in the last column."""
    expect(
        bool(mask.any(1).all()),
        f"generate: attention_mask must leave at least 1 token a row; got {mask.sum(1).tolist()}. Drop empty rows.",
    )
    refuse_interior_padding("generate", has_interior_padding(mask))
    order = torch.argsort(mask.to(torch.uint8), dim=1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)
