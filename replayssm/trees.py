"""Draft trees: several continuations of a sequence, verified in one step.

A tree is its ``parents``: (rows, t) int, for each column of a call the column of the node before it, -1 for the last
committed token. A parent stands before its child, so columns in order never meet a node before its ancestors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.checks import expect, expect_device, expect_integers, expect_shape, readable


class Tree:
    """What follows from ``parents``, worked out on the device once a step.

    Args:
        parents: (t,) or (rows, t) int; one that is not -1 or an earlier column is clamped to these.
        rows: rows of the call, which share a tree of (t,).

    Attributes:
        parents: (rows, t) int64.
        ancestors: (rows, t, t) int64: of each node itself, its parent, its parent's parent, ...; -1 behind the root.
        depth: (rows, t) int64, ancestors of a node without itself; it stands at position seqlen + depth.
        before: (rows, t, t) bool, [s, i]: node i is node s or one of its ancestors.
    """

    def __init__(self, parents: Tensor, rows: int):
        t = parents.shape[-1]
        column = torch.arange(t, device=parents.device)
        self.parents = parents.long().clamp(min=-1).minimum(column - 1).expand(rows, t)
        self.ancestors = _ancestors(self.parents)
        self.depth = (self.ancestors >= 0).sum(-1) - 1
        self.before = (self.ancestors.unsqueeze(-1) == column).any(-2)

    @property
    def t(self) -> int:
        """Nodes of the tree."""
        return self.parents.shape[1]

    def lookback(self, width: int) -> Tensor:
        """The ``width`` tokens that end with each node, oldest first.

        Returns:
            (rows, t, width) int64: columns of the call, and for committed tokens -1, -2, ... from the last one back.
        """
        back = torch.arange(width - 1, -1, -1, device=self.depth.device)
        line = F.pad(self.ancestors, (0, max(0, width - self.t)), value=-1).index_select(2, back)
        return torch.where(line >= 0, line, self.depth.unsqueeze(2) - back)

    def prefix(self, path: Tensor, length: Tensor) -> Tensor:
        """How far a path goes from the root, each node the child of the one before it.

        Args:
            path: (rows, n) int64, columns.
            length: (rows,) int64, nodes that there are, from the left.

        Returns:
            (rows,) int64, 0 .. n.
        """
        known = (path >= 0) & (path < length.unsqueeze(1))
        previous = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
        follows = known & (self.parents.gather(1, path.clamp(0, self.t - 1)) == previous)
        return follows.long().cumprod(1).sum(1)


def longest_accepted(parents: Tensor, drafts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of a draft tree that greedy decoding would have taken; nothing is read back from the device.

    Column 0 holds the token that was chosen last, which is kept in any case. A node is accepted if its parent is, and
    its draft is what the model puts behind the parent; any other node whose parent is -1 is not, so such nodes fill up
    the tree of a row with fewer drafts. Of equally long paths the one that ends in the lowest column is taken.

    Args:
        parents: (t,) or (batch, t) int, as the model was given them.
        drafts: (batch, t) int, the ids that the model was given.
        targets: (batch, t) int, the most probable token behind each node: ``logits.argmax(-1)``.

    Returns:
        n (batch,) int64, 1 .. t, and path (batch, t) int64, columns from the root, -1 behind the first n: arguments of
        ``cache.commit``. The token to go on with is ``targets`` at column ``path[n - 1]``.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or parents that can be seen to be out of range.
    """
    where = "longest_accepted"
    expect_shape(where, "drafts", drafts, ("batch", "t"), "Give the ids of the call.")
    expect_shape(where, "targets", targets, tuple(drafts.shape), "Give one token for each node.")
    for name, ids in (("drafts", drafts), ("targets", targets)):
        expect_integers(where, name, ids)
        expect_device(where, name, ids, parents.device)
    expect_parents(where, parents, (drafts.shape[0], drafts.shape[1]))
    tree = Tree(parents, len(drafts))
    column = torch.arange(tree.t, device=parents.device)
    fits = (drafts == targets.gather(1, tree.parents.clamp(min=0))) & (tree.parents >= 0)
    fits = fits | (column == 0)
    accepted = (fits.unsqueeze(1) | tree.before.logical_not()).all(-1)
    depth = torch.where(accepted, tree.depth, -1)
    last = (depth * tree.t - column).argmax(1, keepdim=True)  # no two are equal
    n = depth.gather(1, last) + 1
    back = n - 1 - column  # the node at position i is the (n - 1 - i)-th ancestor of the last one
    line = tree.ancestors.gather(1, last.unsqueeze(2).expand(-1, -1, tree.t)).squeeze(1)
    return n.squeeze(1), torch.where(back >= 0, line.gather(1, back.clamp(min=0)), -1)


def expect_parents(where: str, parents: Tensor, shape: tuple[int, int]) -> None:
    """Check shape and dtype of ``parents`` for a call of ``shape`` (rows, t), and the values where they can be seen."""
    rows, t = shape
    advice = "Give the column of each node's parent, for every row or for all rows at once."
    expect_shape(where, "parents", parents, (t,) if parents.ndim == 1 else (rows, t), advice)
    expect_integers(where, "parents", parents)
    if readable(parents):
        expect(
            not bool(misplaced(parents)),
            f"{where}: parents must be -1 or the column of a node further left; got {parents.tolist()}. Put each node "
            "behind its parent.",
        )


def misplaced(parents: Tensor) -> Tensor:
    """() bool: some node's parent is neither -1 nor an earlier column."""
    return ((parents < -1) | (parents >= torch.arange(parents.shape[-1], device=parents.device))).any()


def _ancestors(parents: Tensor) -> Tensor:
    """(rows, t) -> (rows, t, t), see ``Tree``; in log2(t) steps, each of which doubles how far back it looks."""
    rows, t = parents.shape
    up = torch.cat([torch.zeros_like(parents[:, :1]), parents + 1], 1)  # node j at j + 1; the committed token, its own
    line = torch.arange(1, t + 1, device=parents.device).expand(rows, t).unsqueeze(-1)
    while line.shape[-1] < t:
        line = torch.cat([line, up.gather(1, line.flatten(1)).view_as(line)], -1)
        up = up.gather(1, up)
    return line[..., :t] - 1
