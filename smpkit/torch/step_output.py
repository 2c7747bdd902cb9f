"""What a step returns: the values of all microbatches, in the containers the user returned them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smpkit.torch.containers import children, rebuild

__all__ = ["StepOutput", "collate"]


class StepOutput:
    """One returned tensor over all microbatches (the class of the same name in SMP v1).

    `outputs` is the list of tensors in microbatch order.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def __repr__(self) -> str:
        shapes = {tuple(output.shape) for output in self.outputs}
        return f"StepOutput({len(self.outputs)} microbatches, shape {' or '.join(map(str, sorted(shapes)))})"

    def detach(self) -> StepOutput:
        """Return the same values cut off their graph, as `torch.Tensor.detach` does."""
        return StepOutput([output.detach() for output in self.outputs])

    def reduce_mean(self) -> torch.Tensor:
        """Average over microbatches; all outputs must have one shape, which is also the result's."""
        stacked = torch.stack(self.outputs)
        if not (stacked.is_floating_point() or stacked.is_complex()):
            stacked = stacked.to(torch.get_default_dtype())  # counts of correct answers are averaged too
        return stacked.mean(0)

    def reduce_sum(self) -> torch.Tensor:
        """Add over microbatches; all outputs must have one shape, which is also the result's."""
        return torch.stack(self.outputs).sum(0)

    def concat(self) -> torch.Tensor:
        """Join along axis 0, as the whole batch would have given it; scalars become a vector over microbatches."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Put the microbatches on a new axis 0: `[microbatches, ...]`."""
        return torch.stack(self.outputs)


def collate(values: Sequence[Any]) -> Any:
    """Turn what the microbatches returned into one value of the same structure.

    A tensor becomes a StepOutput and containers keep their type; anything else, `None` included, becomes a plain list
    over microbatches, and so does a container whose keys or length differ from one microbatch to the next.
    """
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return StepOutput(values)
    # The order of a set is not the order of the values, so the third member here is not the third member there.
    if isinstance(first, set | frozenset) or any(type(value) is not type(first) for value in values):
        return list(values)
    parts = [children(value) for value in values]
    keys = None if parts[0] is None else list(parts[0])
    if keys is None or any(part is None or list(part) != keys for part in parts):
        return list(values)
    return rebuild(first, {key: collate([part[key] for part in parts if part is not None]) for key in keys})
