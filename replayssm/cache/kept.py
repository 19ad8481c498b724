"""What a commit keeps of a step: how many tokens of each row, and of a draft tree which path."""

import torch
from torch import Tensor

from replayssm.cache.step import KEPT, PATH, Clock, Step
from replayssm.checks import expect, expect_int64, expect_integers, expect_shape, readable

_WHERE = "ReplayStateCache.commit"


def check_kept(clock: Clock, n: int | Tensor | None, path: Tensor | None) -> None:
    """Refuse, before anything changes, what can be seen to be wrong.

    A message must not print what a device tensor holds: it is made whether it is needed or not, and would wait.
    """
    step = clock.step
    assert step is not None
    _check_path(step, n, path)
    if path is not None and n is None:
        n = path.shape[1]
    if n is None:
        return
    expect(
        not step.scan,
        f"{_WHERE}: n must be None after a step of more than step_tokens={clock.step_tokens} tokens, which goes "
        f"straight into the checkpoint; got {_shown(n)}. Commit everything, or feed drafts in steps of at most "
        f"step_tokens tokens.",
    )
    most = step.length
    if isinstance(n, Tensor):
        advice = "Give one count for each row of the step."
        expect_integers(_WHERE, "n", n)
        expect_shape(_WHERE, "n", n, (len(step.length),), advice)
        if not readable(n):
            return
        counts = n.long()
    else:
        expect_int64(_WHERE, "n", n, "Pass how many tokens to keep, an integer tensor of one a row, or None for all.")
        counts = torch.full((len(step.length),), n, device="cpu")
        if step.off is not None and readable(step.off):
            counts = torch.where(step.off, 0, counts)  # an int speaks of the rows that are on
    most = most if readable(most) else torch.full_like(counts, step.t)
    expect(
        bool(((counts >= 0) & (counts <= most)).all()),
        f"{_WHERE}: n must be between 0 and the real new tokens of each row, {most.tolist()}; got "
        f"{counts.tolist()}. Keep at most what the step was given (0 for a row that is off).",
    )
    if path is not None and readable(path) and readable(step.length):
        assert step.tree is not None
        expect(
            bool((counts <= step.tree.prefix(path.long(), step.length)).all()),
            f"{_WHERE}: path must lead from a root of the tree from parent to child, n={counts.tolist()} nodes in each "
            f"row; got {path.tolist()}. Give the columns of the kept nodes in order, and keep at most these.",
        )


def _shown(n: object) -> str:
    return f"n of shape {tuple(n.shape)}" if isinstance(n, Tensor) else f"n={n!r}"


def count_kept(clock: Clock, n: int | Tensor | None, path: Tensor | None) -> Tensor:
    """(batch,) int64: how many tokens each cache row keeps, after whatever can be kept; flags what cannot be."""
    step = clock.step
    assert step is not None
    kept = step.row_length
    if path is not None and n is None:
        n = path.shape[1]
    if n is not None:
        asked = step.put(n.long()) if isinstance(n, Tensor) else torch.full_like(kept, n)
        asked = asked if step.present is None else torch.where(step.present, asked, 0)
        kept = asked.clamp(min=0).minimum(step.row_length)
        clock.errors[KEPT].logical_or_((kept != asked).any())
    if path is not None:
        assert step.tree is not None
        there = kept.minimum(step.put(step.tree.prefix(path, step.length)))
        clock.errors[PATH].logical_or_((there != kept).any())
        kept = there
    return kept


def _check_path(step: Step, n: int | Tensor | None, path: Tensor | None) -> None:
    """Refuse a path without a tree, a tree without a path, and what is not a tensor of columns."""
    if path is None:
        nothing = isinstance(n, int) and not isinstance(n, bool) and n == 0
        expect(
            step.tree is None or nothing,
            f"{_WHERE}: path must be given after a step with parents, unless n is the int 0; got None. Give the "
            "columns of the kept nodes, from the root.",
        )
        return
    expect_integers(_WHERE, "path", path)
    expect(
        step.tree is not None,
        f"{_WHERE}: path must be None after a step without parents; got {tuple(path.shape)}. The tokens that are kept "
        "are the first n.",
    )
    advice = "Give the columns of the kept nodes of each row of the step, from the root."
    expect_shape(_WHERE, "path", path, (len(step.length), "n"), advice)
    expect(
        path.shape[1] <= step.t,
        f"{_WHERE}: path must have at most as many columns as the tree has nodes, {step.t}; got {path.shape[1]}. "
        f"{advice}",
    )
