"""A thousand rounds of drafting, ten thousand at night: errors do not pile up beyond those of the plain recurrence."""

import pytest
import torch
from budgets import assert_e32, e32
from draws import DEVICE
from geometries import G, K, M
from running import step

from replayssm import ReplayStateCache


@pytest.mark.parametrize("rounds", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("geometry", [M, G, K], ids=lambda geometry: geometry.kind)
def test_many_rounds_in_fp32_drift_no_more_than_the_plain_recurrence_over_the_accepted_tokens(geometry, rounds):
    """Convolution included. Single tokens and drafts take turns, and no draft, some or all of them are accepted."""
    layer = geometry.build(torch.float32)
    generator = torch.Generator().manual_seed(rounds)
    sizes = torch.randint(1, 6, (rounds,), generator=generator)
    kept = (torch.rand(rounds, 2, generator=generator) * (sizes + 1)[:, None]).long()
    ends = kept.cumsum(0)
    begins = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ends])
    stream = geometry.input(2, int(ends.max()), dtype=torch.float32)
    exact, plain = geometry.trace(layer, stream.double()), geometry.trace(layer, stream)
    cache = ReplayStateCache([layer], 2, window=16, step_tokens=5)
    outputs: list[list[torch.Tensor]] = [[], []]
    drafts = geometry.input(2, 5 * 64, seed=2, dtype=torch.float32)
    for number, (t, counts) in enumerate(zip(sizes.tolist(), kept.tolist(), strict=True)):
        x = drafts[:, 5 * (number % 64) :][:, :t].clone()
        for row, n in enumerate(counts):
            x[row, :n] = stream[row, begins[number, row] : begins[number, row] + n]
        y = step(cache, [layer], x)
        cache.commit(torch.tensor(counts, device=DEVICE))
        for row, n in enumerate(counts):
            outputs[row].append(y[row, :n])
    allowed, state_allowed = e32(plain.output, exact.output), e32(plain.states, exact.states)
    state = cache[0].state()
    for row, end in enumerate(ends[-1].tolist()):
        assert_e32(torch.cat(outputs[row]), exact.output[row, :end], allowed, f"row {row}")
        last = torch.cat(outputs[row])[-100:]  # no worse at the end, where the whole history has been replayed
        assert_e32(last, exact.output[row, end - len(last) : end], allowed, f"end of row {row}")
        assert_e32(state[row], exact.states[row, end - 1], state_allowed, f"state of row {row}")
