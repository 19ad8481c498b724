"""Steps as CUDA graphs: generate on a GPU replays one recording, waits for nothing, and gives what plain calls give."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from drafting import Bigram, Scripted
from draws import DEVICE
from hybrids import ALL, VOCAB, build, config, token_ids
from running import no_waiting

from replayssm import Acceptance, ReplayStateCache, generate
from replayssm.drafters import MTPHead
from replayssm.graphs import WARM_UP, Captured, Verdicts
from replayssm.models import HybridLM

on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: run with REPLAYSSM_TEST_DEVICE=cuda")
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], token_ids(1, 1, seed=1)[0].tolist(), token_ids(1, 4, seed=4)[0].tolist()]
COUNT = 40
DRAFTERS = ["none", "prompt_lookup", "mtp", "model", "scripted"]


def hybrid(seed: int = 0) -> HybridLM:
    """In fp64, where a tie between two tokens does not happen."""
    model = build(config(*ALL), seed=seed)
    model.mtp = MTPHead(24, 31, device=DEVICE, dtype=torch.float64)
    return model


def drafter(name: str, model: HybridLM) -> object:
    if name == "scripted":  # code that runs outside the graph
        texts = generate(model, PROMPTS, max_new_tokens=COUNT, cuda_graphs=False)
        return Scripted(texts, torch.tensor([len(prompt) for prompt in PROMPTS], device=DEVICE), 1, 0.9, VOCAB)
    return {"none": None, "model": hybrid(1)}.get(name, name)


def test_a_function_is_called_once_a_call():
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def step() -> None:
        total.add_(1)

    captured = Captured(step, DEVICE)
    for _ in range(7):
        captured()
    assert total.item() == 7


def test_what_a_run_held_is_free_when_it_is_over():
    """Caches and graphs: without waiting for Python to look for cycles."""
    gc.collect()
    gc.disable()
    try:
        model = hybrid()
        cache = ReplayStateCache(model, 3, step_tokens=5, max_seqlen=80)
        gone = weakref.ref(cache)
        generate(model, PROMPTS, max_new_tokens=9, cache=cache, drafter="mtp")
        generate(model, PROMPTS, max_new_tokens=9, cache=cache, drafter=hybrid(1))
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_verdicts_come_in_order_and_none_is_lost():
    verdicts, value, seen = Verdicts(DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE), []
    for number in range(9):
        value.fill_(number)
        verdicts.put(value)
        while verdicts.due:
            seen.append(verdicts.take()[0])
    assert len(verdicts) == (DEVICE.type == "cuda")  # the step that may still run
    while len(verdicts):
        seen.append(verdicts.take()[0])
    assert seen == list(range(9))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_of_recorded_steps_are_those_of_plain_ones(name):
    model = hybrid()
    plain = generate(model, PROMPTS, max_new_tokens=COUNT, cuda_graphs=False)
    for eos in ([], plain[1, 20:21].tolist()):
        expected = generate(model, PROMPTS, max_new_tokens=COUNT, eos=eos, cuda_graphs=False)
        seqlens = []
        for cuda_graphs in (False, True):
            acceptance = Acceptance()
            cache = ReplayStateCache(model, 3, window=7, step_tokens=5, max_seqlen=80)
            tokens = generate(
                model, PROMPTS, max_new_tokens=COUNT, eos=eos, cache=cache, drafter=drafter(name, model),
                acceptance=acceptance, cuda_graphs=cuda_graphs,
            )  # fmt: skip
            assert torch.equal(tokens, expected)
            cache.check()
            seqlens.append((cache.seqlen.tolist(), acceptance.tokens, acceptance.accepted))
        if name != "scripted":  # which draws its mistakes anew
            assert seqlens[0] == seqlens[1]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["none", "mtp", "model"])
def test_draws_of_recorded_steps_differ_from_step_to_step_and_a_seed_fixes_them(name):
    model = Bigram(torch.zeros(64, 64)) if name == "none" else hybrid()
    options = {"max_new_tokens": COUNT, "temperature": 1.0, "drafter": drafter(name, hybrid())}
    texts = [generate(model, PROMPTS, seed=seed, **options) for seed in (5, 5, 6)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    late = texts[0][:, 10:]
    assert len(late.unique()) > 15
    unseeded = [generate(model, PROMPTS, **options) for _ in range(2)]
    assert not torch.equal(*unseeded)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["none", "prompt_lookup", "mtp", "model"])
def test_the_loop_waits_for_nothing_but_verdicts(name):
    """From the second column on: reading prompts may wait."""
    model = hybrid()
    for eos in ([], [3]):
        stream = generate(model, PROMPTS, max_new_tokens=COUNT, eos=eos, drafter=drafter(name, model), stream=True)
        pieces = [next(stream)]
        for _ in range(WARM_UP + 3):  # the recording waits once
            pieces.append(next(stream))
        with no_waiting():
            pieces += list(stream)
        joined = torch.cat(pieces, 1)
        assert torch.equal(joined, generate(model, PROMPTS, max_new_tokens=COUNT, eos=eos, cuda_graphs=False))


@pytest.mark.gpu
@on_a_gpu
def test_a_second_turn_on_one_cache_is_recorded_anew():
    model = hybrid()
    results = []
    for cuda_graphs in (False, True):
        cache = ReplayStateCache(model, 3, window=5, step_tokens=5, max_seqlen=120)
        options = {"cache": cache, "drafter": "prompt_lookup", "cuda_graphs": cuda_graphs}
        first = generate(model, PROMPTS, max_new_tokens=20, **options)
        turn = torch.cat([first[:, -1:], token_ids(3, 4, seed=8)], 1)
        results.append((first, generate(model, turn, max_new_tokens=20, **options)))
    for eager, recorded in zip(*results, strict=True):
        assert torch.equal(eager, recorded)


@pytest.mark.gpu
@on_a_gpu
def test_a_model_that_reads_values_is_refused_with_the_way_out():
    """In a process of its own: a recording that fails may leave CUDA unfit for the tests that follow."""
    script = Path(__file__).parent / "gpu_failed_recording.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
