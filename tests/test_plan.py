"""The traffic model against the schedule that a cache really follows, and its times against measured ones."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import assert_predicted

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer, ReplayMamba2, ReplayStateCache, plan
from replayssm.bench.cases import CASES, Case
from replayssm.cache.auto_window import LayerBytes, choose
from replayssm.plan import (
    GPUS,
    SURE_BATCH,
    StateBytes,
    Traffic,
    conventional_step,
    conventional_traffic,
    find_gpu,
    native_memory,
    predicted_us,
    replay_memory,
    replay_step,
    replay_traffic,
    state_bytes,
    steps_of_window,
)

RESULTS = sorted(Path(plan.__file__).parent.glob("bench/results/kernel_*.json"))
MAMBA2, GDN, KDA = map(vars, CASES)
# Public kernels on an H200, window 16, bf16 activations and fp32 state: batch, tokens a step (all kept), us a step
CONVENTIONAL = [
    (MAMBA2, 32, 1, 72.6),
    (MAMBA2, 128, 1, 280.9),
    (MAMBA2, 256, 1, 557.7),
    (MAMBA2, 512, 1, 1109.0),
    (MAMBA2, 256, 4, 1504.0),
    (MAMBA2, 256, 8, 2783.0),
    (GDN, 32, 1, 35.9),
    (GDN, 128, 1, 133.1),
    (GDN, 256, 1, 262.2),
    (GDN, 512, 1, 519.4),
    (GDN, 256, 4, 730.0),
    (GDN, 256, 8, 1323.0),
    (KDA, 32, 1, 43.7),
    (KDA, 256, 1, 301.8),
]
REPLAY = [
    (MAMBA2, 32, 1, 44.7),
    (MAMBA2, 128, 1, 159.5),
    (MAMBA2, 256, 1, 309.5),
    (MAMBA2, 512, 1, 609.5),
    (MAMBA2, 256, 4, 362.0),
    (MAMBA2, 256, 8, 470.0),
    (GDN, 128, 1, 86.7),
    (GDN, 256, 1, 164.3),
    (GDN, 512, 1, 320.8),
    (GDN, 256, 4, 241.0),
]


def sizes_of(layer: ReplayLayer) -> LayerBytes:
    return LayerBytes.of(ReplayStateCache(layer, 1, window=0)[0])


def sizes_of_run(run: dict[str, Any]) -> LayerBytes:
    """The sizes of a line of results, or of a table above, on meta."""
    case = Case(**{field.name: run.get(field.name) for field in fields(Case)})
    return case.layer_bytes(getattr(torch, run.get("dtype", "bfloat16")))


@pytest.mark.parametrize(("checkpoint", "read_format"), [("fp32", None), ("fp16_sr", None), ("int8_sr", "nvfp4")])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 16])
def test_traffic_is_what_the_schedule_of_a_cache_moves(window: int, checkpoint: str, read_format: str | None) -> None:
    layer = ReplayMamba2(16, nheads=2, headdim=4, d_state=8)
    cache = ReplayStateCache(layer, 1, window=window, checkpoint=checkpoint, read_format=read_format, backend="torch")
    sizes = state_bytes(cache)
    parts = cache.nbytes_by_part
    assert (sizes.state, sizes.copy) == (parts["checkpoint"], parts.get("copy", 0))
    wide = 2 * 4 * 8 * 4
    assert conventional_traffic(sizes) == Traffic(wide, wide)
    steps = 20 * max(window, 1)
    read = written = 0
    with torch.no_grad():
        layer(torch.randn(1, 7, 16), cache[0])
        cache.commit()
        for step in range(steps + 1):
            pending = int(cache.seqlen - cache.flushed)
            before = int(cache.flushed)
            layer(torch.randn(1, 1, 16), cache[0])
            cache.commit()
            if step > 0:  # the first step behind a prompt finds no record
                flushes = int(cache.flushed) > before
                read += (sizes.state if flushes or not sizes.copy else sizes.copy) + pending * sizes.record
                written += sizes.record + (sizes.state + sizes.copy) * flushes
    traffic = replay_traffic(sizes, window)
    assert (traffic.read, traffic.written) == (read // steps, written // steps)


@pytest.mark.parametrize(
    ("checkpoint", "read_format", "per_number"),
    [
        ("fp32", None, 4.25),
        ("fp16_sr", None, 2.125),
        ("fp32", "nvfp4", 1.0625),
        ("fp16_sr", "nvfp4", 0.8125),
        ("fp16_sr", "int8", 1.3125),
        ("nvfp4_sr", None, 0.5977),
    ],
)
def test_a_number_of_the_state_moves_as_many_bytes_as_its_formats_promise(
    checkpoint: str, read_format: str | None, per_number: float
) -> None:
    """By hand, window 16: 15 of 16 steps read the copy, one reads and writes the checkpoint and writes the copy."""
    layer = ReplayMamba2(4096, 128, 64, 128, ngroups=8, device="meta", dtype=torch.bfloat16)
    cache = ReplayStateCache(layer, 1, device="meta", checkpoint=checkpoint, read_format=read_format)
    sizes = state_bytes(cache)._replace(record=0)
    assert replay_traffic(sizes, 16).moved == pytest.approx(per_number * 128 * 64 * 128, rel=1e-3)
    traffic = replay_step(LayerBytes.of(cache[0])._replace(q=0, k=0, v=0, g=0, beta=0, y=0), 16)
    assert traffic.moved == pytest.approx(per_number * 128 * 64 * 128, rel=1e-3)


def test_windows_are_longer_where_a_flush_moves_more_and_none_is_0_with_a_copy() -> None:
    layer = ReplayMamba2(4096, 128, 64, 128, ngroups=8, device="meta", dtype=torch.bfloat16)
    windows = [
        ReplayStateCache(layer, 256, window="auto", device="meta", backend="triton", **formats).window
        for formats in ({"checkpoint": "fp16_sr"}, {}, {"read_format": "nvfp4"})
    ]
    assert windows == sorted(windows)
    assert windows[0] < windows[1] < windows[2]
    small = ReplayMamba2(32, 2, 4, 8, device="meta")
    assert ReplayStateCache(small, 1, window="auto", backend="triton").window == 0
    assert ReplayStateCache(small, 1, window="auto", backend="triton", read_format="fp8").window > 0


def test_sizes_are_those_of_one_sequence_whatever_the_cache() -> None:
    layers = [
        ReplayMamba2(32, nheads=4, headdim=8, d_state=16, ngroups=2),
        ReplayGatedDeltaNet(32, nheads=2, headdim=8, d_state=16, dtype=torch.bfloat16),
        ReplayKDA(32, nheads=2, headdim=8, d_state=24),
    ]
    state = 4 * (4 * 8 * 16 + 2 * 8 * 16 + 2 * 8 * 24)
    mamba2 = 4 * (2 * 16 + 4 * 8 + 4 + 4)
    gated_deltanet = 2 * (2 * 16 + 2 * 8) + 4 * (2 + 2)
    kda = 4 * (2 * 24 + 2 * 8 + 2 * 24 + 2)
    for batch, window, step_tokens in [(1, 0, 1), (3, 16, 1), (2, 5, 4)]:
        cache = ReplayStateCache(layers, batch, window=window, step_tokens=step_tokens)
        assert state_bytes(cache) == StateBytes(state, mamba2 + gated_deltanet + kda)


def test_a_published_mamba2_geometry_moves_1_8_times_less() -> None:
    layer = ReplayMamba2(4096, 128, 64, 128, ngroups=8, device="meta", dtype=torch.bfloat16)
    sizes = state_bytes(ReplayStateCache(layer, 1, device="meta"))
    ratio = sum(conventional_traffic(sizes)) / sum(replay_traffic(sizes, 16))
    assert ratio == pytest.approx(1.80, abs=0.01)


@pytest.mark.parametrize(
    ("window", "step_tokens", "kept"),
    [
        *((0, 1, 1), (1, 1, 1), (2, 1, 1), (5, 1, 1), (16, 1, 1), (0, 3, 3), (3, 3, 3), (5, 3, 3), (16, 3, 3)),
        *((0, 3, 1), (4, 3, 2), (9, 3, 1), (16, 5, 2)),
    ],
)
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_step_bytes_are_what_kernels_move_on_the_schedule_of_a_cache(
    kind: str, window: int, step_tokens: int, kept: int
) -> None:
    layer: ReplayLayer = {
        "mamba2": ReplayMamba2(16, nheads=4, headdim=3, d_state=8, ngroups=2),
        "gdn": ReplayGatedDeltaNet(16, nheads=4, headdim=3, d_state=8, ngroups=2),
        "kda": ReplayKDA(16, nheads=4, headdim=3, d_state=8),
    }[kind]
    groups, decays = {"mamba2": (2, 1), "gdn": (2, 1), "kda": (4, 8)}[kind]
    state, k, v, g, beta = 4 * 4 * 3 * 8, 4 * groups * 8, 4 * 4 * 3, 4 * 4 * decays, 4 * 4
    u = 0 if kind == "mamba2" else v
    raw = k + v + g + beta
    cache = ReplayStateCache(layer, 1, window=window, step_tokens=step_tokens)
    steps = steps_of_window(window, step_tokens, kept)
    read = written = 0
    with torch.no_grad():
        for step in range(steps + 1):
            pending, before = int(cache.seqlen - cache.flushed), int(cache.flushed)
            layer(torch.randn(1, step_tokens, 16), cache[0])
            cache.commit(kept)
            if step == 0:  # finds no record
                continue
            flushed = int(cache.flushed) > before
            assert flushed == (step == steps)
            read += state + pending * (raw if flushed or kind == "mamba2" else k + g + u)
            read += step_tokens * (k + raw)  # q is as large as k
            written += step_tokens * (raw + u + v) + state * flushed  # y is as large as v
    assert replay_step(sizes_of(layer), window, step_tokens, kept)[:2] == (read // steps, written // steps)


@pytest.mark.parametrize(("window", "drafts"), [(0, 0), (16, 0), (16, 4), (0, 7)])
def test_memory_is_that_of_a_cache_and_that_of_a_state_for_each_token(window: int, drafts: int) -> None:
    layer = ReplayGatedDeltaNet(16, nheads=4, headdim=3, d_state=8, ngroups=2)
    cache = ReplayStateCache(layer, 2, window=window, step_tokens=1 + drafts, backend="triton", device="meta")
    parts = cache.nbytes_by_part
    assert replay_memory(LayerBytes.of(cache[0]), window, 1 + drafts) == (parts["checkpoint"] + parts["ring"]) // 2
    assert native_memory(LayerBytes.of(cache[0]), 1 + drafts) == (1 + drafts) * 4 * 4 * 3 * 8


def test_a_conventional_step_writes_a_state_for_every_token_it_may_go_back_to() -> None:
    sizes = sizes_of(ReplayGatedDeltaNet(16, nheads=4, headdim=3, d_state=8, ngroups=2))
    one, four = conventional_step(sizes), conventional_step(sizes, 4)
    assert four.written == 4 * one.written == 4 * (4 * 4 * 3 * 8 + 4 * 4 * 3)
    assert four.read - one.read == 3 * 4 * (2 * 8 + 2 * 8 + 4 * 3 + 4 + 4)


@pytest.mark.parametrize(("case", "batch", "step_tokens", "us"), CONVENTIONAL)
def test_published_conventional_times_are_predicted(
    case: dict[str, Any], batch: int, step_tokens: int, us: float
) -> None:
    traffic = conventional_step(sizes_of_run(case), step_tokens)
    assert_predicted(predicted_us(traffic, batch, find_gpu("test", "H200")), us, f"{case['layer']} at {batch}")


@pytest.mark.parametrize(("case", "batch", "step_tokens", "us"), REPLAY)
def test_published_replay_times_are_predicted(case: dict[str, Any], batch: int, step_tokens: int, us: float) -> None:
    traffic = replay_step(sizes_of_run(case), 16, step_tokens)
    assert_predicted(predicted_us(traffic, batch, find_gpu("test", "H200")), us, f"{case['layer']} at {batch}")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_run_is_predicted(path: Path) -> None:
    """A run on a GPU that is not in the table fails here too: add it to ``GPUS``."""
    results = json.loads(path.read_text(encoding="utf-8"))
    gpu = find_gpu(path.name, results["gpu"])
    runs = [run for run in results["runs"] if run["batch"] >= SURE_BATCH]
    assert runs
    for run in runs:
        sizes, batch = sizes_of_run(run), run["batch"]
        what = f"{path.name}: {run['geometry']} at {batch}"
        conventional = predicted_us(conventional_step(sizes), batch, gpu)
        assert_predicted(conventional, run["conventional_us"], f"{what}, conventional")
        assert_predicted(predicted_us(replay_step(sizes, run["window"]), batch, gpu), run["replay_us"], what)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_automatic_choice_between_window_0_and_replay_is_the_faster_one_of_every_committed_run(path: Path) -> None:
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        replays = choose("triton", run["batch"], 1, [sizes_of_run(run)]) > 0
        taken, other = (run["replay_us"], run["window0_us"])[:: 1 if replays else -1]
        if taken > other:  # where the two are equal but for noise, either is right
            assert_predicted(taken, other, f"{path.name}: {run['geometry']} at {run['batch']}, automatic")


def test_a_gpu_is_found_by_any_spelling_and_an_unknown_one_is_refused_with_the_list() -> None:
    for name in ("H200", "h200", "NVIDIA H200", "nvidia-h200"):
        assert find_gpu("plan", name).read_tb_s == 4.64
    assert find_gpu("plan", "rtx-4090").name == "RTX 4090"
    with pytest.raises(ValueError, match=r"plan: gpu must be one of H200, .*MI300X.*; got 'H20'\. ") as refused:
        find_gpu("plan", "H20")
    assert all(gpu.name in str(refused.value) for gpu in GPUS)


def test_only_the_measured_gpu_reads_at_a_measured_ceiling() -> None:
    assert [gpu.name for gpu in GPUS if gpu.measured_tb_s] == ["H200"]
    assert all(0.9 * gpu.datasheet_tb_s < gpu.read_tb_s < gpu.datasheet_tb_s for gpu in GPUS)
