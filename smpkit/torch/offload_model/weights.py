"""The weights of one slice: a flat buffer on the host, and device parameters, views of a buffer on the device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.core.devices import make_current
from smpkit.torch.offload.link import DONE, Event, Link
from smpkit.torch.offload_model.counted_link import DEADLINE_SECONDS, HostBuffers, Transfers

__all__ = ["BufferSlot", "DeviceWeights", "Layout", "SliceWeights", "compute_dtype", "with_own_storage"]


# --- Where the parameters of a slice lie in one flat buffer, so that a slice moves in one copy ------------------------


_ALIGNMENT: Final = 64  # elements: enough for the vector loads of every dtype, and equal in buffers of different dtypes


def compute_dtype(parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is computed with: integers and None keep their own."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


@dataclass(frozen=True)
class BufferSlot:
    """Where one parameter lies."""

    start: int
    """In bytes, from the start of the buffer."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_elements(self) -> int:
        """Elements up to the next place, with padding."""
        return -(-self.shape.numel() // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Bytes up to the next place, with padding."""
        return self.num_elements * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer of bytes that is this parameter."""
        flat = buffer[self.start : self.start + self.shape.numel() * self.dtype.itemsize]
        return flat.view(self.dtype).view(self.shape)

    def padded(self, buffer: Tensor) -> Tensor:
        """Return that part with its padding, flat."""
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype)


class Layout:
    """The places of some parameters in one buffer of bytes.

    Trainable ones come first, so gradients are a prefix; then equal dtypes, then matrices before vectors, because
    optimizers group them so, and the optimizer's kernel likes long runs of one group.

    Args:
        parameters: without repetitions.
        dtype: what floating-point ones are computed in; None keeps theirs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        order = sorted(parameters, key=_rank(dtype))  # stable: the model's order within each kind
        self.parameters = tuple(order)
        slots, start = [], 0
        for parameter in order:
            slots.append(BufferSlot(start, compute_dtype(parameter, dtype), parameter.shape))
            start += slots[-1].num_bytes
        self.slots = tuple(slots)
        self.num_bytes = start

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a buffer of at least `num_bytes` bytes."""
        return [slot.view(buffer) for slot in self.slots]


def with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory under a storage of its own.

    `torch.save` and copies take whole storages: one parameter's is to be its own, not that of the slice.
    """
    if view.numel() == 0:
        return view
    start = view.storage_offset() * view.itemsize
    whole: Any = view.untyped_storage()
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(whole[start : start + view.nbytes], 0, view.shape, view.stride())


def _rank(dtype: torch.dtype | None) -> Callable[[nn.Parameter], tuple[bool, str, bool]]:
    return lambda parameter: (
        not parameter.requires_grad,
        str(compute_dtype(parameter, dtype)),
        parameter.dim() < 2,
    )


# --- The weights of one slice: a flat buffer on the host, and device parameters, views of a buffer on the device ------


class SliceWeights:
    """The parameters of a slice in one buffer of the host, in the dtype that the device computes in.

    A parameter whose dtype that is, is a view of the buffer from then on, so the user's optimizer writes right there.
    Others (fp32 weights of a bf16 computation; a tied one that lies in an earlier slice) are copied into it before
    each forward.

    Args:
        module: the slice.
        owned: ids of parameters that no earlier slice has; tied ones belong to the first.
        dtype: what the device computes in; None keeps each parameter's own.
        memory: where the buffer comes from.
    """

    def __init__(self, module: nn.Module, owned: set[int], dtype: torch.dtype | None, memory: HostBuffers) -> None:
        self.module = module
        self.dtype = dtype
        self.layout = Layout(list(module.parameters()), dtype)
        self.buffer = memory.zeros(self.layout.num_bytes)
        self.views = self.layout.views(self.buffer)
        position = {id(parameter): index for index, parameter in enumerate(self.layout.parameters)}
        self._owners = [
            (holder, name, position[id(parameter)])
            for holder in module.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None
        ]
        self._rnns = [holder for holder in module.modules() if isinstance(holder, nn.RNNBase)]
        self._in_place: list[tuple[nn.Parameter, Tensor]] = []
        self._copied: list[tuple[nn.Parameter, Tensor]] = []
        self._synced: dict[int, tuple[int, int]] = {}
        self._reading: tuple[Link, Event] | None = None
        self.moved: set[int] = set()
        """Ids of parameters that have been moved out and back since somebody cleared this."""
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            with torch.no_grad():
                view.copy_(parameter)
            if id(parameter) in owned and view.dtype == parameter.dtype:
                parameter.data = with_own_storage(view)
                self._in_place.append((parameter, view))
            else:
                if id(parameter) in owned and parameter.device.type != "cpu":
                    parameter.data = parameter.data.to("cpu")
                self._copied.append((parameter, view))

    @property
    def is_copied(self) -> bool:
        """Whether some parameters do not lie in the buffer, so that `refresh` has work to do before each forward."""
        return bool(self._copied)

    def note_read(self, link: Link, event: Event) -> None:
        """Note that a copy reads the buffer until `event`; those before it are over by then."""
        self._reading = link, event

    def synchronize(self) -> None:
        """Block until no copy reads the buffer any more: whoever writes to it calls this first."""
        if self._reading is not None:
            link, event = self._reading
            link.synchronize(event, "the weights of a slice")

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the buffer up to date with the parameters."""
        self.reattach()
        for parameter, view in self._copied:
            if self._synced.get(id(parameter)) != _state(parameter):
                self.synchronize()
                view.copy_(parameter.detach())

    @torch.no_grad()
    def reattach(self) -> None:
        """Bring parameters back that have been moved out of the buffer."""
        for parameter, view in self._in_place:
            # `parameter.data = ...` (vector_to_parameters, some loaders) moves a parameter out of the buffer.
            if parameter.data_ptr() != view.data_ptr() and parameter.numel() > 0:
                self.synchronize()
                view.copy_(parameter.detach())
                parameter.data = with_own_storage(view)
                self.moved.add(id(parameter))

    def note_written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that the optimizer has itself put these parameters' values into the buffer."""
        for parameter in parameters:
            self._synced[id(parameter)] = _state(parameter)

    def invalidate(self) -> None:
        """Forget that: the next `refresh` copies all."""
        self._synced.clear()

    def device_parameters(self, device_buffer: Tensor) -> list[nn.Parameter]:
        """Return parameters that are views of a buffer on the device; the slice computes with them."""
        made = []
        for parameter, view in zip(self.layout.parameters, self.layout.views(device_buffer), strict=True):
            device_parameter = nn.Parameter(view, requires_grad=parameter.requires_grad)
            device_parameter.__dict__.update(parameter.__dict__)  # marks that libraries put on parameters
            made.append(device_parameter)
        return made

    @contextlib.contextmanager
    def replaced_by(self, device_parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the slice's modules see `device_parameters` in the place of their parameters.

        Raises:
            UsageError: a module has another parameter than when the model was wrapped.
        """
        for holder, name, position in self._owners:
            found = holder._parameters.get(name)
            if found is not self.layout.parameters[position] and found is not device_parameters[position]:
                raise UsageError(
                    f"`{name}` of a {type(holder).__name__} is not the parameter that the OffloadModel was made with",
                    hint="change parameters in place, load without assign=True, and do not call it through torch.func",
                )
        self._set_parameters(device_parameters)
        try:
            yield
        finally:
            self._set_parameters(self.layout.parameters)

    def _set_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        for holder, name, position in self._owners:
            holder._parameters[name] = parameters[position]
        for rnn in self._rnns:  # they keep a list of their own
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return what is another after most ways to change a parameter."""
    return parameter._version, parameter.data_ptr()


# --- The weights that are on the device: two flat buffers, shared by all slices ---------------------------------------
# Slice i always lies in buffer i % 2, so its device parameters are made once, a slice can be loaded while its neighbour
# computes, and the last two slices are still there when backward starts::
#
#     forward   load 0 1 2 3 4          buffer 0: 0 2 4 -> backward starts with slice 4 here
#     backward  load 2 1 0              buffer 1: 1 3   -> and goes on with slice 3 there
#
# Where the host's memory is the device's there are no such buffers: slices compute with the host's own.


class DeviceWeights:
    """Brings slices to the device.

    Args:
        slices: the weights of all slices, on the host.
        device: where they run.
        transfers: for the copies.
        prefetch: whether the next slice is loaded while one computes.
        in_place: whether the device computes with the host's buffers, so that a load only brings these up to date.
    """

    def __init__(
        self,
        slices: Sequence[SliceWeights],
        device: torch.device,
        transfers: Transfers,
        *,
        prefetch: bool,
        in_place: bool = False,
    ) -> None:
        self._slices = slices
        self._device = device
        self._transfers = transfers
        self._prefetch = prefetch
        self._in_place = in_place
        self._wait_for_update: Callable[[int], object] | None = None
        self._buffers: list[Tensor] = []
        self._device_parameters: dict[int, list[nn.Parameter]] = {}
        self._loaded_slices: list[int | None] = [None, None]
        self._loads: dict[int, Event | Future[Event]] = {}
        self._latest: Event = DONE
        # Loads that first wait for the optimizer, or cast, do so here, not in the thread that computes.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="smpkit-weights", initializer=make_current, initargs=(device,)
        )
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def wait_before_loads(self, wait_for_update: Callable[[int], object]) -> None:
        """Call `wait_for_update` with a slice before it is copied: its update may not have ended."""
        self._wait_for_update = wait_for_update

    def begin_forward(self) -> None:
        """Trust nothing that is on the device: the weights may have changed since."""
        self._loaded_slices = [None, None]

    def load(self, index: int, *, fresh: bool) -> None:
        """Start to bring a slice to the device, unless it is there.

        Args:
            index: of the slice.
            fresh: first bring the host's buffer up to date; backward does not, it wants what its forward saw.
        """
        if self._loaded_slices[index % 2] == index:
            return
        self._loaded_slices[index % 2] = index
        self.buffer(index)  # made in this thread and before `now`: the memory may just have been somebody else's
        after = (self._transfers.link.now(),)  # what computes with the buffer's last slice has been enqueued before
        if fresh and (self._wait_for_update is not None or self._slices[index].is_copied):
            self._loads[index] = self._thread.submit(self._refresh_and_copy, index, after)
            return
        if fresh:
            self._slices[index].refresh()
        self._loads[index] = self._copy(index, after)

    def _refresh_and_copy(self, index: int, after: Sequence[Event]) -> Event:
        if self._wait_for_update is not None:
            self._wait_for_update(index)
        self._slices[index].refresh()
        return self._copy(index, after)

    def _copy(self, index: int, after: Sequence[Event]) -> Event:
        if self._in_place:
            return DONE
        weights = self._slices[index]
        target = self.buffer(index)[: weights.layout.num_bytes]
        self._latest = self._transfers.fetch("weights_in", weights.buffer, target, after, f"slice {index}")
        weights.note_read(self._transfers.link, self._latest)
        return self._latest

    def wait_for_loads(self) -> None:
        """Block until no copy reads the host's weights any more, for the user may change them now.

        Computation runs behind this thread on a GPU, and loads wait for it.
        """
        self._transfers.link.synchronize(self._latest, "the weights of the last slice")

    def _await(self, index: int) -> None:
        """Let what is computed from now on come after the load of a slice."""
        load = self._loads.pop(index, None)
        if load is None:
            return
        if isinstance(load, Future):
            try:
                load = load.result(DEADLINE_SECONDS)
            except FutureTimeoutError:
                if load.done():
                    raise
                raise DeadlineError(
                    f"the computation waited {DEADLINE_SECONDS:.0f} s for the weights of slice {index}"
                ) from None
        self._transfers.link.wait(load, f"slice {index}")

    def acquire(self, index: int, *, fresh: bool, next_index: int | None) -> list[nn.Parameter]:
        """Return the device parameters of a slice, to compute with from now on, and start to load the next slice.

        Args:
            index: of the slice.
            fresh: see `load`.
            next_index: the slice that comes next; its buffer must not be in use any more.
        """
        self.load(index, fresh=fresh)
        if next_index is not None and self._prefetch and next_index % 2 != index % 2:
            self.load(next_index, fresh=fresh)
        self._await(index)
        device_parameters = self._device_parameters.get(index)
        if device_parameters is None:
            device_parameters = self._device_parameters[index] = self._slices[index].device_parameters(
                self.buffer(index)
            )
        for device_parameter, parameter in zip(device_parameters, self._slices[index].layout.parameters, strict=True):
            if device_parameter.requires_grad != parameter.requires_grad:
                device_parameter.requires_grad_(parameter.requires_grad)
        return device_parameters

    def buffer(self, index: int) -> Tensor:
        """Return the buffer on the device in which a slice lies; made when first asked for."""
        if self._in_place:
            return self._slices[index].buffer
        if not self._buffers:
            sizes = [[s.layout.num_bytes for s in self._slices[parity::2]] for parity in (0, 1)]
            self._buffers = [
                torch.empty(max(some, default=0), dtype=torch.uint8, device=self._device) for some in sizes
            ]
        return self._buffers[index % 2]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in one of the buffers."""
        buffers = [piece.buffer for piece in self._slices] if self._in_place else self._buffers
        return tensor.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in buffers}

    @property
    def num_bytes(self) -> int:
        """What both buffers take on the device; nothing in place."""
        return sum(buffer.nbytes for buffer in self._buffers)
