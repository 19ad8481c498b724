"""Train the bundled model's head for drafts (MTP) on the text the model was trained on, in two minutes on one GPU.

    python examples/train_mtp.py --out models/tiny/mtp.safetensors [--minutes 2] [--model tiny | FOLDER] [--smoke]

The model stays as it is. From its hidden state behind a token and the token that follows, the head learns what the
model will say behind that one; from its own hidden state the same one token further on, four times. The loss is the
divergence from the model's own distributions, since these decide which drafts stand. The acceptance is measured on
modules held out from both trainings: the model continues their beginnings with four drafts a step, greedy and sampled.
--smoke is a run of seconds on any CPU.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from evaluate_tiny import SEPARATOR, held_out_documents, training_documents
from torch import Tensor
from train_tiny import batches

import replayssm
from replayssm.drafters import MTPHead
from replayssm.graphs import Captured
from replayssm.models import HybridLM, from_pretrained

DEPTH = 4  # drafts
HIDDEN = 1536  # 0.92 million parameters, 1.8 MB
LEARNING_RATE = 2e-3
WARMUP = 0.05  # of the time; then straight down to zero
WEIGHT_DECAY = 0.1
TEMPERATURES = 0.0, 0.7  # at which the acceptance is measured: greedy text repeats itself, which helps copying


class Reader:
    """The model's hidden states and log probabilities of a batch; on a GPU one CUDA graph, as its kernels are small."""

    def __init__(self, model: HybridLM, batch: int, length: int):
        device = model.embed.weight.device
        self.model = model
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(batch, length, model.config["d_model"], device=device)
        self.wanted = torch.zeros(batch, length, model.config["vocab_size"], device=device)
        self._read = Captured(self._run, device)

    def __call__(self, tokens: Tensor) -> None:
        """Read (batch, length + 1) ids; the results stand in ``tokens``, ``hidden`` and ``wanted``."""
        self.tokens.copy_(tokens)
        self._read()

    @torch.no_grad()
    def _run(self) -> None:
        logits, hidden = self.model(self.tokens[:, :-1], return_hidden=True)
        self.hidden.copy_(hidden)
        self.wanted.copy_(logits.float().log_softmax(-1))


def losses(model: HybridLM, head: MTPHead, reader: Reader) -> list[Tensor]:
    """For each depth the mean divergence of the head's distribution from the model's, in nats."""
    hidden, length, result = reader.hidden, reader.hidden.shape[1], []
    for depth in range(1, DEPTH + 1):
        # behind token i: hidden states of tokens up to i + depth - 1, and token i + depth, which the model has read too
        hidden = head(hidden[:, : length - depth], model.embed(reader.tokens[:, depth:length]))
        drafted = model.lm_head(hidden).float().log_softmax(-1)
        wanted = reader.wanted[:, depth:]
        result.append(F.kl_div(drafted, wanted, reduction="none", log_target=True).sum(-1).mean())
    return result


def train(model: HybridLM, head: MTPHead, args: argparse.Namespace) -> None:
    device = model.embed.weight.device
    batch, length = (2, 64) if args.smoke else (32, 1024)
    reader = Reader(model, batch, length)
    decayed = [p for p in head.parameters() if p.ndim == 2]
    rest = [p for p in head.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, (0.9, 0.95))
    start, seen = None, []
    for step, tokens in enumerate(batches(list(training_documents().values()), batch, length, args.seed)):
        if device.type == "cuda":
            torch.cuda.synchronize()  # the host must not run ahead of the clock it reads
        start = start or time.perf_counter()  # the text has been read
        fraction = (time.perf_counter() - start) / (60 * args.minutes)
        if fraction >= 1 and step > 0:
            break
        fraction = min(fraction, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(fraction / WARMUP, (1 - fraction) / (1 - WARMUP))
        reader(tokens.to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            each = losses(model, head, reader)
        optimizer.zero_grad()
        torch.stack(each).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        seen.append(torch.stack(each).detach())
        if (step + 1) % 50 == 0 or (args.smoke and step == 0):
            bits = torch.stack(seen[-50:]).mean(0) / math.log(2)
            print(
                f"{fraction:4.0%} step {step + 1}, bits from the model for drafts 1 to {DEPTH}: "
                + ", ".join(f"{x:.4f}" for x in bits.tolist()),
                flush=True,
            )
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(seen)} steps of {batch} x {length} tokens in {minutes:.1f} minutes")


def acceptance(model: HybridLM, drafter: str, temperature: float, smoke: bool) -> replayssm.Acceptance:
    """Of drafts behind the first quarter kilobyte of every held-out module."""
    begin, count, modules = (32, 8, 3) if smoke else (256, 256, None)
    prompts = [list(SEPARATOR + text[:begin]) for text in list(held_out_documents().values())[:modules]]
    counts = replayssm.Acceptance()
    replayssm.generate(
        model,
        prompts,
        max_new_tokens=count,
        temperature=temperature,
        seed=0,
        eos=SEPARATOR[0],
        drafter=drafter,
        num_drafts=DEPTH,
        acceptance=counts,
    )
    return counts


def report(model: HybridLM, smoke: bool) -> None:
    for temperature, drafter in itertools.product(TEMPERATURES, ("mtp", "prompt_lookup")):
        counts = acceptance(model, drafter, temperature, smoke)
        each = [f"{a / max(p, 1):.1%}" for a, p in zip(counts.accepted, counts.proposed, strict=True)]
        where = f"held out, temperature {temperature:g}, {drafter}"
        print(f"{where}: drafts 1 to {DEPTH} accepted {', '.join(each)}; {counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the head, mtp.safetensors beside the model")
    parser.add_argument("--model", default="tiny", help="tiny, or the folder of a byte-level model (default: tiny)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training; reading and measuring come on top")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps")
    args = parser.parse_args()
    if args.smoke:
        args.minutes = 0.05

    torch.manual_seed(args.seed)
    model, _ = from_pretrained(args.model, device=args.device)
    model.requires_grad_(False)
    size = model.config["d_model"], HIDDEN
    model.mtp = MTPHead(*size, eps=model.config["norm_eps"], device=args.device, dtype=torch.float32)
    torch.set_float32_matmul_precision("high")  # TF32 where products run in fp32: enough to train
    train(model, model.mtp, args)
    torch.set_float32_matmul_precision("highest")
    model.save_mtp(args.out, dtype=torch.bfloat16)
    model.load_mtp(args.out)  # rounding included
    parameters = sum(p.numel() for p in model.mtp.parameters())
    print(f"{args.out}: {args.out.stat().st_size:,} bytes, {parameters:,} parameters")
    report(model, args.smoke)


if __name__ == "__main__":
    main()
