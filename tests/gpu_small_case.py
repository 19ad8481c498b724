"""Every kernel on small odd sizes, for a memory checker: compute-sanitizer python tests/gpu_small_case.py"""

import torch
from draws import DEVICE, draw
from gpu_cases import ODD, Sequences

from replayssm.ops.triton_states import chunk_states


def main() -> None:
    """Decode over two flushes, by one and by two tokens, with a row that is off and one that is short."""
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
    k, v = draw(1, 2, 70, 1, 24, dtype=torch.bfloat16), draw(2, 2, 3, 40, 70, dtype=torch.bfloat16).movedim(3, 1)
    beta, total = (draw(seed, 2, 70, 3, dtype=torch.float32).sigmoid() for seed in (3, 4))
    for tensor in chunk_states(k, v, beta, -total, None, 64):
        assert torch.isfinite(tensor).all()


if __name__ == "__main__":
    main()
