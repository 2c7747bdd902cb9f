"""Gradients of one slice that wait for an optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smpkit.torch.offload.link import Event, Link
from smpkit.torch.offload_model.gradients import GradientCopy

if TYPE_CHECKING:
    from smpkit.torch.offload_model.states import SliceState

__all__ = ["AccumulatedGradients", "GradientAccumulator"]


@dataclass(frozen=True)
class AccumulatedGradients:
    """What a step takes: flat gradients by parameter, as in `GradientCopy`, readable after `wait`."""

    flat: dict[nn.Parameter, Tensor]
    events: tuple[Event, ...]
    link: Link

    def wait(self) -> None:
        """Block until all have arrived."""
        for event in self.events:
            self.link.synchronize(event, "the gradients of a slice")


class GradientAccumulator:
    """Adds up the gradients of one slice over backwards.

    Args:
        state: of the slice.
        link: on which they arrive.
    """

    def __init__(self, state: SliceState, link: Link) -> None:
        self._state = state
        self._link = link
        self._sum: dict[nn.Parameter, Tensor] = {}
        self._latest: GradientCopy | None = None
        self._tied: list[tuple[nn.Parameter, Tensor, Event]] = []

    def add(self, gradient_copy: GradientCopy) -> None:
        """Add the gradients of another backward."""
        self._accumulate()
        self._latest = gradient_copy

    def add_tied(self, gradient_copy: GradientCopy, parameter: nn.Parameter) -> None:
        """Add the gradient that another slice has for a parameter of this one."""
        gradient = gradient_copy.flat.get(parameter)
        if gradient is not None:
            self._tied.append((parameter, gradient, gradient_copy.event))

    def take(self) -> AccumulatedGradients | None:
        """Return what has been added since the last time, if anything."""
        if self._latest is not None and not self._sum and not self._tied:
            gradient_copy, self._latest = self._latest, None
            return AccumulatedGradients(gradient_copy.flat, (gradient_copy.event,), self._link)
        self._accumulate()
        flat, self._sum = self._sum, {}
        return AccumulatedGradients(flat, (), self._link) if flat else None

    def norm(self) -> Tensor:
        """Return the norm of what has been added, on the device where it was computed there."""
        latest, simple = self._latest, not self._sum and not self._tied
        # The device's norm is of all that the slice has gradients for; tied weights of earlier slices are not its own.
        if simple and latest is not None and latest.norm is not None and self._state.owns_all(latest.flat):
            return latest.norm
        self._accumulate()
        owned = [gradient for parameter, gradient in self._sum.items() if self._state.owns(parameter)]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in owned]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([torch.zeros((), dtype=torch.float64, device="cpu"), *norms])
        )
        return total

    def clear(self) -> None:
        """Forget everything."""
        self._sum, self._latest, self._tied = {}, None, []

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Add what has arrived to the sum, in fp32 and in memory of its own: the copy's buffer is used again."""
        added: list[tuple[nn.Parameter, Tensor]] = []
        if self._latest is not None:
            self._link.synchronize(self._latest.event, "the gradients of a slice")
            added += self._latest.flat.items()
        for parameter, gradient, event in self._tied:
            self._link.synchronize(event, "the gradients of a tied weight")
            added.append((parameter, gradient))
        self._latest, self._tied = None, []
        for parameter, gradient in added:
            known = self._sum.get(parameter)
            if known is None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sum[parameter] = gradient.to(wide, copy=True)
            else:
                known.add_(gradient)
