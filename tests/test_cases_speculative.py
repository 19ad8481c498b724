"""Case RC-13, layer by layer: 300 rounds of drafting with random acceptance leave the state of the accepted tokens."""

import pytest
import torch
from backends import both_backends, interpreted
from budgets import assert_e64
from draws import DEVICE, draw
from geometries import G, K, M
from programs import poison
from running import step

from replayssm import ReplayStateCache

pytestmark = both_backends
ROUNDS, INTERPRETED = 300, 12


IN_EVERY_RUN = [(M, 5), (G, 8), (K, 16)]
AT_NIGHT = [(M, 8), (M, 16), (G, 5), (G, 16), (K, 5), (K, 8)]


@pytest.mark.parametrize(
    ("geometry", "window"),
    [*IN_EVERY_RUN, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in AT_NIGHT)],
    ids=lambda value: str(getattr(value, "kind", value)),
)
def test_rc13_the_state_after_every_round_is_that_of_the_accepted_tokens(geometry, window):
    layer, rounds = geometry.build(), INTERPRETED if interpreted() else ROUNDS
    generator = torch.Generator().manual_seed(window)
    sizes = torch.randint(1, 6, (rounds,), generator=generator)
    kept = (torch.rand(rounds, 3, generator=generator) * (sizes + 1)[:, None]).long()  # 0 .. t of each row
    ends = kept.cumsum(0)
    stream = geometry.input(3, int(ends.max()))
    exact = geometry.trace(layer, stream)
    cache = ReplayStateCache([layer], 3, window=window, step_tokens=5)
    outputs: list[list[torch.Tensor]] = [[], [], []]
    states, begins = [], torch.cat([torch.zeros(1, 3, dtype=torch.int64), ends])
    for number, (t, counts) in enumerate(zip(sizes.tolist(), kept.tolist(), strict=True)):
        x = draw(1000 + number, 3, t, geometry.d_model)
        for row, n in enumerate(counts):
            x[row, :n] = stream[row, begins[number, row] : begins[number, row] + n]
        y = step(cache, [layer], x)
        cache.commit(torch.tensor(counts, device=DEVICE))
        for row, n in enumerate(counts):
            outputs[row].append(y[row, :n])
        states.append(cache[0].state())
        if number % 3 == 0:
            poison(cache)  # the rejected places among them
    assert cache.seqlen.tolist() == ends[-1].tolist()
    zero = torch.zeros_like(exact.states[:, :1])
    history = torch.cat([zero, exact.states], 1)
    for row in range(3):
        assert_e64(torch.cat(outputs[row]), exact.output[row, : int(ends[-1, row])], f"row {row}")
    expected = torch.stack([history[torch.arange(3), counts.to(DEVICE)] for counts in ends])
    assert_e64(torch.stack(states), expected, "state after each round")
    assert int((sizes[:, None] - kept).sum()) > 1.5 * rounds  # many drafts were rejected
