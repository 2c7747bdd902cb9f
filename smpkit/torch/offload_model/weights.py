"""The weights of slices: one flat buffer per slice on the host, and two on the device that all slices share.

A `Layout` says where each parameter lies in a buffer, so that a slice moves in one copy. `SliceWeights` is the host's
side, `DeviceWeights` the device's. Slice i always lies in device buffer i % 2, so its device parameters are made once,
a slice can be loaded while its neighbour computes, and the last two slices are still there when backward starts::

    forward   load 0 1 2 3 4          buffer 0: 0 2 4 -> backward starts with slice 4 here
    backward  load 2 1 0              buffer 1: 1 3   -> and goes on with slice 3 there

Where the host's memory is the device's there are no device buffers: slices compute with the host's own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.core.devices import make_current
from smpkit.torch.offload.link import DONE, Event, Link
from smpkit.torch.offload_model.counted_link import DEADLINE_SECONDS, HostBuffers, Transfers

__all__ = ["BufferSlot", "DeviceWeights", "Layout", "SliceWeights", "compute_dtype", "with_own_storage"]

_version: Final = attrgetter("_version")
_ALIGNMENT: Final = 64  # elements: enough for the vector loads of every dtype, and equal in buffers of different dtypes


@dataclass(frozen=True)
class BufferSlot:
    """Where one parameter lies."""

    start: int
    """In bytes, from the start of the buffer."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_elements(self) -> int:
        """Elements up to the next slot, with padding."""
        return -(-self.shape.numel() // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Bytes up to the next slot, with padding."""
        return self.num_elements * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer of bytes that is this parameter."""
        flat = buffer[self.start : self.start + self.shape.numel() * self.dtype.itemsize]
        return flat.view(self.dtype).view(self.shape)

    def padded(self, buffer: Tensor) -> Tensor:
        """Return that part with its padding, flat."""
        return self.bytes_of(buffer).view(self.dtype)

    def bytes_of(self, buffer: Tensor) -> Tensor:
        """Return that part with its padding, as bytes."""
        return buffer[self.start : self.start + self.num_bytes]


class Layout:
    """Where parameters lie in one buffer of bytes.

    Trainable parameters come first, so that gradients are a prefix. Next, parameters are sorted by dtype, then matrices
    before vectors: optimizers group them so (weight decay), and their kernels are fastest on long runs of one group.

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


def _rank(dtype: torch.dtype | None) -> Callable[[nn.Parameter], tuple[bool, str, bool]]:
    """Return the sort key of a `Layout`."""
    return lambda parameter: (
        not parameter.requires_grad,
        str(compute_dtype(parameter, dtype)),
        parameter.dim() < 2,
    )


def compute_dtype(parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a parameter is computed in; integer parameters, and None, keep their own."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage is exactly that memory."""
    # `torch.save` and `deepcopy` take whole storages: one parameter must not bring along its slice.
    if view.numel() == 0:
        return view
    start = view.storage_offset() * view.itemsize
    whole: Any = view.untyped_storage()
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(whole[start : start + view.nbytes], 0, view.shape, view.stride())


class SliceWeights:
    """The parameters of a slice in one buffer of the host, in the dtype that the device computes in.

    A parameter that has this dtype becomes a view of the buffer, so the user's optimizer writes there directly. Others
    (fp32 weights of a bf16 computation; a tied one that lies in an earlier slice) are copied into it before each
    forward.

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
        self._owners: list[tuple[nn.Module, str, int]] = []
        for holder in module.modules():
            for name, parameter in holder._parameters.items():
                if parameter is not None:
                    self._owners.append((holder, name, position[id(parameter)]))
        self._lookups = [
            (each, each.weight) for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        ]
        self._rnns = [holder for holder in module.modules() if isinstance(holder, nn.RNNBase)]
        self._in_place: list[tuple[nn.Parameter, Tensor]] = []
        self._copied: list[tuple[nn.Parameter, Tensor]] = []
        self._synced: dict[int, tuple[int, int]] = {}
        self._reading: tuple[Link, Event] | None = None
        self.moved: set[int] = set()
        """Ids of parameters that left the buffer and were put back since the optimizer last cleared this."""
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
        """Whether `refresh` must copy parameters into the buffer before each forward."""
        return bool(self._copied)

    @property
    def sparse(self) -> set[int]:
        """Ids of parameters that get sparse gradients: the tables of `nn.Embedding(sparse=True)`."""
        return {id(weight) for lookup, weight in self._lookups if lookup.sparse}

    def note_read(self, link: Link, event: Event) -> None:
        """Note that a copy reads the buffer until `event`; copies are made in order, so the latest is enough."""
        self._reading = link, event

    def synchronize(self) -> None:
        """Block until no copy reads the buffer; to be called before writing to it."""
        if self._reading is not None:
            link, event = self._reading
            link.synchronize(event, "the weights of a slice")

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy parameters that have changed into the buffer."""
        self.reattach()
        for parameter, view in self._copied:
            if self._synced.get(id(parameter)) != _state(parameter):
                self.synchronize()
                view.copy_(parameter.detach())

    @torch.no_grad()
    def reattach(self) -> None:
        """Put parameters back that have been moved out of the buffer."""
        for parameter, view in self._in_place:
            # `parameter.data = ...` (vector_to_parameters, some loaders) moves a parameter out of the buffer.
            if parameter.data_ptr() != view.data_ptr() and parameter.numel() > 0:
                self.synchronize()
                view.copy_(parameter.detach())
                parameter.data = with_own_storage(view)
                self.moved.add(id(parameter))

    @torch.no_grad()
    def take_written(self, position: int) -> None:
        """Give a parameter the value that the buffer has for it: a forward has written to it on the device."""
        parameter, view = self.layout.parameters[position], self.views[position]
        # `.data`: graphs of earlier forwards do not read the parameter itself, so its version must not change.
        if parameter.data_ptr() != view.data_ptr():
            # Where the wider parameter rounds to this value, the forward has not written to it.
            rounded = parameter.detach().to(view.dtype)
            parameter.data.copy_(torch.where(rounded == view, parameter.detach(), view.to(parameter.dtype)))
        self.moved.add(id(parameter))  # masters must be compared with it

    def note_written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that the optimizer itself has written these parameters' values to the buffer."""
        for parameter in parameters:
            self._synced[id(parameter)] = _state(parameter)

    def invalidate(self) -> None:
        """Make the next `refresh` copy everything."""
        self._synced.clear()

    def device_parameters(self, device_buffer: Tensor) -> list[nn.Parameter]:
        """Return parameters for the slice to compute with: views of a buffer on the device."""
        made = []
        with torch.inference_mode(False):  # later forwards may be trained
            for parameter, view in zip(self.layout.parameters, self.layout.views(device_buffer), strict=True):
                # `.data` gives each a version counter of its own, which loads and other parameters do not change.
                device_parameter = nn.Parameter(view.data, requires_grad=parameter.requires_grad)
                device_parameter.__dict__.update(parameter.__dict__)  # libraries put attributes on parameters
                made.append(device_parameter)
        return made

    @contextlib.contextmanager
    def replaced_by(self, device_parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Replace the parameters of the slice's modules by `device_parameters` inside.

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
        for rnn in self._rnns:  # they keep a list of their parameters, which torch updates only in `__setattr__`
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return what changes with most ways to change a parameter."""
    return parameter._version, parameter.data_ptr()


class DeviceWeights:
    """Copies slices to the device.

    Args:
        slices: the weights of all slices, on the host.
        device: where they run.
        transfers: for the copies.
        prefetch: whether the next slice is loaded while one computes.
        in_place: whether the device computes with the host's buffers, so that a load only updates these.
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
        self._versions: dict[int, list[int]] = {}
        self._loads: dict[int, Event | Future[Event]] = {}
        self._latest: Event = DONE
        # Loads that must first wait for the optimizer, or cast, do so in this thread, not in the one that computes.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="smpkit-weights", initializer=make_current, initargs=(device,)
        )
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def wait_before_loads(self, wait_for_update: Callable[[int], object]) -> None:
        """Call `wait_for_update` with the index of a slice before it is copied, until its update has ended."""
        self._wait_for_update = wait_for_update

    def begin_forward(self) -> None:
        """Load all slices anew: weights may have changed since the last step."""
        self._loaded_slices = [None, None]

    def load(self, index: int, *, fresh: bool) -> None:
        """Start to copy a slice to the device, unless it is there.

        Args:
            index: of the slice.
            fresh: first update the host's buffer; backward does not, it needs the weights of its forward.
        """
        if self._loaded_slices[index % 2] == index:
            return
        self._loaded_slices[index % 2] = index
        # Allocate the buffer in this thread and before `now`: work that is queued may still use its memory.
        self.buffer(index)
        # The copy comes after the computation with the slice that was in this buffer, which has been enqueued already.
        after = (self._transfers.link.now(),)
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
        self._latest = self._transfers.fetch("weights_in", weights.buffer, target, after)
        weights.note_read(self._transfers.link, self._latest)
        return self._latest

    def wait_for_loads(self) -> None:
        """Block until no copy reads the host's weights, which the user may change from now on."""
        # Loads wait for computation that a GPU may not have reached yet.
        self._transfers.link.synchronize(self._latest, "the weights of the last slice")

    def _await(self, index: int) -> None:
        """Make the current stream wait for the load of a slice."""
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
        """Return the device parameters of a slice, ready to compute with, and start to load the next slice.

        Args:
            index: of the slice.
            fresh: see `load`.
            next_index: of the slice that comes next; nothing may use its buffer any more.
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
        self._versions[index] = [*map(_version, device_parameters)]
        return device_parameters

    def collect_writes(self, index: int, *, runs_again: bool) -> None:
        """Copy weights home that a forward has written to since `acquire` (`Embedding(max_norm=...)`, `clamp_`).

        Writes that do not change a tensor's version (`weight.data.clamp_()`) are not seen.

        Raises:
            UsageError: there are such weights, and the forward runs again, which would write to them once more.
        """
        device_parameters, weights = self._device_parameters[index], self._slices[index]
        versions = [*map(_version, device_parameters)]
        if versions == self._versions[index]:
            return
        pairs = zip(versions, self._versions[index], strict=True)
        written = [position for position, (after, before) in enumerate(pairs) if after != before]
        if runs_again:
            changed = device_parameters[written[0]]
            name = next(name for name, each in weights.module.named_parameters() if each is changed)
            raise UsageError(
                f"the forward of slice {index} changes its weight `{name.removeprefix('model_shard.')}` in place, so it"
                " cannot be run again for backward",
                hint="give checkpoint_activation=False, or change weights after backward",
            )
        if not self._in_place:
            what = f"weights that the forward of slice {index} has changed"
            after, event = (self._transfers.link.now(),), DONE
            for position in written:
                part = weights.layout.slots[position].bytes_of
                event = self._transfers.send("weights_out", part(self.buffer(index)), part(weights.buffer), after)
            self._transfers.link.synchronize(event, what)
        for position in written:
            weights.take_written(position)

    def buffer(self, index: int) -> Tensor:
        """Return the buffer on the device in which a slice lies; allocated on the first call."""
        if self._in_place:
            return self._slices[index].buffer
        if not self._buffers:
            for parity in (0, 1):
                num_bytes = max((each.layout.num_bytes for each in self._slices[parity::2]), default=0)
                with torch.inference_mode(False):
                    self._buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return self._buffers[index % 2]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in one of the buffers."""
        buffers = [piece.buffer for piece in self._slices] if self._in_place else self._buffers
        return tensor.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in buffers}

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers on the device; 0 in place."""
        return sum(buffer.nbytes for buffer in self._buffers)
