"""Time the bundled model with drafts beside the same model without, on held-out code; on a CPU with fewer tokens."""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from replayssm import Acceptance, generate
from replayssm.bench import report, speculative_report
from replayssm.bench.gate import SLACK
from replayssm.bench.held_out import SEPARATOR, passages
from replayssm.bench.machine import about
from replayssm.bench.options import add_output
from replayssm.bench.progress import Progress
from replayssm.checks import expect_int64
from replayssm.models import HybridLM, from_pretrained

DRAFTERS = ("prompt_lookup", "mtp", "draft")
PROMPT, SPACING = 256, 512  # bytes of a prompt, and from one to the next in a module
ON_GPU, ON_CPU = ((1, 32, 256), 256), ((1, 4), 48)  # batches and new tokens
ROUNDS = 3  # of other passages each
# The first tokens are not timed: the prompt is read, kernels are compiled and a graph is recorded in them. A run of
# these alone is timed as well and subtracted.
FIRST = 32
LEAST = 16  # tokens behind these; the time of fewer would be noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench speculative``."""
    (gpu_batches, gpu_tokens), (cpu_batches, cpu_tokens) = ON_GPU, ON_CPU
    said = f"default: {' '.join(map(str, gpu_batches))}; {' '.join(map(str, cpu_batches))} on a CPU"
    parser.add_argument("--batch", nargs="+", type=int, help=said)
    parser.add_argument(
        "--drafter",
        nargs="+",
        choices=DRAFTERS,
        help="default: all that the model has; draft is the model as its own draft model, an upper bound of acceptance",
    )
    parser.add_argument("--num-drafts", type=int, default=4, help="guesses a step (default 4)")
    parser.add_argument(
        "--max-new-tokens", type=int, help=f"timed, for each row (default {gpu_tokens}; {cpu_tokens} on a CPU)"
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Check, time, print a table and write the JSON.

    Returns:
        The exit status: 0, or 1 if a text was not the one without drafts; such a case is not written.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    default_batches, default_tokens = ON_GPU if on_gpu else ON_CPU
    batches = default_batches if options.batch is None else options.batch
    num_tokens = default_tokens if options.max_new_tokens is None else options.max_new_tokens
    least = {"--batch": 1, "--num-drafts": 1, "--max-new-tokens": LEAST}
    for (name, bound), value in zip(least.items(), (min(batches), options.num_drafts, num_tokens), strict=True):
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}; got {value}. Give another number.")
    for name, value in zip(least, (max(batches), options.num_drafts, num_tokens), strict=True):
        expect_int64("bench speculative", name, value, "Give another number.")
    if not on_gpu:
        torch.set_num_threads(1)  # the model is too small to share between threads
    model, _ = from_pretrained("tiny", device=device)
    drafters = options.drafter or [name for name in DRAFTERS if name != "mtp" or model.mtp is not None]
    progress = Progress(len(batches), (1 + len(drafters)) * (1 + ROUNDS))
    runs, failed = [], 0
    for batch in batches:
        entries = measure_batch(model, batch, drafters, options.num_drafts, num_tokens, progress)
        runs += [entry for entry in entries if entry["texts_wrong"] == 0]
        failed += sum(entry["texts_wrong"] > 0 for entry in entries)
    sizes = f"--num-drafts {options.num_drafts} --max-new-tokens {num_tokens}"
    command = (
        f"replayssm bench speculative --batch {' '.join(map(str, batches))} --drafter {' '.join(drafters)} {sizes}"
    )
    document: dict[str, Any] = about(command, options.commit, device) | {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt_tokens": PROMPT,
        "rounds": ROUNDS,
        "runs": runs,
    }
    path = report.save(document, "speculative", options.out)
    print(f"{speculative_report.table(document)}\n\n{speculative_report.conditions(document)}\n\nWritten: {path}")
    if failed:
        print(f"{failed} of {failed + len(runs)} cases gave other texts and are left out.", file=sys.stderr)
    return 1 if failed else 0


def measure_batch(
    model: HybridLM, batch: int, drafters: list[str], num_drafts: int, num_tokens: int, progress: Progress
) -> list[dict[str, Any]]:
    """Time all drafters at one batch size, in turn with no drafter: entries of "runs".

    Args:
        drafters: of ``DRAFTERS``.
        num_drafts: guesses a step.
        num_tokens: that each row is timed for.
    """
    arms = [None, *drafters]
    rates: dict[str | None, list[float]] = {arm: [] for arm in arms}
    counts: dict[str | None, Acceptance] = {arm: Acceptance() for arm in arms}
    differing, wrong = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)
    for arm in arms:
        progress.stage(f"batch {batch}: {arm or 'no drafts'}, warming up")
        _timed(model, prompts(batch, 0), FIRST, arm, num_drafts, Acceptance())
    for number in range(ROUNDS):
        ids, texts = prompts(batch, number), {}
        for arm in arms:
            progress.stage(f"batch {batch}: {arm or 'no drafts'}, round {number + 1} of {ROUNDS}")
            first_s, _ = _timed(model, ids, FIRST, arm, num_drafts, Acceptance())
            all_s, texts[arm] = _timed(model, ids, FIRST + num_tokens, arm, num_drafts, counts[arm])
            rates[arm].append(batch * num_tokens / (all_s - first_s))
        for arm in drafters:
            rows = (texts[arm] != texts[None]).any(1).nonzero().flatten().tolist()
            differing[arm] += len(rows)
            wrong[arm] += sum(not explained(model, ids[row], texts[None][row], texts[arm][row]) for row in rows)
    plain = statistics.median(rates[None])
    entries = []
    for arm in drafters:
        rate = statistics.median(rates[arm])
        entries.append(
            dict(
                drafter=arm,
                batch=batch,
                num_drafts=num_drafts,
                max_new_tokens=num_tokens,
                mean_length=counts[arm].mean_length,
                proposed=counts[arm].proposed,
                accepted=counts[arm].accepted,
                tokens_s=rate,
                tokens_s_spread=max(rates[arm]) - min(rates[arm]),
                plain_tokens_s=plain,
                plain_tokens_s_spread=max(rates[None]) - min(rates[None]),
                speedup=rate / plain,
                texts=ROUNDS * batch,
                texts_differing=differing[arm],
                texts_wrong=wrong[arm],
            )
        )
    said = [f"{entry['drafter']} {entry['mean_length']:.2f} tokens a step" for entry in entries]
    progress.part(f"batch {batch}: no drafts {plain:,.0f} tokens/s; {'; '.join(said)}")
    for arm in drafters:
        if wrong[arm]:
            print(f"batch {batch}, {arm}: LEFT OUT, {wrong[arm]} texts are wrong", file=sys.stderr)
    return entries


def prompts(batch: int, number: int) -> Tensor:
    """The ids (batch, PROMPT) of the ``number``-th ``batch`` passages; when all have been used, they come again.

    Raises:
        RuntimeError: they do not fit the memory of this machine.
    """
    found = torch.tensor([list(SEPARATOR + passage) for passage in passages(PROMPT - 1, SPACING)])
    turned = found.roll(-(number * batch) % len(found), 0)
    return turned.repeat(-(-batch // len(found)), 1)[:batch]  # all memory at once: a batch beyond it is refused there


@torch.no_grad()
def explained(model: HybridLM, prompt: Tensor, plain: Tensor, drafted: Tensor) -> bool:
    """Whether rounding explains that two greedy texts (tokens,) differ, where they first do.

    Both tokens must be as likely as the likeliest one, in fp64, up to what rounding moves logits by.
    """
    at = int((plain != drafted).long().argmax())
    ids = torch.cat([prompt.to(plain.device), plain[:at]]).unsqueeze(0)
    rounded = model(ids, logits_to_keep=1)[0, -1].double()
    exact = copy.deepcopy(model).double()(ids, logits_to_keep=1)[0, -1]
    least = torch.minimum(exact[plain[at]], exact[drafted[at]])
    return bool(exact.max() - least <= 2 * SLACK * (rounded - exact).abs().max())


def _timed(
    model: HybridLM, ids: Tensor, num_tokens: int, drafter: str | None, num_drafts: int, counts: Acceptance
) -> tuple[float, Tensor]:
    """Seconds, and the new tokens (batch, num_tokens)."""
    drafting = model if drafter == "draft" else drafter
    _wait(model)
    begin = time.perf_counter()
    tokens = generate(model, ids, max_new_tokens=num_tokens, drafter=drafting, num_drafts=num_drafts, acceptance=counts)
    _wait(model)
    assert isinstance(tokens, Tensor)
    return time.perf_counter() - begin, tokens


def _wait(model: HybridLM) -> None:
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize()
