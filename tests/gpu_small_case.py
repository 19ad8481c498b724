"""Every kernel on small odd sizes, for a memory checker: compute-sanitizer python tests/gpu_small_case.py"""

import torch
from draws import DEVICE
from gpu_cases import ODD, Sequences


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


if __name__ == "__main__":
    main()
