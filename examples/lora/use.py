"""Load base and adapter with peft alone, merge them, and test: `python use.py runs/base runs/output/model`."""

from __future__ import annotations

import sys

import peft
import torch
from numbers_task import DIGITS, MARK, accuracy, draw
from transformers import AutoModelForCausalLM


def main() -> None:
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    model = peft.PeftModel.from_pretrained(base, sys.argv[2]).merge_and_unload()
    tokens, labels = draw(256, torch.Generator().manual_seed(99), downwards=True)
    with torch.no_grad():
        print(f"downwards {accuracy(model(input_ids=tokens).logits, labels):.1%} of digits right")
    question = torch.tensor([[3, 1, 4, 1, 5, 9, MARK]])
    written = model.generate(question, max_new_tokens=DIGITS, do_sample=False, eos_token_id=None)
    print(f"3 1 4 1 5 9 -> {' '.join(map(str, written[0, DIGITS + 1 :].tolist()))}")


if __name__ == "__main__":
    main()
