"""The models of ``replayssm bench hf``: each is checked, then timed patched and unpatched. Needs transformers."""

import argparse
import contextlib
import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from replayssm.bench import hf_gate, hf_models, hf_timing
from replayssm.bench.hf_cases import PATCHES, TORCH_PATH, UNPATCHED, Geometry
from replayssm.bench.options import DTYPES
from replayssm.bench.progress import Progress

ROUNDS = 3
RELEASE = transformers.__version__
RATES = ("tokens_s", "generate_tokens_s")  # of an arm's figures, those that are compared with the unpatched model's


def measure(geometries: Sequence[Geometry], options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Check and time models: entries of "runs", without what failed.

    Args:
        options: of the command.
    """
    progress = Progress(len(geometries) * (1 + len(options.batch)), (2 + len(PATCHES)) * (1 + ROUNDS))
    with quiet():
        return [entry for each in geometries for entry in measure_model(each, options, device, progress)]


def measure_model(
    geometry: Geometry, options: argparse.Namespace, device: torch.device, progress: Progress
) -> list[dict[str, Any]]:
    """Check a model, and time it at every batch size."""
    settings = {**geometry.settings, **(geometry.small if options.small else {})}
    few = settings if options.small else {**settings, **geometry.few}
    dtype = DTYPES[options.dtype]
    verdicts = checked(geometry.name, few, dtype, device, progress)
    free()
    if not verdicts:
        return []
    progress.stage(f"{geometry.name}: drawing its weights")
    model = hf_models.build(settings, dtype=dtype, device=device)
    entries: list[dict[str, Any]] = []
    for batch in options.batch:
        label = f"{geometry.name}, batch {batch}"
        ids = hf_models.prompts(model, batch, options.prompt)
        stage = functools.partial(_stage, progress, label)
        try:
            times = hf_timing.measure(model, ids, options.new_tokens, arms_of(model, verdicts), ROUNDS, stage)
        except torch.OutOfMemoryError as error:
            progress.part(f"{label}: NOT TIMED, no room: {error}")
            continue
        for arm, figures in times.items():
            ratios = {f"{rate}_ratio": figures[rate] / times[UNPATCHED][rate] for rate in RATES}
            entry = dict(model=geometry.name, batch=batch, arm=arm, packages=packages_of(model, arm))
            verdict = {"check": verdicts[arm]._asdict()} if arm in verdicts else {}
            entries.append(entry | PATCHES.get(arm, {}) | figures | ratios | verdict)
        said = [f"{arm} {figures['tokens_s']:,.0f}" for arm, figures in times.items()]
        progress.part(f"{label}, tokens/s: {', '.join(said)}")
    del model
    free()
    return entries


def checked(
    name: str, settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device, progress: Progress
) -> dict[str, hf_gate.Verdict]:
    """Compare a patched model with the unpatched one: in fp32, where little hides behind rounding, and in ``dtype``.

    Args:
        settings: of a model of few layers.

    Returns:
        arm -> its verdict in ``dtype``, for those that passed; none if exact states did not pass in fp32.
    """
    exact = next(iter(PATCHES))
    progress.stage(f"{name}: checking in float32")
    model = hf_models.build(settings, dtype=torch.float32, device=device)
    wide = hf_gate.check(model, {exact: PATCHES[exact]})[exact]
    if not wide.passed:
        progress.part(f"{name}: NOT TIMED, patched it gives other logits: in float32 {wide}")
        return {}
    progress.stage(f"{name}: checking in {dtype}")
    found = hf_gate.check(hf_models.build(settings, dtype=dtype, device=device), PATCHES)
    for arm, verdict in found.items():
        if not verdict.passed:
            print(f"{name}, {arm}: LEFT OUT, it gives other logits: in {dtype} {verdict}", file=sys.stderr)
    progress.part(f"{name}: checked, in float32 {wide}")
    return {arm: verdict for arm, verdict in found.items() if verdict.passed}


def arms_of(model: Any, patches: Iterable[str]) -> hf_timing.Arms:
    """The ways to run a model: unpatched, without the kernels that transformers found if it did, patched."""
    found = [TORCH_PATH] if hf_models.fast_kernels(model) else []
    return {
        UNPATCHED: contextlib.nullcontext,
        **{arm: functools.partial(hf_models.torch_path, model) for arm in found},
        **{arm: functools.partial(hf_models.patched, model, PATCHES[arm]) for arm in patches},
    }


def packages_of(model: Any, arm: str) -> list[str]:
    """Packages whose kernels an arm runs on; replay's own are not named."""
    if arm == UNPATCHED:
        return sorted(set(hf_models.fast_kernels(model).values()))
    return ["fla"] if arm in PATCHES and hf_models.core(model).scan_runs_on() == "fla" else []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from warning meanwhile: which kernels it lacks is in the report."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def free() -> None:
    """Give the memory of models that are no longer held back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _stage(progress: Progress, label: str, what: str) -> None:
    progress.stage(f"{label}: {what}")
