"""Train the bundled model on the standard library of the Python that runs this, in ten minutes on one GPU.

    python examples/train_tiny.py --out FOLDER [--minutes 8] [--probe] [--smoke]

FOLDER gets config.json, model.safetensors (bf16) and README.md with every figure of the run in it. --probe only times
the steps, --smoke is a run of seconds on any CPU. Modules are held out (replayssm/bench/held_out.py). Nothing held out
decides anything here: the run ends when its time is over, and the last weights are the result.
"""

import argparse
import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from evaluate_tiny import (
    SEPARATOR,
    bits,
    bits_per_byte,
    far_and_near,
    held_out_documents,
    join,
    tensor_of,
    training_documents,
    xz_bits_per_byte,
)
from torch import Tensor

from replayssm.models import HybridLM

BUNDLE = Path(__file__).resolve().parent.parent / "models" / "tiny"
MARKS = ("<!-- figures: written by examples/train_tiny.py -->", "<!-- end of figures -->")

LEARNING_RATE = 2e-3
WARMUP = 0.03  # of the time; then straight down to zero
# A few million parameters see the same few megabytes dozens of times: without these two they learn them by heart.
WEIGHT_DECAY = 0.5
DROPOUT = 0.1


class Phase(NamedTuple):
    until: float  # of the time
    batch: int
    length: int  # tokens a sequence


# The last sequences are long, so that the states meet more text than they can hold and learn to forget.
PHASES = (Phase(0.6, 32, 1024), Phase(0.85, 8, 4096), Phase(1.0, 4, 16384))
SMOKE = (Phase(0.5, 2, 96), Phase(1.0, 1, 192))


class Trainer:
    """Model, optimiser and one training step at a fixed shape: on a GPU a CUDA graph of forward, backward and update.

    A step is thousands of small kernels, most of them in the chunk loop of the scan: the host cannot launch them as
    fast as the GPU runs them.
    """

    def __init__(self, model: HybridLM, dropout: float):
        self.model, self.device = model, model.embed.weight.device
        self.on_gpu = self.device.type == "cuda"
        self.rate = torch.zeros((), device=self.device)
        decayed = [p for p in model.parameters() if p.ndim == 2]  # no norm, convolution, A_log, dt_bias or D
        rest = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, self.rate, (0.9, 0.95), fused=self.on_gpu, capturable=self.on_gpu)
        for block in model.layers:
            block.mixer.register_forward_hook(lambda module, _, y: F.dropout(y, dropout, module.training))
        self.tokens = self.loss = self.graph = None

    def prepare(self, tokens: Tensor, capture: bool) -> None:
        """Take the shape of ``tokens``, (batch, length + 1), from now on; a capture takes two steps of training."""
        self.graph = None
        self.optimizer.zero_grad()  # the gradients that the graph writes must come from its own memory
        self.tokens = tokens.to(self.device, torch.int64)
        self.loss = torch.zeros((), device=self.device)
        if capture:
            torch.cuda.empty_cache()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._update()
                self._update()
            torch.cuda.current_stream().wait_stream(side)
            self.optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._update()
            self.graph = graph

    def step(self, tokens: Tensor, rate: float) -> Tensor:
        """One update; returns the mean loss in nats, on the device, overwritten by the next step."""
        self.tokens.copy_(tokens)
        self.rate.fill_(rate)
        if self.graph is None:
            self._update()
        else:
            self.graph.replay()
        return self.loss

    def _update(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def batches(documents: list[bytes], batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """(batch, length + 1) uint8 without end: each epoch a new order of documents, cut into windows at a new offset."""
    generator = torch.Generator().manual_seed(seed)
    texts = [tensor_of(text + SEPARATOR) for text in documents]
    while True:
        stream = torch.cat([texts[i] for i in torch.randperm(len(texts), generator=generator)])
        offset = torch.randint(length, (), generator=generator).item()
        windows = stream[offset:].unfold(0, length + 1, length)
        order = torch.randperm(len(windows), generator=generator)
        for some in order.split(batch):
            if len(some) == batch:
                yield windows[some]


def rate_at(fraction: float) -> float:
    """The learning rate when this fraction of the time is over."""
    return LEARNING_RATE * min(fraction / WARMUP, (1 - fraction) / (1 - WARMUP))


def train(model: HybridLM, phases: tuple[Phase, ...], args: argparse.Namespace, watched: Tensor) -> dict[str, str]:
    """Train until the time is over; saves the weights every minute; returns figures of the run."""
    documents = list(training_documents().values())
    trainer = Trainer(model, DROPOUT)
    start = saved = time.perf_counter()
    budget, step, seen, losses = args.minutes * 60, 0, 0, []
    for index, phase in enumerate(phases):
        source = batches(documents, phase.batch, phase.length, args.seed + index)
        trainer.rate.fill_(rate_at(0.0 if index == 0 else phases[index - 1].until))
        trainer.prepare(next(source), trainer.on_gpu and not args.eager)
        first_step, first_time = step, time.perf_counter()
        for tokens in source:
            fraction = (time.perf_counter() - start) / budget
            if fraction >= phase.until and step > first_step:
                break
            losses.append(trainer.step(tokens, rate_at(min(fraction, 1.0))).clone())
            step, seen = step + 1, seen + tokens.numel() - len(tokens)
            if step % 10 == 0 and trainer.on_gpu:
                torch.cuda.synchronize()  # the host must not run ahead of the clock it reads
            if step % 100 == 0:
                speed = (step - first_step) * phase.batch * phase.length / (time.perf_counter() - first_time)
                loss = torch.stack(losses[-100:]).mean().item() / math.log(2)
                if not math.isfinite(loss):
                    raise SystemExit(f"the loss is {loss} at step {step}; the last saved weights are in {args.out}")
                print(
                    f"{fraction:4.0%} step {step} length {phase.length} bits {loss:.4f} tokens/s {speed:,.0f}",
                    flush=True,
                )
            if time.perf_counter() - saved > 60:
                saved = time.perf_counter()
                save(model, args.out)
                print(f"     held out, first 4096 bytes of each module: {watch(model, watched):.4f}", flush=True)
    text = len(join(documents))
    last = torch.stack(losses[-100:]).mean().item() / math.log(2)
    return {
        "Training text": f"{len(documents)} modules, {text:,} bytes, {seen / text:.1f} epochs",
        "Steps": f"{step}, {seen / 1e6:.0f} million tokens in {(time.perf_counter() - start) / 60:.1f} minutes",
        "Training loss at the end": f"{last:.3f} bits per byte, with dropout",
    }


@torch.no_grad()
def watch(model: HybridLM, watched: Tensor) -> float:
    model.eval()
    mean = bits(model, watched).mean().item()
    model.train()
    return mean


def save(model: HybridLM, out: Path) -> None:
    """The weights in bf16, beside a config that computes in fp32."""
    model.save_pretrained(out, dtype=torch.bfloat16)


def evaluate(out: Path, device: str, smoke: bool) -> dict[str, str]:
    """Figures of the saved weights, read back: rounding included."""
    model = HybridLM.from_pretrained(out, device=device)
    documents = list(held_out_documents().values())
    if smoke:
        documents = [text[:600] for text in documents[:8]]
    every_fifth = documents[::5]
    stream = join(documents)
    weights = (out / "model.safetensors").read_bytes()
    scale = {"before": 1024, "passage": 32, "orders": 2} if smoke else {}
    near, far = far_and_near(model, documents, **scale)
    return {
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "model.safetensors": f"{len(weights):,} bytes, {digest(weights)}",
        "Held-out stream": f"{len(documents)} modules, {len(stream):,} bytes, {digest(stream)}",
        "Held-out bits per byte": f"{bits_per_byte(model, documents, len(documents)):.4f}",
        "`xz -9` bits per byte": f"{xz_bits_per_byte(stream):.4f}",
        "Held-out bits per byte, every fifth": f"{bits_per_byte(model, every_fifth, len(every_fifth)):.4f}",
        "`xz -9` bits per byte, every fifth": f"{xz_bits_per_byte(join(every_fifth)):.4f}",
        "Bits per byte at 1K to 2K": f"{near:.4f}",
        "Bits per byte at 64K to 128K": ", ".join(f"{x:.4f}" for x in far),
    }


def digest(data: bytes) -> str:
    return f"sha256 `{hashlib.sha256(data).hexdigest()}`"


def write_readme(out: Path, figures: dict[str, str]) -> None:
    """The bundled README with these figures between its marks."""
    before, _, rest = (BUNDLE / "README.md").read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in figures.items())])
    (out / "README.md").write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


def probe(model: HybridLM, seed: int) -> None:
    """Time a step of every shape, eager and as a graph, and compare their losses on the same weights."""
    documents = list(training_documents().values())
    print(f"{len(documents)} training modules, {len(join(documents)):,} bytes")
    trainer = Trainer(model, dropout=0.0)
    for phase in PHASES:
        tokens = next(batches(documents, phase.batch, phase.length, seed))
        results = []
        for capture in (False, True):
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            trainer.prepare(tokens, capture)
            loss = trainer.step(tokens, 0.0).item()  # at rate 0 the weights stay as they are
            ready = time.perf_counter()
            for _ in range(2):
                trainer.step(tokens, 0.0)
            torch.cuda.synchronize()
            results.append((loss, (time.perf_counter() - ready) / 2, ready - begin))
        (eager, eager_time, _), (graph, graph_time, capture_time) = results
        tokens_per_step = phase.batch * phase.length
        print(
            f"{phase.batch} x {phase.length}: eager {eager_time * 1e3:.0f} ms, graph {graph_time * 1e3:.0f} ms "
            f"({tokens_per_step / graph_time:,.0f} tokens/s), capture {capture_time:.1f} s, "
            f"peak {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB; loss eager {eager:.6f}, graph {graph:.6f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the model; required unless --probe")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training; reading and measuring come on top")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--probe", action="store_true", help="time the steps of every shape on a GPU, and stop")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps and a fraction of the held-out text")
    args = parser.parse_args()
    on_gpu = torch.device(args.device).type == "cuda"
    if args.out is None and not args.probe:
        parser.error("--out FOLDER is required")
    if args.probe and not on_gpu:
        parser.error("--probe needs a GPU")

    begin = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where products run in fp32: enough to train
    model = HybridLM(json.loads((BUNDLE / "config.json").read_text()), device=args.device).train()
    if args.probe:
        probe(model, args.seed)
        return
    if args.smoke:
        args.minutes = 0.05
    watched = torch.stack([tensor_of(text[:4096]) for text in held_out_documents().values() if len(text) >= 4096])
    figures = train(model, SMOKE if args.smoke else PHASES, args, watched)
    save(model, args.out)
    torch.set_float32_matmul_precision("highest")
    figures |= evaluate(args.out, args.device, args.smoke)
    figures["Trained on"] = torch.cuda.get_device_name() if on_gpu else platform.machine()
    figures["Software"] = f"Python {platform.python_version()}, torch {torch.__version__}"
    figures["Wall time"] = f"{(time.perf_counter() - begin) / 60:.1f} minutes, measuring included"
    write_readme(args.out, figures)
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
