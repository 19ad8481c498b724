"""A transformers script as it is, but for three lines: its model decodes by replay, and verifies drafts.

python examples/hf_generate.py Qwen/Qwen3.5-4B "The capital of France is"
"""

import argparse
from collections.abc import Sequence

from transformers import AutoModelForCausalLM, AutoTokenizer

from replayssm import hf  # one


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder of a causal language model")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    print(hf.patch(model))  # two: the report says what replays and what does not
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    output = model.generate(
        **inputs,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
        prompt_lookup_num_tokens=8,  # three: transformers refuses this to a recurrent model that is not patched
    )
    print(tokenizer.decode(output[0]))


if __name__ == "__main__":
    main()
