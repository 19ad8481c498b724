"""The best launch configurations of the bench's own kernels for one case and batch: checked first, then timed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replayssm.bench import conventional, native, timing
from replayssm.bench.cases import Case
from replayssm.bench.conventional import Config
from replayssm.bench.gate import Native, Step, Trial, half
from replayssm.ops.records import Records

Arm = list[Callable[[], object]]


def step_with(config: Config, case: Case) -> Step:
    """The conventional step of ``case`` in one launch configuration."""

    def step(state: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        conventional.step(config, state, q, records, y, case.recurrence)

    return step


def native_with(config: Config, case: Case) -> Native:
    """The native step of several tokens in one launch configuration."""

    def step(state: Tensor, snapshots: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        native.step(config, state, snapshots, q, records, y, case.recurrence)

    return step


def tune(case: Case, states: list[Tensor], *, dtype: torch.dtype) -> Config:
    """The fastest of the conventional step's configurations that are right, on copies of the state in turn.

    Args:
        states: each (batch, nheads, headdim, d_state) fp32; they are decoded on, in place.

    Raises:
        RuntimeError: no configuration gives right results.
    """
    batch, device = len(states[0]), states[0].device
    trial = Trial(case, 2, 4, dtype=dtype, device=device)
    q, records = case.draw(batch, 1, dtype=dtype, device=device, seed=3)
    y = torch.empty(batch, 1, case.nheads, case.headdim, device=device)

    def arm(config: Config) -> Arm:
        return [partial(step_with(config, case), state, q, records, y) for state in states]

    def right(config: Config) -> bool:
        return trial.conventional_error(step_with(config, case)) <= trial.budget

    return _fastest(case, "conventional", arm, right, timing.LAUNCHES)


def tune_native(
    case: Case, states: list[Tensor], snapshots: list[Tensor], *, tokens: int, dtype: torch.dtype
) -> Config:
    """The fastest of the native step's configurations that are right, for ``tokens`` tokens a step.

    Args:
        states: as in ``tune``; they are read.
        snapshots: as many, each (batch, tokens, nheads, headdim, d_state) fp32; they are written.

    Raises:
        RuntimeError: no configuration gives right results.
    """
    batch, device = len(states[0]), states[0].device
    trial = Trial(case, 2, 2 * tokens, dtype=dtype, device=device)
    q, records = case.draw(batch, tokens, dtype=dtype, device=device, seed=3)
    y = torch.empty(batch, tokens, case.nheads, case.headdim, device=device)

    def arm(config: Config) -> Arm:
        run = native_with(config, case)
        return [partial(run, *pair, q, records, y) for pair in zip(states, snapshots, strict=True)]

    def right(config: Config) -> bool:
        step = native_with(config, case)
        return all(trial.native_error(step, tokens, kept) <= trial.budget for kept in (tokens, half(tokens)))

    return _fastest(case, "native", arm, right, max(1, timing.LAUNCHES // 2 // tokens))


def _fastest(
    case: Case, name: str, arm: Callable[[Config], Arm], right: Callable[[Config], bool], launches: int
) -> Config:
    """Shapes are timed first, then cache hints for the best shape; what is not right is not timed."""

    def best(configs: list[Config]) -> Config:
        times = timing.measure([arm(config) for config in configs], timing.ROUGH_ROUNDS, launches)
        return min(zip(times, configs, strict=True))[1]

    configs = conventional.CONFIGS
    fitting = [each for each in configs if case.headdim % each.block_p == 0 == case.d_state % each.segment]
    shapes = [each for each in fitting if right(each)]
    if not shapes:
        raise RuntimeError(
            f"tune: the {name} step must be right to be timed; got wrong results from all of {len(configs)} "
            f"configurations for {case.layer}. Correct bench/{name}.py first."
        )
    shape = best(shapes)
    hinted = [shape._replace(load_policy=load, store_modifier=store) for load, store in conventional.HINTS]
    return best([each for each in hinted if right(each)])
