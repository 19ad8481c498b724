"""Philox4x32-10: random words as a function of a key and a counter, with no state of its own (Salmon et al., SC 2011).

Words are int64 tensors with values below 2^32: torch has few operations on unsigned ones. Everything stays on the
device.
"""

import torch
from torch import Tensor

LOW = 0xFFFFFFFF  # the low 32 bits
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
BUMPS = 0x9E3779B9, 0xBB67AE85  # of the key, from one round to the next
WORDS = 4  # of one call


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each key and counter.

    Args:
        key, counter: words, of shapes that broadcast together.

    Returns:
        Four words of the common shape.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        # wraps around beyond 2^63, which leaves all 64 bits as they are
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32 & LOW) ^ c1 ^ k0, right & LOW, (left >> 32 & LOW) ^ c3 ^ k1, left & LOW
        k0, k1 = k0 + BUMPS[0] & LOW, k1 + BUMPS[1] & LOW
    return c0, c1, c2, c3


def state_words(seed: Tensor, position: Tensor, layer: int, shape: tuple[int, int, int]) -> Tensor:
    """A random word for every number of a layer's states, the same wherever a row stands and whoever stands beside it.

    The key is the row's seed. The counter is (group of the number, low half of the position, layer, high half of the
    position); a group is WORDS neighbours along d_state, counted over (head, headdim, group). The high byte of the
    third word is 0; it is there to tell other uses of the same stream apart.

    Args:
        seed: (rows,) int64.
        position: (rows,) int64, of the last token that the states hold.
        layer: which replay layer of the model, below 2^24.
        shape: (nheads, headdim, d_state).

    Returns:
        (rows, nheads, headdim, d_state) int64, below 2^32.
    """
    nheads, headdim, d_state = shape
    groups = -(-d_state // WORDS)
    group = torch.arange(nheads * headdim * groups, device=seed.device)
    seed, position = seed.unsqueeze(1), position.unsqueeze(1)
    words = philox(
        (seed & LOW, seed >> 32 & LOW),
        (group, position & LOW, torch.full_like(position, layer), position >> 32 & LOW),
    )
    return torch.stack(words, -1).reshape(len(seed), nheads, headdim, groups * WORDS)[..., :d_state]
