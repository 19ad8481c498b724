"""How ``generate`` is timed: whole calls, the arms in turn, the prompt and the steps behind it apart."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from replayssm.bench.hf_models import greedy

WARM_TOKENS = 20  # more than a window: what flushes is compiled, too

Arms = Mapping[str, Callable[[], AbstractContextManager[None]]]  # name -> makes the model what is timed, and back


class Run(NamedTuple):
    """Seconds up to the first token's logits and from there to the end; peaks of allocated memory, 0 on a CPU."""

    prefill_s: float
    decode_s: float
    prefill_bytes: int
    decode_bytes: int


class Laps(LogitsProcessor):
    """Takes the time when the prompt has been read: ``generate`` calls it with the logits of each token."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[float, int]] = []
        self.lap()

    def lap(self) -> None:
        """Wait for the device; note the time, and the peak of memory since the last lap."""
        peak = 0
        if self._on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._laps.append((time.perf_counter(), peak))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self._laps) == 1:
            self.lap()
        return scores

    def run(self) -> Run:
        """What was measured, after the last ``lap``."""
        (begin, _), (middle, prefill_bytes), (end, decode_bytes) = self._laps
        return Run(middle - begin, end - middle, prefill_bytes, decode_bytes)


def timed(model: Any, ids: Tensor, new_tokens: int) -> Run:
    """Time ``model.generate`` from (batch, tokens) ids.

    Raises:
        RuntimeError: it wrote another number of tokens.
    """
    laps = Laps(ids.device)
    text = greedy(model, ids, new_tokens, laps)
    laps.lap()
    expected = ids.shape[0], ids.shape[1] + new_tokens
    if text.shape != expected:
        raise RuntimeError(
            f"bench hf: generate must end with {expected} tokens; got {tuple(text.shape)}. Its config names an end of "
            "texts: set eos_token_id to None."
        )
    return laps.run()


def measure(
    model: Any, ids: Tensor, new_tokens: int, arms: Arms, rounds: int, stage: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Time every arm ``rounds`` times, in turn with the others: arm -> the figures of an entry of "runs".

    Args:
        ids: (batch, tokens), the prompts.
        stage: is told what begins, 1 + ``rounds`` times an arm.
    """
    for name, applied in arms.items():
        stage(f"{name}, warming up")
        with applied():
            timed(model, ids, WARM_TOKENS)
    taken: dict[str, list[Run]] = {name: [] for name in arms}
    for number in range(rounds):
        for name, applied in arms.items():
            stage(f"{name}, round {number + 1} of {rounds}")
            with applied():
                taken[name].append(timed(model, ids, new_tokens))
    return {name: figures(runs, len(ids), new_tokens) for name, runs in taken.items()}


def figures(runs: list[Run], batch: int, new_tokens: int) -> dict[str, float]:
    """Medians over runs, and how far the slowest is from the fastest; the first token belongs to the prompt."""
    prefill_s = [run.prefill_s for run in runs]
    step_ms = [1e3 * run.decode_s / (new_tokens - 1) for run in runs]
    whole_s = statistics.median(run.prefill_s + run.decode_s for run in runs)
    return dict(
        prefill_s=statistics.median(prefill_s),
        prefill_s_spread=max(prefill_s) - min(prefill_s),
        step_ms=statistics.median(step_ms),
        step_ms_spread=max(step_ms) - min(step_ms),
        tokens_s=1e3 * batch / statistics.median(step_ms),
        generate_tokens_s=batch * new_tokens / whole_s,
        prefill_gb=max(run.prefill_bytes for run in runs) / 1e9,
        decode_gb=max(run.decode_bytes for run in runs) / 1e9,
    )
