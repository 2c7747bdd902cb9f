"""Texts as a fine-tuning job reads them: files of a folder, tokenized, in blocks of one length."""

import random
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase


class Blocks(Dataset[Tensor]):
    """Blocks `[context]` of token numbers; files follow each other, parted by the tokenizer's end of text."""

    def __init__(self, files: list[Path], tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        texts = [path.read_text(encoding="utf-8") + tokenizer.eos_token for path in files]
        numbers = [number for tokens in tokenizer(texts)["input_ids"] for number in tokens]
        whole = len(numbers) // context * context
        self.blocks = torch.tensor(numbers[:whole]).view(-1, context)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        return self.blocks[index]


def split(folder: Path, most: int) -> tuple[list[Path], list[Path]]:
    """Return up to `most` of a folder's Python files, and a tenth of them, at least one, that training never sees."""
    files = sorted(folder.glob("*.py"))
    random.Random(0).shuffle(files)
    held_out = max(1, min(most, len(files)) // 10)
    return files[held_out:most], files[:held_out]
