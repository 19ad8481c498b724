"""Stand-ins for what the bench calls and for what it writes: small cases, plain kernels with faults, a made-up JSON."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from draws import DEVICE
from torch import Tensor

from replayssm.bench import gate
from replayssm.bench.cases import CASES, Case
from replayssm.bench.hf_cases import PATCHES
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.reference import flush_ref, replay_ref

SMALL = [Case(each.layer, "small", 2, 8, 32, 2 if each.layer == "kda" else 1, each.recurrence) for each in CASES]
TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton and a GPU or its interpreter")
by_layer = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.layer)


class PlainKernels:
    """The two verbs of the decode kernels, row by row with the token loop; with a fault if one is named."""

    def __init__(self, fault: str = "none"):
        self.fault = fault

    def replay(
        self,
        q: Tensor,
        records: Records,
        checkpoint: Tensor,
        ring: Records,
        u: Tensor | None,
        flushing: Tensor,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> Tensor:
        if self.fault != "never folds":
            self.flush(flushing, checkpoint, ring, seqlen, flushed, recurrence=recurrence)
        outputs = []
        for row, (end, begin, folds) in enumerate(
            zip(seqlen.tolist(), flushed.tolist(), flushing.tolist(), strict=True)
        ):
            begin = end if folds else begin
            if self.fault == "reads a dead slot":
                begin -= 1
            slots, new = ring.k.shape[1], range(q.shape[1])
            at = [(end + token + (self.fault == "appends a slot too far")) % slots for token in new]
            for field, appended in zip(ring, records, strict=True):
                field[row, at] = appended[row]
            live = [token % slots for token in range(begin, end)] + at
            tokens = Records(*(field[row : row + 1, live].float() for field in ring))
            state = checkpoint[row : row + 1]
            outputs.append(replay_ref(q[row : row + 1].float(), tokens, state, delta=recurrence.delta))
        y = torch.cat(outputs)
        if self.fault == "multiplies a dead slot by 0":
            dead = (seqlen + q.shape[1]) % ring.v.shape[1]
            y += 0 * ring.v[torch.arange(len(dead), device=dead.device), dead].float().unsqueeze(1)
        if self.fault == "reads one token too far":
            y[:, 0] = y[:, -1]
        if self.fault == "folds drafts" and q.shape[1] > 1:  # those of this step, whether they are kept or not
            everyone = torch.ones_like(flushing)
            self.flush(everyone, checkpoint, ring, seqlen + q.shape[1], seqlen + 1, recurrence=recurrence)
        return y.bfloat16().float() if self.fault == "rounds its outputs" else y

    def flush(
        self,
        which: Tensor,
        checkpoint: Tensor,
        ring: Records,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> None:
        for row in which.nonzero().flatten().tolist():
            tokens = range(int(flushed[row]), int(seqlen[row]) - (self.fault == "folds one record too few"))
            if tokens:
                live = [token % ring.k.shape[1] for token in tokens]
                folded = Records(*(field[row : row + 1, live].float() for field in ring))
                checkpoint[row] = flush_ref(folded, checkpoint[row : row + 1], delta=recurrence.delta)[0]


FAULTS = (
    "never folds",
    "folds one record too few",
    "appends a slot too far",
    "reads a dead slot",
    "multiplies a dead slot by 0",
    "rounds its outputs",
)


TOKENS_FAULTS = ("reads one token too far", "folds drafts")  # to be seen where a step has several tokens


def plain_native(case: Case, fault: str = "none") -> gate.Native:
    """A step of several tokens by the token loop, with the state behind each of them."""

    def step(state: Tensor, snapshots: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        for t in range(q.shape[1]):
            token = Records(*(field[:, t : t + 1].float() for field in records))
            y[:, t : t + 1] = replay_ref(q[:, t : t + 1].float(), token, state, delta=case.recurrence.delta)
            state = flush_ref(token, state, delta=case.recurrence.delta)
            if fault != "keeps the last state only" or t == q.shape[1] - 1:
                snapshots[:, t] = state

    return step


def plain_step(case: Case, fault: str = "none") -> gate.Step:
    """A conventional step by the token loop."""

    def step(state: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        tokens = Records(*(field.float() for field in records))
        y.copy_(replay_ref(q.float(), tokens, state, delta=case.recurrence.delta))
        if fault != "leaves the state":
            state.copy_(flush_ref(tokens, state, delta=case.recurrence.delta))

    return step


GEOMETRY_KEYS = ["layer", "geometry", "nheads", "headdim", "d_state", "ngroups"]
TIME_KEYS = [
    *("conventional_us", "conventional_config", "conventional_tb_s", "replay_us", "replay_spread_us"),
    *("conventional_spread_us", "nonflush_us", "flush_us", "aligned_us", "window0_us"),
]
RUN_KEYS = [
    *(*GEOMETRY_KEYS, "window", "dtype", "batch", *TIME_KEYS),
    *("bytes_conventional", "bytes_replay", "percent_of_ceiling", "speedup", "gate"),
]


VERIFY_TIMES = ("conventional", "native", "replay", "replay_half")
VERIFY_KEYS = [
    *(*GEOMETRY_KEYS, "dtype", "batch", "tokens", "half", "window"),
    *("conventional_config", "conventional_tb_s", "native_config", "native_tb_s"),
    *(*(f"{name}_us" for name in VERIFY_TIMES), *(f"{name}_spread_us" for name in VERIFY_TIMES)),
    *(*(f"{name}_steps" for name in VERIFY_TIMES[1:]), "bytes_conventional", "bytes_replay", "bytes_replay_half"),
    *("bytes_native", "percent_of_ceiling", "gate"),
]
ABOUT = ("command", "date", "commit", "gpu", "driver", "torch", "triton", "python")


def made_up_speculation() -> dict[str, Any]:
    """A JSON in which prompt lookup is slower than no drafts at batch 256."""
    runs = []
    for drafter, length in (("prompt_lookup", 1.5), ("mtp", 2.25)):
        for batch in (1, 256):
            rates = dict(tokens_s=1500.0, tokens_s_spread=20.0, plain_tokens_s=1000.0, plain_tokens_s_spread=10.0)
            speedup = 0.9 if (drafter, batch) == ("prompt_lookup", 256) else 1.5
            texts = dict(texts=3 * batch, texts_differing=1, texts_wrong=0)
            sizes = dict(drafter=drafter, batch=batch, num_drafts=4, max_new_tokens=256, mean_length=length)
            counts = dict(proposed=[10, 10, 10, 10], accepted=[6, 3, 1, 0], speedup=speedup)
            runs.append(sizes | counts | rates | texts)
    about = {name: f"<{name}>" for name in ABOUT} | {"command": "replayssm bench speculative --batch 1 256"}
    return about | {"parameters": 4_821_806, "prompt_tokens": 256, "rounds": 3, "runs": runs}


def made_up_transformers() -> dict[str, Any]:
    """A JSON in which replay of smaller states is slower than transformers at batch 1, and all else twice as fast."""
    runs = []
    for batch in (1, 64):
        for arm, options in ({"unpatched": {}, "torch path": {}} | PATCHES).items():
            ratio = {"unpatched": 1.0, "torch path": 0.5}.get(
                arm, 0.9 if (arm, batch) == ("replay_formats", 1) else 2.0
            )
            times = dict(step_ms=20 / ratio, step_ms_spread=0.5, prefill_s=0.25, prefill_s_spread=0.02)
            rates = dict(tokens_s=50 * batch * ratio, generate_tokens_s=40 * batch, generate_tokens_s_ratio=1.25)
            about = dict(model="a", batch=batch, arm=arm, packages=["fla"] if arm == "unpatched" else [])
            runs.append(about | options | times | rates | dict(tokens_s_ratio=ratio, prefill_gb=9.0, decode_gb=0.0))
    about = {name: f"<{name}>" for name in ABOUT} | {"command": "replayssm bench hf --batch 1 64"}
    sizes = dict(small=False, dtype="bfloat16", prompt_tokens=128, new_tokens=64, rounds=3)
    return about | {"transformers": "<transformers>"} | sizes | {"runs": runs}


def made_up_drift(last: float = 8e-3) -> dict[str, Any]:
    """A JSON in which a shared 4-bit state ends at a divergence of ``last``, from 2e-3 in the middle."""
    divergence = {
        ("fp32", None): [1e-12, 2e-12, 9e-12],
        ("nvfp4_sr", None): [1e-3, 2e-3, last],
        ("fp16_sr", "int8"): [1e-6, 1e-6, 1e-6],
    }
    rest = dict(kept_bytes=9, moved_bytes=5, conventional_bytes=36, top1=[1.0, 0.995, 0.99])
    runs = [rest | dict(checkpoint=pair[0], read_format=pair[1], kl=kl) for pair, kl in divergence.items()]
    about = {name: f"<{name}>" for name in ABOUT} | {"command": "replayssm bench drift --tokens 2048"}
    layers = [dict(layer="a", stable_rank=[1.0, 2.5], nvfp4=[0.08, 0.1], lr_if4=[0.02, 0.1])]
    bins = [[0, 128], [128, 1024], [1024, 2048]]
    return about | dict(window=16, texts=2, tokens=2048, bins=bins, runs=runs, spectra=layers)


def made_up_document() -> dict[str, Any]:
    """A JSON in which replay is slower at batch 1 and 1.5 times as fast elsewhere."""
    runs = []
    for case in CASES:
        for batch in (1, 32, 256):
            speedup = 0.8 if batch == 1 else 1.5
            figures = dict.fromkeys(TIME_KEYS, 10.0) | {"conventional_us": speedup * 10, "conventional_tb_s": 3.9}
            about = {key: getattr(case, key) for key in GEOMETRY_KEYS}
            rest = dict(window=16, dtype="bfloat16", batch=batch, speedup=speedup, percent_of_ceiling=75.0)
            runs.append(about | rest | figures)
    about = {name: f"<{name}>" for name in ABOUT} | {"command": "replayssm bench kernel --batch 1"}
    return about | {"read_ceiling_tb_s": 4.5, "runs": runs}


def made_up_verification() -> dict[str, Any]:
    """A JSON in which T tokens cost (2 + T) / 4 steps by replay, at batch 1 ten times that, and 0.75 T natively."""
    runs = []
    for case in CASES:
        for batch, tokens in ((1, 8), (256, 1), (256, 4), (256, 16)):
            replay, native = (2 + tokens) / 4 * (1 + (batch == 1) * 9), 0.75 * tokens
            costs = dict(replay_steps=replay, replay_half_steps=0.9 * replay, native_steps=native)
            figures = dict.fromkeys((f"{name}{unit}_us" for name in VERIFY_TIMES for unit in ("", "_spread")), 10.0)
            about = {key: getattr(case, key) for key in GEOMETRY_KEYS}
            rest = dict(window=2 * tokens, dtype="bfloat16", batch=batch, tokens=tokens)
            runs.append(about | rest | figures | costs)
    about = {name: f"<{name}>" for name in ABOUT} | {"command": "replayssm bench verify --batch 256"}
    return about | {"read_ceiling_tb_s": 4.5, "runs": runs}
