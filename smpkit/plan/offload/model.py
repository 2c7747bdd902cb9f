"""How long a step of an OffloadModel takes, and what it holds on the device and on the host, before it is built.

Weights come to the device slice by slice, in the forward and again in the backward; the last two slices stay between
the two. Gradients leave once, in fp32. The inputs of slices leave in the forward and come back. A slice is loaded while
the one before computes, so each phase takes as long as the slowest of compute and copies, and what nothing can hide
comes on top. With equal slices and one microbatch that is exact if compute and copies do not slow each other; several
microbatches over a link that cannot keep up take somewhat longer.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.optimizers import OPTIMIZERS

_BLOCK_PARAMETERS: Final = 12.25
"""A dense transformer block of width d has 12.25 d² parameters."""
_SAVED_UNITS: Final = 25.04
"""What a dense block keeps for its backward, in tokens * width * bytes of a number (counted on such a block)."""
_MASTER_BYTES: Final = 4
"""The size of a parameter on the host, and of its gradient there."""
_LARGEST: Final = 4 / _BLOCK_PARAMETERS
"""The part of a dense block that its largest parameter is."""

WORKSPACE_BYTES: Final = 2 * (32 << 20)
"""What cuBLAS takes of the memory of a Hopper GPU for itself, through torch's allocator: as much for the thread of
forward as for autograd's. Earlier GPUs have 8 MiB each."""


class Update(StrEnum):
    """When the optimizer updates a slice."""

    OVERLAPPED = "overlapped"
    """As soon as its gradient is on the host, while other slices' backward runs; nothing waits for the whole."""
    JUST_IN_TIME = "just-in-time"
    """Just before its next forward, so that exact gradient clipping, which needs all gradients, can be overlapped."""
    SERIAL = "serial"
    """After the backward, while everything else waits."""


@dataclass(frozen=True)
class Machine:
    """What the device, its link and its host do in a second; measure yours."""

    flops_per_second: float = 430e12
    """Reached in training, not the maker's."""
    in_bytes_per_second: float = 50e9
    """Host to device."""
    out_bytes_per_second: float = 50e9
    updated_parameters_per_second: float = 4.3e9
    """By the optimizer on the host, all its cores together."""

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if rate <= 0:
                raise UsageError(f"`{name}` is {rate:g}", hint="give what was measured, more than 0")


@dataclass(frozen=True)
class OffloadedModel:
    """A model in slices, and one optimizer step of it."""

    num_parameters: float
    num_slices: int
    num_tokens: int
    """In one optimizer step, all microbatches together."""
    num_microbatches: int = 1
    num_layers: int | None = None
    """None: one per slice."""
    width: int | None = None
    """Numbers per token at a slice's border; None: that of dense blocks with so many parameters."""
    optimizer: str = "adamw"
    """One of `smpkit.plan.optimizers.OPTIMIZERS`."""
    number_bytes: int = 2
    """The size of a weight, a gradient and an activation on the device: 2 for bf16, 4 for fp32."""
    imbalance: float = 1.0
    """The largest slice's parameters over the mean."""

    def __post_init__(self) -> None:
        for name in ("num_parameters", "num_slices", "num_tokens", "num_microbatches", "num_layers", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` is {value:g}", hint="use 1 or more")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"`{self.optimizer}` is no optimizer known here", hint=f"use {', '.join(OPTIMIZERS)}")
        if self.number_bytes not in (2, 4):
            raise UsageError(f"numbers of {self.number_bytes} bytes", hint="use 2 (bf16) or 4 (fp32)")
        if self.num_layers is not None and self.num_layers < self.num_slices:
            raise UsageError(
                f"{self.num_layers} layers cannot be cut into {self.num_slices} slices", hint="use fewer slices"
            )

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.num_layers or self.num_slices

    @property
    def border_bytes(self) -> float:
        """The size of the activations of all tokens of a step at one slice's border."""
        width = self.width or sqrt(self.num_parameters / (_BLOCK_PARAMETERS * self.layers))
        return self.num_tokens * width * self.number_bytes

    @property
    def weights_bytes(self) -> float:
        """All weights as the device gets them; the gradients are as large there."""
        return self.num_parameters * self.number_bytes

    @property
    def gradients_bytes(self) -> float:
        """All gradients as the host gets them."""
        return self.num_parameters * _MASTER_BYTES


@dataclass(frozen=True)
class StepTime:
    """The parts of one optimizer step, and how long it takes with them overlapped."""

    forward_seconds: float
    backward_seconds: float
    """With the recomputation."""
    in_seconds: float
    out_seconds: float
    update_seconds: float
    total_seconds: float
    bound: str
    """What it spends most of its time on: `compute`, `link` or `optimizer`."""
    useful_flops_per_second: float
    """Without the recomputation, as published figures count: 6 per parameter and token."""


def step_time(model: OffloadedModel, machine: Machine, update: Update = Update.OVERLAPPED) -> StepTime:
    """Return the time of a step, each phase of it bounded by its slowest part."""
    forward, backward, slices = _forward(model, machine), _backward(model, machine), model.num_slices
    updating = model.num_parameters / machine.updated_parameters_per_second
    first_load = model.weights_bytes / slices / machine.in_bytes_per_second
    last_gradient = model.gradients_bytes / slices / machine.out_bytes_per_second
    tail = updating / slices + first_load + last_gradient  # nothing hides them, nor the update of the last slice
    if update is Update.OVERLAPPED:
        total = max(forward.seconds + backward.seconds, updating) + tail
    elif update is Update.JUST_IN_TIME:
        total = backward.seconds + max(forward.seconds, updating) + tail
    else:
        total = forward.seconds + backward.seconds + updating * (1 - 1 / slices) + tail
    link = max(forward.into, forward.out) + max(backward.into, backward.out)
    causes = {"compute": forward.compute + backward.compute, "link": link, "optimizer": updating}
    return StepTime(
        forward_seconds=forward.compute,
        backward_seconds=backward.compute,
        in_seconds=forward.into + backward.into + first_load,
        out_seconds=forward.out + backward.out + last_gradient,
        update_seconds=updating,
        total_seconds=total,
        bound=max(causes, key=lambda cause: causes[cause]),
        useful_flops_per_second=6 * model.num_parameters * model.num_tokens / total,
    )


@dataclass(frozen=True)
class _Phase:
    """What a forward or a backward needs of each part of the machine, in seconds, without copies that nothing hides."""

    compute: float
    into: float
    out: float
    alone: float
    """The part of compute that hides no load, because the buffers are full."""
    lead: float
    """Compute before the first copy out."""

    @property
    def seconds(self) -> float:
        return max(self.compute, self.alone + self.into, self.lead + self.out)


def _forward(model: OffloadedModel, machine: Machine) -> _Phase:
    """Load each slice but the first while the one before computes; inputs of slices leave."""
    slices = model.num_slices
    compute = 2 * model.num_parameters * model.num_tokens / machine.flops_per_second
    into = model.weights_bytes * (1 - 1 / slices) / machine.in_bytes_per_second
    out = model.border_bytes * (slices - 1) / machine.out_bytes_per_second
    return _Phase(compute, into, out, alone=compute / slices, lead=compute / slices)


def _backward(model: OffloadedModel, machine: Machine) -> _Phase:
    """Begin with the two slices that are there, and with the inputs of the last two calls."""
    slices = model.num_slices
    compute = 6 * model.num_parameters * model.num_tokens / machine.flops_per_second
    there = min(2, slices)
    borders = model.border_bytes * max(0, slices - 1 - there / model.num_microbatches)
    into = (model.weights_bytes * (1 - there / slices) + borders) / machine.in_bytes_per_second
    out = model.gradients_bytes * (1 - 1 / slices) / machine.out_bytes_per_second
    return _Phase(compute, into, out, alone=compute * there / slices, lead=compute / slices)


def device_peak_bytes(model: OffloadedModel, in_slice_bytes: float | None = None) -> float:
    """Return what the device holds at most: weights and gradients of two slices, a microbatch in one slice, borders.

    All microbatches have their gradients at a border at once, and one input is loaded ahead. Where the gradient of a
    parameter from a second microbatch is added to the first one's, it is there three times. A model of one slice has
    one slice's weights and gradients. On a GPU `WORKSPACE_BYTES` come on top, and what you hold: the model's input and
    output, and the output's gradient.

    Args:
        in_slice_bytes: what one microbatch needs in one slice, with its input and output; None: that of dense blocks.
    """
    slices_bytes = min(2, model.num_slices) * model.imbalance * model.weights_bytes / model.num_slices
    border = model.border_bytes / model.num_microbatches
    if in_slice_bytes is None:
        in_slice_bytes = _SAVED_UNITS * border * model.layers / model.num_slices
    num_borders = 0 if model.num_slices == 1 else model.num_microbatches + 1
    added = 0.0 if model.num_microbatches == 1 else 2 * _LARGEST * model.weights_bytes / model.layers
    return 2 * slices_bytes + added + in_slice_bytes + num_borders * border


def host_peak_bytes(model: OffloadedModel, update: Update = Update.OVERLAPPED) -> float:
    """Return what the host holds at most: weights as they travel, fp32 gradients that wait, states, inputs of slices.

    Weights of 4 bytes are the master weights themselves. Overlapped, two slices' gradients wait; otherwise all.
    """
    working = model.weights_bytes if model.number_bytes < _MASTER_BYTES else 0.0
    waiting = min(1.0, 2 * model.imbalance / model.num_slices) if update is Update.OVERLAPPED else 1.0
    masters_and_states = model.num_parameters * _MASTER_BYTES * (1 + OPTIMIZERS[model.optimizer])
    return working + waiting * model.gradients_bytes + masters_and_states + model.num_slices * model.border_bytes


def largest_parameters(
    model: OffloadedModel, host_bytes: float, reserve_bytes: float = 8 * 1024**3, update: Update = Update.OVERLAPPED
) -> int:
    """Return how many parameters such a model can have so that its host peak fits.

    Args:
        model: everything but the number of parameters is taken from it; without a `width`, that grows along.
        reserve_bytes: left for the system, the process and the framework.
    """
    room = host_bytes - reserve_bytes

    def peak(count: int) -> float:
        return host_peak_bytes(replace(model, num_parameters=count), update)

    largest = bisect_right(range(1, int(room)), room, key=peak)
    if not largest:
        whole, reserve = host_bytes / 1024**3, reserve_bytes / 1024**3
        raise UsageError(
            f"{whole:g} GiB of host memory, of which {reserve:g} GiB are left free,"
            f" hold no model with {model.num_tokens} tokens per step",
            hint="use fewer tokens, or a host with more memory",
        )
    return largest
