"""The best launch configuration of the conventional step for one case and batch: checked first, then timed."""

from functools import partial

import torch
from torch import Tensor

from replayssm.bench import conventional, timing
from replayssm.bench.cases import Case
from replayssm.bench.conventional import Config
from replayssm.bench.gate import Step, Trial
from replayssm.bench.timing import Time
from replayssm.ops.records import Records


def step_with(config: Config, case: Case) -> Step:
    """The conventional step of ``case`` in one launch configuration."""

    def step(state: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        conventional.step(config, state, q, records, y, case.recurrence)

    return step


def tune(case: Case, states: list[Tensor], *, dtype: torch.dtype) -> Config:
    """The fastest of the configurations that are right, on copies of the state that are rotated over.

    Shapes are timed first, then cache hints for the best shape.

    Args:
        states: each (batch, nheads, headdim, d_state) fp32; they are decoded on, in place.

    Raises:
        RuntimeError: no configuration gives right results.
    """
    batch, device = len(states[0]), states[0].device
    trial = Trial(case, 2, 4, dtype=dtype, device=device)
    q, records = case.draw(batch, 1, dtype=dtype, device=device, seed=3)
    y = torch.empty(batch, 1, case.nheads, case.headdim, device=device)

    def timed(configs: list[Config]) -> list[tuple[Time, Config]]:
        arms = [[partial(step_with(config, case), state, q, records, y) for state in states] for config in configs]
        times = timing.measure(arms, rounds=timing.ROUGH_ROUNDS)
        return sorted(zip(times, configs, strict=True))

    def right(configs: list[Config]) -> list[Config]:
        fitting = [each for each in configs if case.headdim % each.block_p == 0 == case.d_state % each.segment]
        return [each for each in fitting if trial.conventional_error(step_with(each, case)) <= trial.budget]

    shapes = right(list(conventional.CONFIGS))
    if not shapes:
        raise RuntimeError(
            f"tune: the conventional step must be right to be timed; got an error over {trial.budget:.1e} from all of "
            f"{len(conventional.CONFIGS)} configurations for {case.layer}. Correct bench/conventional.py first."
        )
    best = timed(shapes)[0][1]
    hinted = right([best._replace(load_policy=load, store_modifier=store) for load, store in conventional.HINTS])
    return timed(hinted)[0][1]
