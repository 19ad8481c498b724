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
from replayssm.plan import steps_of_window

SLACK = 8.0  # a kernel may be as wrong as the token loop in fp32, times this

Step = Callable[[Tensor, Tensor, Records, Tensor], None]  # a conventional step: state in place, q, one record, y
Native = Callable[[Tensor, Tensor, Tensor, Records, Tensor], None]  # state, snapshots, q, t records, y: see native.py


class Verdict(NamedTuple):
    """Errors over outputs and final state, RMS, as fractions of the RMS of what is exact; and what they may be."""

    replay_error: float
    conventional_error: float
    budget: float

    @property
    def passed(self) -> bool:
        """NaN is not within a budget."""
        return self.replay_error <= self.budget and self.conventional_error <= self.budget


class TokensVerdict(NamedTuple):
    """As ``Verdict``, of steps of several tokens: all of them kept, or half of them (``half``)."""

    replay_error: float
    replay_half_error: float
    native_error: float
    native_half_error: float
    conventional_error: float
    budget: float

    @property
    def passed(self) -> bool:
        """NaN is not within a budget."""
        return all(error <= self.budget for error in self[:-1])


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
        for q, records, _ in self._steps(1, 1):
            y = torch.full(records.v.shape, torch.nan, device=state.device)
            step(state, q, records, y)
            outputs.append(y[self.rows])
        return self._relative_error(torch.cat(outputs, dim=1), state[self.rows])

    def native_error(self, native: Native, tokens: int, kept: int) -> float:
        """Of decoding with ``native``, ``tokens`` a step, going on behind the last token that is kept."""
        state, outputs = self.initial.clone(), []
        for q, records, number in self._steps(tokens, kept):
            y = torch.full(records.v.shape, torch.nan, device=state.device)
            snapshots = torch.full((len(state), tokens, *state.shape[1:]), torch.nan, device=state.device)
            native(state, snapshots, q, records, y)
            outputs.append(y[self.rows, :number])
            state = snapshots[:, number - 1].clone()
        return self._relative_error(torch.cat(outputs, dim=1), state[self.rows])

    def replay_error(self, kernels: Kernels, window: int, tokens: int = 1, kept: int = 1) -> float:
        """Of decoding by replay from a poisoned ring, ``tokens`` a step of which ``kept`` are kept.

        Every second row flushes once between steps too.
        """
        sequences = Sequences(self.case, self.initial.clone(), window=window, dtype=self.dtype, seed=2, tokens=tokens)
        sequences.poison()
        batch, device = len(self.initial), self.initial.device
        seqlen = flushed = torch.zeros(batch, dtype=torch.int64, device=device)
        every_second = torch.arange(batch, device=device) % 2 == 1
        outputs = []
        for index, (q, records, number) in enumerate(self._steps(tokens, kept)):
            if index == steps_of_window(window, tokens, kept) // 2 + 1:  # from here on rows flush at different steps
                sequences.flush(kernels, every_second, seqlen, flushed)
                flushed = torch.where(every_second, seqlen, flushed)
            flushing = seqlen - flushed + tokens > window
            y = sequences.step(kernels, q, records, Cursors(seqlen, flushed, flushing))
            outputs.append(y[self.rows, :number])
            flushed = torch.where(flushing, seqlen, flushed)
            seqlen = seqlen + number
        sequences.flush(kernels, seqlen > flushed, seqlen, flushed)
        return self._relative_error(torch.cat(outputs, dim=1), sequences.checkpoint[self.rows])

    def _steps(self, tokens: int, kept: int) -> list[tuple[Tensor, Records, int]]:
        """q and records of each step, contiguous, as a layer would give them, and how many of its tokens are kept.

        Behind those that are kept, ``kept`` but in the last step, come drafts that are not in the text.
        """
        q, records = self.case.draw(len(self.q), tokens, dtype=self.dtype, device=self.q.device, seed=5)
        steps = []
        for begin in range(0, self.tokens, kept):
            number = min(kept, self.tokens - begin)
            step_q, *step = (
                torch.cat([text[:, begin : begin + number], rejected[:, number:]], dim=1)
                for text, rejected in zip((self.q, *self.records), (q, *records), strict=True)
            )
            steps.append((step_q, Records(*step), number))
        return steps

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


def tokens_for(window: int, tokens: int = 1) -> int:
    """How many kept tokens hold two whole windows, whatever part of a step is kept: every row then flushes twice."""
    return 2 * (window + tokens)


def check(
    case: Case,
    batch: int,
    window: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    step: Step,
    coarse: float = 0.0,
) -> Verdict:
    """Decode two whole windows with the kernels, with ``window`` and with window 0, and with the conventional step.

    Args:
        coarse: what the kernels may be wrong besides, because they keep states in fewer bits.
    """
    trial = Trial(case, batch, tokens_for(window), dtype=dtype, device=device)
    replay_errors = torch.tensor([trial.replay_error(kernels, each) for each in (window, 0)], dtype=torch.float64)
    worst = float(replay_errors.max())  # of torch: NaN is the largest
    return Verdict(worst, trial.conventional_error(step), trial.budget + coarse)


def check_tokens(
    case: Case,
    batch: int,
    window: int,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    step: Step,
    native: Native,
) -> TokensVerdict:
    """Decode two whole windows ``tokens`` a step, all of them kept or half, and with the conventional step."""
    trial = Trial(case, batch, tokens_for(window, tokens), dtype=dtype, device=device)
    part = half(tokens)
    return TokensVerdict(
        replay_error=trial.replay_error(kernels, window, tokens, tokens),
        replay_half_error=trial.replay_error(kernels, window, tokens, part),
        native_error=trial.native_error(native, tokens, tokens),
        native_half_error=trial.native_error(native, tokens, part),
        conventional_error=trial.conventional_error(step),
        budget=trial.budget,
    )


def half(tokens: int) -> int:
    """Half of the tokens of a step, one at least."""
    return max(tokens // 2, 1)


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()
