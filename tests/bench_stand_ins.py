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
            slots = ring.k.shape[1]
            at = (end + (self.fault == "appends a slot too far")) % slots
            for field, new in zip(ring, records, strict=True):
                field[row, at] = new[row, 0]
            live = [token % slots for token in range(begin, end)] + [at]
            tokens = Records(*(field[row : row + 1, live].float() for field in ring))
            state = checkpoint[row : row + 1]
            outputs.append(replay_ref(q[row : row + 1].float(), tokens, state, delta=recurrence.delta))
        y = torch.cat(outputs)
        if self.fault == "multiplies a dead slot by 0":
            dead = (seqlen + 1) % ring.v.shape[1]
            y += 0 * ring.v[torch.arange(len(dead), device=dead.device), dead].float().unsqueeze(1)
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
    names = ("command", "date", "commit", "gpu", "driver", "torch", "triton", "python")
    return {name: f"<{name}>" for name in names} | {"read_ceiling_tb_s": 4.5, "runs": runs}
