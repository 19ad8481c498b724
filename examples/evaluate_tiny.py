"""What the bundled model is measured on: the held-out modules, their bits per byte, and its behaviour far out.

    python examples/evaluate_tiny.py [--model tiny | FOLDER] [--device cuda] [--far]

The text is the standard library of the Python that runs this. A document is the bytes of one module; the stream is
every document followed by a zero byte. The model reads each document on its own, from a zero byte on, with all of the
document before a byte as that byte's context, and is charged for every byte of the stream. ``xz -9`` gets the same
stream in one piece.
"""

import argparse
import hashlib
import lzma
import math
import random

import torch
from torch import Tensor

import replayssm
from replayssm.bench.held_out import HELD_OUT, SEPARATOR, STDLIB, held_out_documents
from replayssm.models import HybridLM, from_pretrained

# Not the standard library; and generated tables and manual pages, which are not source text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload"}
LINE = 24  # characters; shorter lines are alike in all code
MOST_SHARED = 0.15  # of a training document's lines: above this it is taken for a copy of held-out text


def training_documents() -> dict[str, bytes]:
    """Module -> text of everything else, less what shares text with a held-out module."""
    secret = set().union(*(_lines(text) for text in held_out_documents().values()))
    documents = {}
    for path in sorted(STDLIB.rglob("*.py")):
        name = path.relative_to(STDLIB).with_suffix("").as_posix()
        if name in HELD_OUT or SKIPPED_FOLDERS.intersection(name.split("/")):
            continue
        text = path.read_bytes()
        lines = _lines(text)
        if lines and len(lines & secret) <= MOST_SHARED * len(lines) and SEPARATOR not in text:
            documents[name] = text
    return documents


def join(documents: list[bytes]) -> bytes:
    """The stream: every document followed by the separator."""
    return b"".join(text + SEPARATOR for text in documents)


def xz_bits_per_byte(stream: bytes) -> float:
    """What ``xz -9`` needs: the size of the .xz file that Python's lzma writes with preset 9."""
    return 8 * len(lzma.compress(stream, preset=9)) / len(stream)


def tensor_of(text: bytes) -> Tensor:
    """(len(text),) uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@torch.no_grad()
def bits(model: HybridLM, ids: Tensor, piece: int = 1024) -> Tensor:
    """Bits that each id after the first costs, given all ids before it.

    Args:
        ids: (batch, t) integers, t >= 2.
        piece: tokens a call: a long sequence goes through a cache in pieces, so that memory does not grow with it.

    Returns:
        (batch, t - 1), fp32.
    """
    device = model.embed.weight.device
    ids = ids.to(device).long()
    batch, t = ids.shape
    cache = replayssm.ReplayStateCache(model, batch, window=0, max_seqlen=t - 1, device=device)
    costs = []
    for first in range(0, t - 1, piece):
        last = min(first + piece, t - 1)
        logits = model(ids[:, first:last], cache)
        cache.commit()
        log_probability = logits.float().log_softmax(-1).gather(-1, ids[:, first + 1 : last + 1, None])
        costs.append(log_probability.squeeze(-1) / -math.log(2))
    return torch.cat(costs, 1)


def bits_per_byte(model: HybridLM, documents: list[bytes], batch: int = 1) -> float:
    """Mean cost of a byte of ``join(documents)``, each document read on its own.

    Args:
        batch: documents at once. They are filled up to the longest, and what the filling costs is not counted.
    """
    total = 0.0
    ordered = sorted(documents, key=len)
    for first in range(0, len(ordered), batch):
        some = [tensor_of(SEPARATOR + text + SEPARATOR) for text in ordered[first : first + batch]]
        costs = bits(model, torch.nn.utils.rnn.pad_sequence(some, batch_first=True))
        total += sum(row[: len(ids) - 1].double().sum().item() for row, ids in zip(costs, some, strict=True))
    return total / len(join(documents))


def far_and_near(
    model: HybridLM, documents: list[bytes], *, before: int = 65536, passage: int = 1024, orders: int = 3
) -> tuple[float, list[float]]:
    """Bits per byte of the same passages early in a text and far behind other text.

    A passage is taken with as much text before it as it is long. Near, that is all there is: the passage lies at
    positions ``passage`` to 2 ``passage``. Far, ``before`` bytes of other documents come first and the passages follow
    one another, as many as fill ``before`` again: with the defaults 32 of them, at positions 64K to 128K.

    Returns:
        Near, and far for each order of the other documents and of the passages.
    """
    cuts, others = [], []
    for index, text in enumerate(documents):
        if index % 2 or len(text) < 8 * passage:
            others.append(text)
        else:
            starts = range(passage, len(text) - 2 * passage, 3 * passage)
            cuts += [SEPARATOR + text[start : start + 2 * passage - 1] for start in starts]
    random.Random(0).shuffle(cuts)
    cuts = cuts[: before // (2 * passage)]
    sequences = []
    for order in range(orders):
        shuffled = random.Random(order)
        prefix = SEPARATOR + join(shuffled.sample(others, len(others)))
        sequences.append(tensor_of(prefix[:before] + b"".join(shuffled.sample(cuts, len(cuts)))))
    near = bits(model, torch.stack([tensor_of(cut) for cut in cuts]))  # the cost of id i stands at i - 1
    far = bits(model, torch.stack(sequences))[:, before - 1 :].unflatten(1, (len(cuts), 2 * passage))
    return near[:, passage - 1 :].mean().item(), far[:, :, passage:].mean((1, 2)).tolist()


def _lines(text: bytes) -> set[bytes]:
    return {line for line in map(bytes.strip, text.splitlines()) if len(line) >= LINE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a folder (default: tiny)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--far", action="store_true", help="also compare positions 1K to 2K with 64K to 128K")
    args = parser.parse_args()
    model, _ = from_pretrained(args.model, device=args.device)
    documents = list(held_out_documents().values())
    stream = join(documents)
    print(f"held-out stream    {len(stream)} bytes, sha256 {hashlib.sha256(stream).hexdigest()}")
    print(f"xz -9              {xz_bits_per_byte(stream):.4f} bits per byte")
    batch = 1 if args.device == "cpu" else len(documents)  # a GPU has room for all, and wants few calls
    print(f"model              {bits_per_byte(model, documents, batch):.4f} bits per byte")
    if args.far:
        near, far = far_and_near(model, documents)
        print(f"positions 1K-2K    {near:.4f}")
        print(f"positions 64K-128K {', '.join(f'{x:.4f}' for x in far)} (three orders of the text before)")


if __name__ == "__main__":
    main()
