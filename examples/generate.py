"""Generate from a trained model with plain transformers: no asyncrl, no vLLM, no Megatron.

python examples/generate.py runs/<your run>/model "c3141>"
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    """Print the greedy answer to each prompt."""
    folder, *prompts = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        written = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=8, do_sample=False
        )
        answer = written[0, inputs.input_ids.shape[1] :]
        print(f"{prompt} -> {tokenizer.decode(answer, skip_special_tokens=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
