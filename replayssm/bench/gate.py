"""Is what will be timed right? Kernels against the token loop in fp64, on the same records, before any figure."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.bench.cases import Case
from replayssm.bench.sequences import Kernels, Sequences
from replayssm.bench.timing import Cursors
from replayssm.ops.records import Records
from replayssm.ops.reference import scan_ref

SLACK = 8.0  # a kernel may be as wrong as the token loop in fp32, times this

Step = Callable[[Tensor, Tensor, Records, Tensor], None]  # a conventional step: state in place, q, one record, y


class Verdict(NamedTuple):
    """Errors over outputs and final state, RMS, as fractions of the RMS of what is exact; and what they may be."""

    replay_error: float
    conventional_error: float
    budget: float

    @property
    def passed(self) -> bool:
        """NaN is not within a budget."""
        return self.replay_error <= self.budget and self.conventional_error <= self.budget


class Trial:
    """``tokens`` tokens of a batch of sequences, and the exact results for its first, middle and last row.

    Args:
        tokens: how many each sequence decodes, from a random state with nothing pending.
        dtype: of q, k and v.
    """

    def __init__(self, case: Case, batch: int, tokens: int, *, dtype: torch.dtype, device: torch.device | str):
        self.case, self.dtype, self.tokens = case, dtype, tokens
        self.q, self.records = case.draw(batch, tokens, dtype=dtype, device=device, seed=1)
        self.initial = random_state(case, batch, device)
        self.rows = sorted({0, batch // 2, batch - 1})
        exact = self._token_loop(torch.float64)
        self._exact = exact
        plain = self._relative_error(*self._token_loop(torch.float32))
        self.budget = SLACK * plain + torch.finfo(torch.float32).eps

    def conventional_error(self, step: Step) -> float:
        """Of decoding every token with ``step``."""
        state, outputs = self.initial.clone(), []
        for q, records in self._each():
            y = torch.full(records.v.shape, torch.nan, device=state.device)
            step(state, q, records, y)
            outputs.append(y[self.rows])
        return self._relative_error(torch.cat(outputs, dim=1), state[self.rows])

    def replay_error(self, kernels: Kernels, window: int) -> float:
        """Of decoding every token by replay from a poisoned ring; every second row flushes once between steps too."""
        sequences = Sequences(self.case, self.initial.clone(), window=window, dtype=self.dtype, seed=2)
        sequences.poison()
        batch, device = len(self.initial), self.initial.device
        seqlen = flushed = torch.zeros(batch, dtype=torch.int64, device=device)
        every_second = torch.arange(batch, device=device) % 2 == 1
        outputs = []
        for index, (q, records) in enumerate(self._each()):
            if index == window // 2 + 1:  # from here on rows flush at different steps
                sequences.flush(kernels, every_second, seqlen, flushed)
                flushed = torch.where(every_second, seqlen, flushed)
            flushing = seqlen - flushed + 1 > window
            y = sequences.step(kernels, q, records, Cursors(seqlen, flushed, flushing))
            outputs.append(y[self.rows])
            flushed = torch.where(flushing, seqlen, flushed)
            seqlen = seqlen + 1
        sequences.flush(kernels, seqlen > flushed, seqlen, flushed)
        return self._relative_error(torch.cat(outputs, dim=1), sequences.checkpoint[self.rows])

    def _each(self) -> list[tuple[Tensor, Records]]:
        """Token by token, contiguous, as a layer would give them."""
        tokens = range(self.tokens)
        fields = [[field[:, t : t + 1].contiguous() for t in tokens] for field in (self.q, *self.records)]
        return [(q, Records(*record)) for q, *record in zip(*fields, strict=True)]

    def _token_loop(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Outputs and final states of ``rows``, the loop running in ``dtype``."""
        q, *record = (field[self.rows].to(dtype) for field in (self.q, *self.records))
        return scan_ref(q, Records(*record), self.initial[self.rows].to(dtype), delta=self.case.recurrence.delta)

    def _relative_error(self, y: Tensor, state: Tensor) -> float:
        parts = [
            ((got.double() - exact) / _rms(exact)).flatten() for got, exact in zip((y, state), self._exact, strict=True)
        ]
        return float(_rms(torch.cat(parts)))


def random_state(case: Case, batch: int, device: torch.device | str) -> Tensor:
    """(batch, nheads, headdim, d_state) fp32."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(batch, case.nheads, case.headdim, case.d_state, generator=generator, device=device)


def tokens_for(window: int) -> int:
    """How many tokens hold two whole windows: every row then flushes twice at least."""
    return 2 * window + 2


def check(
    case: Case, batch: int, window: int, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, step: Step
) -> Verdict:
    """Decode two whole windows with the kernels, with ``window`` and with window 0, and with the conventional step."""
    trial = Trial(case, batch, tokens_for(window), dtype=dtype, device=device)
    replay_errors = torch.tensor([trial.replay_error(kernels, each) for each in (window, 0)], dtype=torch.float64)
    worst = float(replay_errors.max())  # of torch: NaN is the largest
    return Verdict(worst, trial.conventional_error(step), trial.budget)


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()
