"""The gradients of slices: how they get to the host, and how they wait there for an optimizer's step.

A slice's gradients are summed over microbatches in a flat buffer on the device and sent to the host once
(`BufferedGradients`). Where the device is the host, autograd's own gradients are used (`InPlaceGradients`). Either way
a `GradientCopy` per slice and backward goes to the parameters' `.grad` or to an OffloadOptimizer, which adds them up
over backwards (`GradientAccumulator`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from smpkit.torch.core import devices
from smpkit.torch.offload.link import DONE, Event, Link
from smpkit.torch.offload_model.counted_link import HostBuffers, Transfers, flat_bytes
from smpkit.torch.offload_model.weights import Layout, SliceWeights

if TYPE_CHECKING:
    from smpkit.torch.offload_model.optimizer_state import SliceState

__all__ = ["AccumulatedGradients", "BufferedGradients", "GradientAccumulator", "GradientCopy", "InPlaceGradients"]


@dataclass
class GradientCopy:
    """The gradients of one slice on their way to the host."""

    index: int
    flat: dict[nn.Parameter, Tensor]
    """By parameter, in the order of the layout, with its padding if there is any; readable after `event`. Parameters
    without a gradient are left out, as torch's optimizers skip them."""
    event: Event
    sparse: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Gradients of looked-up weights in their own shape and layout; only where `keeps_sparse` is set."""
    norm: Tensor | None = None
    """Norm of all of them, computed on the device, where that is fastest; None unless requested."""


class BufferedGradients:
    """Collects the gradients of slices.

    Args:
        slices: the weights of all slices.
        device: where they run.
        transfers: for the copies to the host.
        memory: what they go to there.
    """

    def __init__(
        self, slices: Sequence[SliceWeights], device: torch.device, transfers: Transfers, memory: HostBuffers
    ) -> None:
        self.wants_norm = False
        """Whether an optimizer clips by the norm."""
        self.keeps_sparse = False
        """Whether sparse gradients stay sparse; may change between backwards."""
        self._slices = slices
        self._device = device
        self._transfers = transfers
        self._memory = memory
        self._buffers: list[Tensor] = []
        self._copies_to_host: list[Event] = [DONE, DONE]
        self._layouts: dict[int, Layout] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._versions: list[int] = []
        self._host_buffers: list[Tensor] = []

    def reserve(self) -> None:
        """Allocate host memory for the gradients of all slices: pinning it during a backward would slow that down."""
        if not self._host_buffers and _can_count():
            sizes = [self._trained_layout(index).num_bytes for index in range(len(self._slices))]
            self._host_buffers = [self._memory.zeros(num_bytes) for num_bytes in sizes if num_bytes]

    def prepare(self) -> None:
        """Prepare a backward: lay out the parameters that are trained now, and resize the buffers if necessary."""
        layouts = [self._trained_layout(index) for index in range(len(self._slices))]
        needed = [max((layout.num_bytes for layout in layouts[parity::2]), default=0) for parity in (0, 1)]
        if [buffer.nbytes for buffer in self._buffers] != needed:
            self._views.clear()
            link = self._transfers.link
            for event, buffer in zip(self._copies_to_host, self._buffers, strict=False):
                link.before_reuse(buffer, event, link.stream())  # a copy may still read what is freed here
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in needed]

    def layout(self, index: int) -> Layout:
        """Return where the gradients of a slice lie."""
        return self._layouts[index]

    def _trained_layout(self, index: int) -> Layout:
        trained = [parameter for parameter in self._slices[index].layout.parameters if self._has_slot(index, parameter)]
        known = self._layouts.get(index)
        # By identity: `==` would compare values.
        if (
            known is None
            or len(known.parameters) != len(trained)
            or any(map(operator.is_not, known.parameters, trained))
        ):
            known = self._layouts[index] = Layout(trained, self._slices[index].dtype)
            self._views.pop(index, None)
        return known

    def _has_slot(self, index: int, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's gradient is added up in the buffer."""
        return parameter.requires_grad and not (self.keeps_sparse and id(parameter) in self._slices[index].sparse)

    def begin(self, index: int, device_parameters: Sequence[nn.Parameter]) -> None:
        """Set the device parameters' gradients to zeros in the slice's buffer on the device, for autograd to add to."""
        layout = self.layout(index)
        buffer = self._buffers[index % 2][: layout.num_bytes]
        # The gradients of slice index + 2 may still be on their way out of this buffer.
        self._transfers.link.wait(self._copies_to_host[index % 2], f"the gradients of slice {index + 2}")
        buffer.zero_()
        if index not in self._views:
            # `.data` gives each view a version counter of its own, which tells whether it has received a gradient.
            self._views[index] = [view.data for view in layout.views(buffer)]
        self._versions = [view._version for view in self._views[index]]
        views = iter(self._views[index])
        for device_parameter, parameter in zip(device_parameters, self._slices[index].layout.parameters, strict=True):
            device_parameter.grad = next(views) if self._has_slot(index, parameter) else None

    def send(self, index: int, device_parameters: Sequence[nn.Parameter]) -> GradientCopy:
        """Start to copy the slice's gradients to the host."""
        layout, views = self.layout(index), self._views[index]
        used = [view._version != before for view, before in zip(views, self._versions, strict=True)]
        sparse = {}
        for device_parameter, parameter in zip(device_parameters, self._slices[index].layout.parameters, strict=True):
            gradient, device_parameter.grad = device_parameter.grad, None
            if gradient is not None and not self._has_slot(index, parameter):
                sparse[parameter] = self._send_sparse(index, gradient)
        source = self._buffers[index % 2][: layout.num_bytes]
        target = self._host_buffer(layout.num_bytes)
        after = (self._transfers.link.now(),)
        self._copies_to_host[index % 2] = event = self._transfers.send("gradients_out", source, target, after)
        rows = zip(layout.parameters, layout.slots, used, strict=True)
        flat = {parameter: slot.padded(target) for parameter, slot, is_used in rows if is_used}
        return GradientCopy(index, flat, event, sparse, _norm(views) if self.wants_norm else None)

    def _send_sparse(self, index: int, gradient: Tensor) -> Tensor:
        """Copy a gradient to the host that has no slot; its size differs from step to step, so this waits."""
        if not gradient.is_sparse:
            return self._send_part(index, gradient.detach())
        indices, values = (self._send_part(index, part) for part in (gradient._indices(), gradient._values()))
        is_coalesced = gradient.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, gradient.shape, device="cpu", is_coalesced=is_coalesced, check_invariants=False
        )

    def _send_part(self, index: int, part: Tensor) -> Tensor:
        part = part.contiguous()
        host = torch.empty_like(part, device="cpu")
        what = f"the sparse gradients of slice {index}"
        after = (self._transfers.link.now(),)
        event = self._transfers.send("gradients_out", flat_bytes(part), flat_bytes(host), after)
        self._transfers.link.synchronize(event, what)
        return host

    def wait_by_parameter(
        self, gradient_copies: Sequence[GradientCopy], parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Wait for gradients, and return them by parameter, summed over the slices that use it."""
        for gradient_copy in gradient_copies:
            self._transfers.link.synchronize(gradient_copy.event, f"the gradients of slice {gradient_copy.index}")
        return _by_parameter(gradient_copies, parameters)

    def _host_buffer(self, num_bytes: int) -> Tensor:
        """Return host memory that no other tensor shares any more, such as a parameter's `.grad`."""
        if not _can_count():
            pinned = devices.has_streams(self._device)
            return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        fitting = [buffer for buffer in self._host_buffers if buffer.nbytes >= num_bytes and _is_free(buffer)]
        buffer = min(fitting, key=lambda each: each.nbytes, default=None)
        if buffer is None:
            buffer = self._memory.zeros(num_bytes)
            self._host_buffers.append(buffer)
        return buffer[:num_bytes]  # a view: while it lives the buffer is not free

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffer.nbytes for buffer in self._buffers)


class InPlaceGradients:
    """Collects the gradients of slices where the device is the host: there is nothing to copy.

    Args:
        slices: the weights of all slices.
    """

    num_bytes: Final = 0

    def __init__(self, slices: Sequence[SliceWeights]) -> None:
        self.wants_norm = False
        """Whether an optimizer clips by the norm."""
        self.keeps_sparse = False
        """Whether sparse gradients stay sparse; may change between backwards."""
        self._slices = slices

    def reserve(self) -> None:
        """Do nothing: autograd allocates gradients."""

    def prepare(self) -> None:
        """Do nothing."""

    def begin(self, index: int, device_parameters: Sequence[nn.Parameter]) -> None:
        """Clear the device parameters' gradients: a backward that failed may have left some."""
        del index
        for device_parameter in device_parameters:
            device_parameter.grad = None

    def send(self, index: int, device_parameters: Sequence[nn.Parameter]) -> GradientCopy:
        """Take the slice's gradients."""
        flat, sparse = {}, {}
        for parameter, device_parameter in zip(self._slices[index].layout.parameters, device_parameters, strict=True):
            gradient, device_parameter.grad = device_parameter.grad, None
            if gradient is not None and gradient.is_sparse and self.keeps_sparse:
                sparse[parameter] = gradient
            elif gradient is not None:
                flat[parameter] = gradient.to_dense().reshape(-1)
        return GradientCopy(index, flat, DONE, sparse, _norm(list(flat.values())) if self.wants_norm else None)

    def wait_by_parameter(
        self, gradient_copies: Sequence[GradientCopy], parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return gradients by parameter, summed over the slices that use it."""
        return _by_parameter(gradient_copies, parameters)


def _by_parameter(gradient_copies: Sequence[GradientCopy], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    found: dict[int, Tensor] = {}
    for gradient_copy in gradient_copies:
        for parameter, computed in itertools.chain(gradient_copy.flat.items(), gradient_copy.sparse.items()):
            is_flat = computed.dim() == 1  # and padded
            gradient = computed[: parameter.numel()].view(parameter.shape) if is_flat else computed
            gradient = gradient.to(parameter.dtype)
            key = id(parameter)
            known = found.get(key)
            found[key] = gradient if known is None else _sum(known, gradient)
    return [found.get(id(parameter)) for parameter in parameters]


def _sum(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse else one + other  # torch adds a sparse tensor to a dense one only


def _norm(gradients: Sequence[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    # In the type of half-precision gradients, a norm has three digits, or overflows.
    wide = functools.reduce(torch.promote_types, (each.dtype for each in gradients), torch.float32)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2, wide)))
    return whole


def _can_count() -> bool:
    """Return whether this torch counts the users of a storage; without that, buffers are never reused."""
    return hasattr(torch._C, "_storage_Use_Count")


def _is_free(buffer: Tensor) -> bool:
    """Return whether no other tensor shares the buffer's memory."""
    storage = buffer.untyped_storage()
    # One for the buffer itself, one for `storage` here.
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)


@dataclass(frozen=True)
class AccumulatedGradients:
    """The gradients of one step: flat, by parameter, as in `GradientCopy`; readable after `wait`."""

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
        link: that copies them to the host.
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
        latest = self._latest
        is_alone = latest is not None and not self._sum and not self._tied
        # The device has computed the norm of one backward, over all gradients of the slice. It is right if there was
        # only that backward and no tied weight belongs to an earlier slice.
        if is_alone and latest is not None and latest.norm is not None and all(map(self._state.owns, latest.flat)):
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
        """Add what has arrived to the sum, in fp32 and in memory of its own, because the copies' buffers are reused."""
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
