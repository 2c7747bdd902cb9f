"""Split a batch into microbatches and join their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smpkit.errors import UsageError

__all__ = ["JoinSpec", "join", "join_gradients", "split"]


def split(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split tensors along dimension 0 into `count` parts of nearly equal size, fewer if there are fewer rows.

    Tensors without dimensions and those with one row (masks, positions) go to every part whole.

    Raises:
        UsageError: tensors with different numbers of rows.
    """
    if count == 1:
        return [list(tensors)]
    rows = {tensor.shape[0]: tensor for tensor in tensors if tensor.dim() > 0 and tensor.shape[0] != 1}
    if len(rows) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in list(rows.values())[:2])
        raise UsageError(
            f"{count} microbatches need inputs of one batch size in dimension 0, but there are tensors of {shapes}",
            hint="make what has no batch dimension a buffer, or give it a first dimension of 1",
        )
    size = next(iter(rows), 1)
    parts = max(1, min(count, size))
    columns: list[Sequence[Tensor]] = []
    for tensor in tensors:
        if tensor.dim() > 0 and tensor.shape[0] == size > 1:
            columns.append(tensor.tensor_split(parts))
        else:
            columns.append([tensor] * parts)
    return [[column[part] for column in columns] for part in range(parts)]


@dataclass(frozen=True)
class JoinSpec:
    """How a tensor was joined from those of microbatches, to split its gradient the same way.

    Must not hold the tensor: the tensor's graph holds this object, and a cycle is freed only by the garbage collector.
    """

    rows: tuple[int, ...] | None
    """Of each part; None: every microbatch returned the same tensor, which is used once."""
    parts: int

    def split(self, gradient: Tensor | None) -> list[Tensor | None]:
        """Return the gradient of each part."""
        if gradient is None:
            return [None] * self.parts
        if self.rows is None:
            return [gradient, *[None] * (self.parts - 1)]
        return list(torch.split(gradient, list(self.rows)))


def join(
    parts: Sequence[Sequence[Tensor]], shared: Sequence[Sequence[int | None]], batch: Sequence[int]
) -> list[tuple[Tensor, JoinSpec]]:
    """Join the output tensors of microbatches along dimension 0.

    Args:
        parts: by microbatch.
        shared: for each of them, the index of the input that it is, if every microbatch got that input whole; such a
            tensor is returned once.
        batch: rows of each microbatch.

    Raises:
        UsageError: a tensor without dimensions, for example a loss, or one row for a microbatch of several.
    """
    return [_join(*each, batch) for each in zip(zip(*parts, strict=True), zip(*shared, strict=True), strict=True)]


def _join(parts: Sequence[Tensor], shared: Sequence[int | None], batch: Sequence[int]) -> tuple[Tensor, JoinSpec]:
    first, count = parts[0], len(parts)
    if count == 1 or (shared[0] is not None and len(set(shared)) == 1):
        return first, JoinSpec(None, count)
    if first.dim() == 0:
        raise UsageError(
            f"the model returns a tensor without dimensions, which cannot be joined from {count} microbatches",
            hint="return values per sample and reduce them outside, or use num_microbatches=1",
        )
    if all(part.shape[0] == 1 for part in parts) and max(batch) > 1:
        if not all(torch.equal(first, part) for part in parts[1:]):
            raise UsageError(
                f"the model returns a tensor of shape {tuple(first.shape)} for each of {count} microbatches with up to"
                f" {max(batch)} rows: one row that depends on all of a batch cannot be joined",
                hint="return values per sample and reduce them outside, or use num_microbatches=1",
            )
        return first, JoinSpec(None, count)  # equal, so computed only from inputs that every microbatch got whole
    return torch.cat(list(parts)), JoinSpec(tuple(part.shape[0] for part in parts), count)


def join_gradients(whole: Tensor, parts: Sequence[Tensor | None], rows: Sequence[int | None]) -> Tensor | None:
    """Return the gradient of an input from those of its parts; the reverse of `split`.

    Args:
        whole: the input.
        parts: gradients by microbatch; None: no gradient.
        rows: of each part; None where the microbatch got the whole input.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if all(count is None for count in rows):
        return present[0] if len(present) == 1 else torch.stack(present).sum(0)
    filled = list[Tensor]()
    for part, count in zip(parts, rows, strict=True):
        filled.append((torch.zeros_like(whole[:count]) if part is None else part).to(whole.device))
    return torch.cat(filled)
