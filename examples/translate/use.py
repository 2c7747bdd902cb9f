"""Translate lines with transformers alone: `python use.py runs/output/model "3 May 1998" "July 14, 1989"`."""

from __future__ import annotations

import sys

import torch
from pairs import decode, encode
from transformers import T5ForConditionalGeneration


def main() -> None:
    folder, *lines = sys.argv[1:]
    model = T5ForConditionalGeneration.from_pretrained(folder).eval()
    sources = torch.stack([encode(line, 1 + max(len(each.encode()) for each in lines)) for line in lines])
    found = model.generate(sources, attention_mask=(sources != 0).long(), max_new_tokens=20, do_sample=False)
    for line, numbers in zip(lines, found, strict=True):
        print(f"{line} -> {decode(numbers)}")


if __name__ == "__main__":
    main()
