"""Split what goes into a model into microbatches, and join what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor has a row for each sample; others go to each microbatch whole."""
    return tensor.dim() > 0 and tensor.shape[0] > 1


def split(inputs: Any, count: int) -> list[Any]:
    """Return pieces of all tensors along dimension 0, which must have one number of rows; at most one piece a row."""
    batched = [tensor for tensor in tensors_in(inputs) if is_batched(tensor)]
    if count == 1 or not batched:
        return [inputs]
    rows = batched[0].shape[0]
    if (other := next((tensor for tensor in batched if tensor.shape[0] != rows), None)) is not None:
        raise UsageError(
            "microbatches need inputs of one batch size in dimension 0, but there are tensors of"
            f" {tuple(batched[0].shape)} and {tuple(other.shape)}"
        )
    # Slices, not `tensor_split`: a layer may change one of them in place.
    sizes = [len(part) for part in torch.arange(rows, device="cpu").tensor_split(min(count, rows))]

    def piece(start: int, end: int) -> Any:
        return map_tensors(lambda tensor: tensor[start:end] if is_batched(tensor) else tensor, inputs)

    return [piece(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def join(results: Sequence[Any], pieces: Sequence[Any]) -> Any:
    """Return the results for all pieces as one, in the structure of the first; what all hand on is returned once."""
    if len(results) == 1:
        return results[0]
    most = max(tensor.shape[0] for piece in pieces for tensor in tensors_in(piece) if tensor.dim())
    columns: Iterator[tuple[Tensor, ...]] = iter(zip(*map(tensors_in, results), strict=True))

    def joined(_: Tensor) -> Tensor:
        parts = next(columns)
        if all(part is parts[0] for part in parts):
            return parts[0]
        if not parts[0].dim():
            raise UsageError(
                "the last layer returned a tensor without dimensions, which cannot be joined over microbatches",
                hint="compute losses outside of the OffloadModel, or give num_microbatches=1",
            )
        if parts[0].shape[0] == 1 < most:
            raise UsageError(
                f"the last layer returned a tensor of shape {tuple(parts[0].shape)} for each of {len(parts)}"
                f" microbatches with up to {most} rows, which cannot be joined",
                hint="return a row for each sample, or give num_microbatches=1",
            )
        return torch.cat(parts)

    return map_tensors(joined, results[0])
