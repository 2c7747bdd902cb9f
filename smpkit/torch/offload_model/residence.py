"""The weights that are on the device: two flat buffers, shared by all slices.

Slice i always lies in buffer i % 2, so its device parameters are made once, a slice can be loaded while its neighbour
computes, and the last two slices are still there when backward starts::

    forward   load 0 1 2 3 4          buffer 0: 0 2 4 -> backward starts with slice 4 here
    backward  load 2 1 0              buffer 1: 1 3   -> and goes on with slice 3 there

Where the host's memory is the device's there are no such buffers: slices compute with the host's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch
from torch import Tensor, nn

from smpkit.errors import DeadlineError
from smpkit.torch.devices import make_current
from smpkit.torch.offload.link import DONE, Event
from smpkit.torch.offload_model.transfers import DEADLINE_SECONDS, Transfers
from smpkit.torch.offload_model.weights import SliceWeights

__all__ = ["DeviceWeights"]


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
