"""Every kernel on small odd sizes, for a memory checker: compute-sanitizer python tests/gpu_small_case.py"""

import torch
from draws import DEVICE, draw
from format_caches import KINDS
from gpu_cases import ODD, Sequences

from replayssm import ReplayStateCache
from replayssm.ops.triton_states import chunk_states

# every checkpoint and every read format once
FORMATS = {
    "mamba2": (("fp16_sr", "nvfp4"), ("int8_sr", "fp8"), ("bf16_sr", None)),
    "gated_deltanet": (("fp32", "lr_if4"), ("int16_sr", None), ("fp8_sr", "bf16")),
    "kda": (("nvfp4_sr", "int8"), ("fp16_sr", None)),
}


def main() -> None:
    """Steps of states as they are and of states in formats, and the states of a prompt."""
    decode()
    decode_in_formats()
    prefill()


def decode() -> None:
    """Over two flushes, by one and by two tokens, with a row that is off and one that is short."""
    for case in ODD:
        for step_tokens in (1, 2):
            rows = Sequences(case, 3, window=3, step_tokens=step_tokens, dtype=torch.bfloat16)
            q, records = rows.draw(8)
            y = rows.decode(q, records)
            some = torch.tensor([2, -1, 0], device=DEVICE)
            length = torch.tensor([step_tokens, step_tokens, 1], device=DEVICE)
            q, records = rows.draw(step_tokens, seed=2)
            last = rows.step(q, records, rows=some, length=length)
            assert torch.isfinite(y).all()
            assert torch.isfinite(last[0]).all()
            assert torch.isfinite(last[2, 0]).all()
            assert torch.isfinite(rows.checkpoint).all()


def decode_in_formats() -> None:
    """Likewise."""
    for kind, pairs in FORMATS.items():
        layer = KINDS[kind]()
        for checkpoint, read_format in pairs:
            for step_tokens in (1, 2):
                cache = ReplayStateCache(
                    [layer], 3, window=2, step_tokens=step_tokens, checkpoint=checkpoint, read_format=read_format,
                    backend="triton",
                )  # fmt: skip
                with torch.no_grad():
                    for number in range(5):
                        rows = torch.tensor([2, -1, 0], device=DEVICE) if number == 3 else None
                        x = draw(number, 3, step_tokens, layer.features, dtype=torch.float32)
                        y = layer(x, cache[0], rows=rows)
                        assert torch.isfinite(y if rows is None else y[[0, 2]]).all()
                        cache.commit()
                cache.flush()
                assert torch.isfinite(cache[0].checkpoint).all()


def prefill() -> None:
    k, v = draw(1, 2, 70, 1, 24, dtype=torch.bfloat16), draw(2, 2, 3, 40, 70, dtype=torch.bfloat16).movedim(3, 1)
    beta, total = (draw(seed, 2, 70, 3, dtype=torch.float32).sigmoid() for seed in (3, 4))
    for tensor in chunk_states(k, v, beta, -total, None, 64):
        assert torch.isfinite(tensor).all()


if __name__ == "__main__":
    main()
