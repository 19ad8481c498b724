"""``replayssm plan``: what a cache will hold and a decode step will cost on a GPU that need not be there."""

import argparse
from collections import Counter
from functools import partial

import torch
from torch import nn

from replayssm import (
    LayerState,
    ReplayLayer,
    ReplayStateCache,
    hub,
)
from replayssm.arguments import add_formats, count, window
from replayssm.bench.cases import CASES
from replayssm.cache.auto_window import LayerBytes
from replayssm.models import HybridLM
from replayssm.models.hybrid import DTYPES
from replayssm.models.loading import bundled, model_config
from replayssm.plan import (
    GPUS,
    LAUNCH_US,
    READING,
    SURE_BATCH,
    USABLE,
    WRITING,
    Gpu,
    Traffic,
    conventional_step,
    find_gpu,
    native_memory,
    predicted_us,
    replay_memory,
    replay_step,
)

GEOMETRIES = {case.geometry: case for case in CASES}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``plan`` to the subparsers of the command line."""
    command = commands.add_parser(
        "plan",
        help="memory and time of decoding on a GPU",
        description="Say what decoding will need on a GPU: memory of a sequence, how many fit, and the bytes and the "
        "predicted time of a step. Counted from shapes; no GPU is looked for and nothing is timed.",
    )
    command.add_argument(
        "--model",
        default="tiny",
        help=f"folder of a model, tiny, the bundled one (default), or one layer of {', '.join(GEOMETRIES)}",
    )
    command.add_argument("--batch", type=count, default=1, help="sequences decoded together (default 1)")
    command.add_argument(
        "--window",
        type=window,
        default="auto",
        help='most tokens between two writes of the state; 0 writes it at every step; "auto" (default) chooses',
    )
    command.add_argument(
        "--drafts", type=partial(count, least=0), default=0, help="drafted tokens that a step verifies (default 0)"
    )
    add_formats(command)
    command.add_argument("--max-seqlen", type=count, help="most tokens of a sequence, for attention without a window")
    command.add_argument("--gpu", default="H200", help=f"{', '.join(gpu.name for gpu in GPUS)} (default H200)")
    command.add_argument("--dtype", choices=DTYPES, help="to compute in; default: the model's, bfloat16 for one layer")


def run(options: argparse.Namespace) -> int:
    """Print the plan that ``options`` ask for; returns the exit status 0.

    Raises:
        ValueError, RuntimeError, OSError: an unknown model or GPU, or a cache that the library refuses.
    """
    gpu = find_gpu("plan", options.gpu)
    model = _model(options.model, DTYPES.get(options.dtype))
    cache = ReplayStateCache(
        model,
        options.batch,
        window=options.window,
        step_tokens=1 + options.drafts,
        max_seqlen=options.max_seqlen,
        checkpoint=options.checkpoint,
        read_format=options.read_format,
        backend="triton",  # as on the GPU that is asked about
        device="meta",
    )
    layers = _layers(model, cache)
    print(f"{options.model}: {_described(model)}")
    print(f"batch {cache.batch}, window {cache.window}, tokens a step {cache.step_tokens}, {gpu.name}")
    weights = sum(parameter.nbytes for parameter in model.parameters()) if isinstance(model, HybridLM) else 0
    _print_memory(cache, weights, gpu)
    if layers and options.drafts:
        _print_rollback(layers, cache)
    if layers:
        _print_step(layers, cache, gpu)
    else:
        print("\nNo recurrent layer: there is nothing to replay.")
    return 0


def _model(name: str, dtype: torch.dtype | None) -> nn.Module:
    """The model, or the layer of a geometry, on meta."""
    if name in GEOMETRIES:
        return GEOMETRIES[name].build(dtype or torch.bfloat16)
    try:
        folder = hub.find_folder("plan", bundled(name))
    except FileNotFoundError as error:
        raise ValueError(
            f"plan: model must be a folder with {hub.CONFIG}, tiny, org/name of a repository of the Hub, or one of "
            f"{', '.join(GEOMETRIES)}; got {name!r}. Check the name. {error}"
        ) from error
    return HybridLM(model_config("plan", folder), device="meta", dtype=dtype)


def _layers(model: nn.Module, cache: ReplayStateCache) -> list[LayerBytes]:
    states = [cache.state_of(module) for module in model.modules() if isinstance(module, ReplayLayer)]
    return [LayerBytes.of(state) for state in states if isinstance(state, LayerState)]


def _described(model: nn.Module) -> str:
    """The replay layers, equal ones counted, and the dtype of the activations."""
    found = Counter(
        f"{type(layer).__name__}, {layer.nheads} heads of {layer.headdim} x {layer.d_state}, ngroups {layer.ngroups}"
        for layer in model.modules()
        if isinstance(layer, ReplayLayer)
    )
    listed = [f"{number} {kind}" for kind, number in found.items()] or ["no recurrent layer"]
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    return f"{'; '.join(listed)}; {str(largest.dtype).removeprefix('torch.')}"


def _print_memory(cache: ReplayStateCache, weights: int, gpu: Gpu) -> None:
    parts = {name: nbytes // cache.batch for name, nbytes in cache.nbytes_by_part.items()}
    print("\nbytes of a sequence")
    for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]):
        if nbytes:
            print(f"  {name:<12}{nbytes:>18,}")
    total = sum(parts.values())
    print(f"  {'total':<12}{total:>18,}")
    print(f"weights       {weights:>18,}" if weights else "weights: not counted for a layer alone")
    room = int(gpu.memory_gib * 2**30 * USABLE) - weights
    fit = max(room, 0) // total
    fits = "" if cache.batch <= fit else ": not this batch"
    print(f"{fit:,} sequences fit into {USABLE:.0%} of {gpu.memory_gib} GiB{fits}")


def _print_rollback(layers: list[LayerBytes], cache: ReplayStateCache) -> None:
    """State memory of a sequence whose drafts can be rejected, beside that of an engine that keeps states."""
    drafts = cache.step_tokens - 1
    native = sum(native_memory(layer, cache.step_tokens) for layer in layers)
    replay = sum(replay_memory(layer, cache.window, cache.step_tokens) for layer in layers)
    print(f"\nstate memory of a sequence that can reject {drafts} drafts, recurrent layers alone")
    print(f"  {'native':<12}{native:>18,}  {cache.step_tokens} states, one behind each token")
    print(f"  {'replay':<12}{replay:>18,}  a state, and a ring of {cache.clock.slots} tokens")
    print(f"  {'ratio':<12}{native / replay:>18.2f}")


def _print_step(layers: list[LayerBytes], cache: ReplayStateCache, gpu: Gpu) -> None:
    """Bytes and times of the replay layers of one step."""
    conventional = [conventional_step(layer, cache.step_tokens) for layer in layers]
    replay = [replay_step(layer, cache.window, cache.step_tokens) for layer in layers]

    def nbytes(traffic: list[Traffic]) -> int:
        return cache.batch * sum(each.moved for each in traffic)

    def us(traffic: list[Traffic]) -> float:
        return sum(predicted_us(each, cache.batch, gpu) for each in traffic)

    print(f"\na step at batch {cache.batch}, recurrent layers alone, every token kept")
    print(f"  {'':<10}{'conventional':>20}{'replay':>20}{'ratio':>8}")
    for name, before, after, form in (
        ("bytes", nbytes(conventional), nbytes(replay), ",d"),
        ("time, us", us(conventional), us(replay), ",.1f"),
    ):
        print(f"  {name:<10}{before:>20{form}}{after:>20{form}}{before / after:>8.2f}")
    source = "measured" if gpu.measured_tb_s else "its datasheet's, less what an H200 misses of its own"
    print(
        f"Predicted, not timed: a read ceiling of {gpu.read_tb_s:.2f} TB/s ({source}), reads at {READING:.0%} of it, "
        f"writes at {WRITING:.0%}, {LAUNCH_US:g} us a layer."
    )
    if cache.batch < SURE_BATCH:
        print(
            f"Below batch {SURE_BATCH} a step waits more than it moves: times up to a third longer have been measured."
        )
