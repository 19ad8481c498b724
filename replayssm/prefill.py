"""Prompts go in by pieces, so that activations are bounded whatever a prompt's length."""

from collections.abc import Callable

from torch import Tensor, nn

from replayssm.cache.state_cache import ReplayStateCache

PREFILL_PIECE = 2048  # most tokens a call


def prefill(
    model: nn.Module,
    cache: ReplayStateCache,
    tokens: Tensor,
    mask: Tensor | None,
    *,
    observe: Callable[[Tensor, Tensor | None, Tensor], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Feed prompts and commit them.

    Args:
        tokens: (batch, t) int64, left-padded, so that the last column is real in every row.
        mask: (batch, t), 1 = a token, or None where nothing is padded.
        observe: called with the tokens, mask and hidden states of each piece (``Drafter.read_prompt``); the model must
            know the argument ``return_hidden``.
        progress: called with (tokens done, tokens) after each piece, where there are several.

    Returns:
        Behind each row's last token: the logits (batch, vocab), and with ``observe`` the hidden state (batch, d_model).
    """
    total = tokens.shape[1]
    # pieces of about one length: a short last one would be a step, in which a layer's limits do not hold
    pieces = tokens.tensor_split(-(-total // PREFILL_PIECE), dim=1)
    done, hidden = 0, None
    for piece in pieces:
        piece_mask = None if mask is None else mask[:, done : done + piece.shape[1]]
        if observe is None:
            logits = model(piece, cache, attention_mask=piece_mask, logits_to_keep=1)
        else:
            logits, hidden = model(piece, cache, attention_mask=piece_mask, logits_to_keep=1, return_hidden=True)
            observe(piece, piece_mask, hidden)
        cache.commit()
        done += piece.shape[1]
        if progress is not None and len(pieces) > 1:
            progress(done, total)
    return logits[:, -1], None if hidden is None else hidden[:, -1]
