"""The ``replayssm`` command."""

import argparse
import copy
import io
import os
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import replayssm
from replayssm import Acceptance, ReplayStateCache, cli_convert, cli_plan, generate
from replayssm.arguments import add_formats, count, window
from replayssm.bench import command as bench
from replayssm.cache.checkpoint import EXACT
from replayssm.models import ByteTokenizer, FileTokenizer, HybridLM, from_pretrained
from replayssm.models.hybrid import DTYPES
from replayssm.plan import conventional_traffic, replay_traffic, state_bytes

BOUNDARY = 0  # byte-level models are trained on texts with a zero byte between them: it opens the prompt, and ends
SMALL = 2**25  # parameters; a decode step of a smaller model is too little work to share between CPU threads
Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
NUM_DRAFTS = 4  # unless asked for
SLACK = 1.5  # replay may be as wrong as conventional decoding in the same dtype, times this


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, that of the process if None.

    Returns:
        The exit status: 0, 1 if ``--compare`` found a difference that rounding does not explain, 2 for bad input.
    """
    options = _parser().parse_args(argv)
    run = {"generate": _generate, "plan": cli_plan.run, "convert": cli_convert.run, "bench": bench.run}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model writes characters that not every terminal has
    try:
        return run[options.command](options)
    except BrokenPipeError:  # the reader has seen enough; the exit must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        said = " ".join(str(error).split()).removeprefix(f"{options.command}: ")  # which the line begins with anyway
    except (MemoryError, OverflowError) as error:  # of Python itself, before torch was asked for anything
        said = f"sizes must fit the memory of this machine; got {type(error).__name__} for these. Ask for smaller ones."
    print(f"replayssm {options.command}: {said}", file=sys.stderr)
    return 2


class _Version(argparse.Action):
    """Looks the version up when it is asked for: a checkout that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"replayssm {replayssm.__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replayssm", description="Decode recurrent language models by replay.")
    parser.add_argument("--version", action=_Version, nargs=0, help="say which release this is, and end")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "generate", help="continue a text", description="Continue a text, and say what that moved through memory."
    )
    command.add_argument("prompt", nargs="?", default="-", help="the text; - or nothing reads it from standard input")
    command.add_argument(
        "--model",
        default="tiny",
        help="a folder, org/name on the Hub, or tiny, the bundled one (default)",
    )
    command.add_argument("--max-new-tokens", type=count, default=200, help="tokens to write (default 200)")
    command.add_argument(
        "--window",
        type=window,
        default=16,
        help='most tokens between two writes of the state (default 16); 0 writes it at every step; "auto" chooses',
    )
    add_formats(command)
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    command.add_argument("--top-k", type=int, help="sample from the k likeliest tokens only")
    command.add_argument("--top-p", type=float, help="sample from the likeliest tokens that hold this much probability")
    command.add_argument("--seed", type=int, help="makes sampling and stochastic rounding repeatable")
    command.add_argument(
        "--drafter",
        help="guess tokens and verify them together: prompt_lookup copies from the text, mtp is the model's own head, "
        "anything else a smaller model",
    )
    command.add_argument("--num-drafts", type=count, help=f"guesses a step (default {NUM_DRAFTS}), with --drafter")
    command.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    command.add_argument("--dtype", choices=DTYPES, help="to compute in; default: what the model asks for")
    command.add_argument(
        "--compare",
        action="store_true",
        help="decode with window 0 as well, in float32, and compare; exit 1 if rounding does not explain a difference",
    )
    cli_plan.add_parser(commands)
    cli_convert.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _generate(options: argparse.Namespace) -> int:
    """Load, write the text to standard output as it comes, and a line about it to standard error."""
    if options.compare and (options.temperature or options.dtype not in (None, "float32")):
        raise ValueError(
            f"--compare must go with temperature 0 and dtype float32; got temperature {options.temperature:g} and "
            f"dtype {options.dtype or 'float32'}. Leave these two options out."
        )
    if options.compare and (options.checkpoint != EXACT or options.read_format):
        raise ValueError(
            f"--compare must go with --checkpoint {EXACT} and no --read-format; got {options.checkpoint} and "
            f"{options.read_format}. Formats change more than rounding explains: see replayssm bench drift."
        )
    if options.num_drafts is not None and options.drafter is None:
        raise ValueError("--num-drafts must come with --drafter; got none. Add --drafter prompt_lookup.")
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    dtype = torch.float32 if options.compare else DTYPES.get(options.dtype)
    model, tokenizer = from_pretrained(options.model, device=_device(options.device), dtype=dtype)
    if tokenizer is None:
        raise ValueError(
            f"--model must have a tokenizer.json, or a config.json that names a tokenizer; got {options.model}, which "
            "has neither. Add one."
        )
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL:
        torch.set_num_threads(1)  # the bundled model, two busy cores: 48 tokens/s, and 2.7 with two threads
    bytewise = isinstance(tokenizer, ByteTokenizer)
    ids = [BOUNDARY, *tokenizer.encode(prompt)] if bytewise else tokenizer.encode(prompt)
    if not prompt:
        raise ValueError("PROMPT must have at least 1 character; got an empty text. Give the model a beginning.")
    tokens = _write(model, tokenizer, ids, options)
    return _compare(model, tokenizer, ids, tokens) if options.compare else 0


def _read_prompt() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(
            "PROMPT must be an argument or come from standard input; got a terminal, or nothing. "
            'Try: replayssm generate "def main():", or: replayssm generate < file'
        )
    # bytes that are not UTF-8 reach the tokenizer unchanged, as they do in an argument
    return sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")


def _device(name: str) -> torch.device:
    try:
        return torch.empty(1, device=name).device
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build of torch without CUDA
        said = str(error).splitlines()[0]
        raise ValueError(
            f"--device must be one that torch can use here, as cpu is; got {name}. It says: {said}"
        ) from error


def _write(model: HybridLM, tokenizer: Tokenizer, ids: list[int], options: argparse.Namespace) -> list[int]:
    """Write the text of ``ids`` and its continuation as it comes, then speed and traffic; returns the new tokens."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    drafter = _drafter(options, model)
    num_drafts = options.num_drafts or NUM_DRAFTS
    step_tokens = 1 if drafter is None else 1 + num_drafts
    max_seqlen = len(ids) + options.max_new_tokens + step_tokens
    cache = ReplayStateCache(
        model,
        1,
        window=options.window,
        step_tokens=step_tokens,
        max_seqlen=max_seqlen,
        checkpoint=options.checkpoint,
        read_format=options.read_format,
        seed=seed,
    )
    tokens: list[int] = []
    ends = [BOUNDARY] if isinstance(tokenizer, ByteTokenizer) else tokenizer.eos
    text, acceptance = tokenizer.stream(), Acceptance()
    pieces = generate(
        model,
        [ids],
        max_new_tokens=options.max_new_tokens,
        cache=cache,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=seed,
        eos=ends or None,
        vocab_size=_emitted(model, tokenizer),
        drafter=drafter,
        num_drafts=num_drafts,
        acceptance=acceptance,
        stream=True,
        progress=_progress,
    )
    if options.prompt != "-":  # what came through a pipe is not repeated
        print(options.prompt, end="", flush=True)
    begin = time.perf_counter()
    for piece in pieces:
        if not tokens:
            prefilled = time.perf_counter()
        new = piece[0].tolist()
        tokens += new
        print(text.push([token for token in new if token not in ends]), end="", flush=True)
    end = time.perf_counter()
    print(text.finish(), flush=True)
    # the first token comes out of the prompt, each later one out of a decode step
    speed = (len(tokens) - 1) / (end - prefilled) if len(tokens) > 1 else 1 / (end - begin)
    drawn = f", seed {seed}" if options.temperature or options.checkpoint != EXACT else ""
    moved = _traffic(cache) if drafter is None else f"window {cache.window}, {acceptance}"
    print(f"[{len(tokens)} tokens{drawn}, {speed:.1f} tokens/s, {moved}]", file=sys.stderr)
    return tokens


def _emitted(model: HybridLM, tokenizer: Tokenizer) -> int:
    """Ids that mean something to both are below this."""
    return min(tokenizer.vocab_size, model.config.get("used_vocab_size", model.config["vocab_size"]))


def _drafter(options: argparse.Namespace, model: HybridLM) -> str | HybridLM | None:
    """What --drafter names: itself, or a model in the dtype of the other."""
    if options.drafter in (None, "prompt_lookup", "mtp"):
        return options.drafter
    dtype = model.embed.weight.dtype
    return from_pretrained(options.drafter, device=model.embed.weight.device, dtype=dtype)[0]


def _progress(done: int, total: int) -> None:
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    print(f"[prompt: {done} of {total} tokens]", end=end, file=sys.stderr, flush=True)


def _traffic(cache: ReplayStateCache) -> str:
    """The window, and what it does to the bytes of state moved for a token."""
    sizes = state_bytes(cache)
    if not sizes.state:
        return f"window {cache.window}, no recurrent state"
    replay, conventional = replay_traffic(sizes, cache.window), conventional_traffic(sizes)
    return (
        f"window {cache.window}: {replay.read:,} bytes of state read and {replay.written:,} written a token, "
        f"conventionally {conventional.read:,} and {conventional.written:,}: "
        f"{conventional.moved / replay.moved:.2f}x as much"
    )


def _compare(model: HybridLM, tokenizer: Tokenizer, ids: list[int], tokens: list[int]) -> int:
    """Decode with window 0 as well and say whether the tokens are the same; the exit status.

    At a token that differs, the exact logits (fp64) of the two candidates must be as close as rounding can explain:
    each of the two runs may have moved each candidate by ``SLACK`` times the error that window 0 makes there.
    """
    margins: list[float] = []

    def record(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        best = logits[0, -1, : _emitted(model, tokenizer)].topk(2).values
        margins.append(float(best[0] - best[1]))

    with model.register_forward_hook(record):
        pieces = generate(
            model,
            [ids],
            max_new_tokens=len(tokens),
            window=0,
            vocab_size=_emitted(model, tokenizer),
            stream=True,
            cuda_graphs=False,  # the hook runs at every step
            progress=_progress,
        )
        conventional = [token for piece in pieces for token in piece[0].tolist()]
    del margins[: -len(tokens)]  # what the earlier pieces of a long prompt left
    differing = [i for i, (ours, theirs) in enumerate(zip(tokens, conventional, strict=True)) if ours != theirs]
    smallest = min(margins[: differing[0] + 1 if differing else None])
    if not differing:
        print(
            f"[compare: all {len(tokens)} tokens equal those of window 0 in float32, smallest argmax margin "
            f"{smallest:.2e} at token {margins.index(smallest)}]",
            file=sys.stderr,
        )
        return 0
    at = differing[0]
    common, vocab_size = tokens[:at], _emitted(model, tokenizer)
    rounded = _logits_after(model, ids, common)[:vocab_size].double()
    exact = _logits_after(copy.deepcopy(model).double(), ids, common)[:vocab_size]
    margin = float((exact[tokens[at]] - exact[conventional[at]]).abs())
    budget = 2 * SLACK * float((rounded - exact).abs().max())
    verdict = "explains" if margin <= budget else "does NOT explain"
    print(
        f"[compare: token {at} of {len(tokens)} differs from that of window 0 in float32, smallest argmax margin "
        f"{smallest:.2e}; rounding {verdict} it: exact margin {margin:.2e}, budget {budget:.2e}]",
        file=sys.stderr,
    )
    return 0 if margin <= budget else 1


def _logits_after(model: HybridLM, ids: list[int], tokens: list[int]) -> Tensor:
    """(vocab_size,) logits behind the prompt ``ids`` and ``tokens``, these fed one by one with window 0."""
    found: deque[Tensor] = deque(maxlen=1)
    cache = ReplayStateCache(model, 1, window=0, max_seqlen=len(ids) + len(tokens) + 1)
    with model.register_forward_hook(lambda module, inputs, logits: found.append(logits[0, -1])):
        generate(model, [ids], max_new_tokens=1, cache=cache)
        for token in tokens:
            generate(model, [[token]], max_new_tokens=1, cache=cache)
    return found[0]
