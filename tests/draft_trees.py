"""Random draft trees, and what a walk from node to node makes of them."""

import torch
from draws import DEVICE
from hypothesis import strategies as st
from torch import Tensor


def trees(t: int) -> st.SearchStrategy[list[int]]:
    """Parents of t nodes: bushes, chains and what lies between."""
    return st.tuples(*(st.integers(-1, j - 1) | st.integers(max(-1, j - 2), j - 1) for j in range(t))).map(list)


def chain(t: int) -> list[int]:
    return list(range(-1, t - 1))


def line(parents: list[int], node: int) -> list[int]:
    """The columns from the root to a node."""
    return [*line(parents, parents[node]), node] if node >= 0 else []


def paths(parents: list[int]) -> st.SearchStrategy[list[int]]:
    """Lines of the tree from the root to any node, the empty one among them."""
    return st.integers(-1, len(parents) - 1).map(lambda node: line(parents, node))


def padded(lines: list[list[int]], filler: int = -7) -> Tensor:
    """Lines of different lengths as one tensor of paths; what stands behind a line must not matter."""
    width = max(1, *map(len, lines))
    return torch.tensor([[*nodes, *[filler] * (width - len(nodes))] for nodes in lines], device=DEVICE)
