"""Text that every machine has: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library(limit_bytes: int) -> Tensor:
    """Return the first `limit_bytes` of the standard library's sources as bytes, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).clone()


class Batches:
    """Random windows of a text, different on each rank and the same at each start.

    A batch depends on the seed and the step only, so a resumed run sees what the first one would have seen.
    """

    def __init__(self, text: Tensor, batch: int, context: int, seed: int) -> None:
        self.text, self.batch, self.context, self.seed = text, batch, context, seed

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets (the inputs moved by one) of a step, each `[batch, context]`."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=generator)
        windows = torch.stack([self.text[start : start + self.context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]
