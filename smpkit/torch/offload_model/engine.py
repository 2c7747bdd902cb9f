"""What moves slices: two device buffers for weights, one stream of copies each way, and events.

Slice i always lies in device buffer i % 2 at the same place, so what autograd saved of a weight (`weight.t()`) is there
again when its backward runs, and a slice can be loaded while its neighbour computes. The resident slice has a buffer of
its own::

    forward   load 0 1 2 3 4          buffer 0: 0 2 4 -> backward begins with slice 4 here
    backward  load 2 1 0              buffer 1: 1 3   -> and goes on with slice 3 there

Where the host's memory is the device's, nothing is copied: slices compute with the parameters themselves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.host_memory import pinned_bytes
from smpkit.torch.offload.link import DONE, Event, link_for
from smpkit.torch.offload_model.slices import Layout, Slice, with_own_storage

if TYPE_CHECKING:
    from smpkit.torch.offload_model.optimizer import OffloadOptimizer

DEADLINE_SECONDS: Final = 600.0
"""No wait of this thread for a copy lasts longer."""
_NO_TASK: Final = -1
_PIECE: Final = 16 << 20
"""Elements of a gradient that are copied at a time: while they are cast, the device holds them in both types."""
Sources = set[tuple[torch.autograd.graph.Node | None, int]]
"""Where tensors come from in a graph: the operation, and which of its results."""


def sources(tensors: Iterable[Tensor]) -> Sources:
    """Return where tensors come from; one that is changed in place comes from elsewhere afterwards."""
    return {(tensor.grad_fn, tensor.output_nr) for tensor in tensors}


@dataclass
class _Slot:
    """A buffer on the device, which slices take in turn, and what belongs to it."""

    weights: Tensor | None = None
    """The buffer; None until a slice is loaded."""
    loaded: int | None = None
    """Which slice is in it, or on its way there."""
    load: Event = DONE
    slab: Tensor | None = None
    """A buffer on the host for gradients that are added to others, or used up in the backward."""
    slab_user: Slice | None = None
    sum: tuple[Event, Sequence[tuple[nn.Parameter, Tensor]]] = DONE, ()
    """Gradients that must be added to earlier ones, and when they are on the host."""


class Engine:
    """Moves the slices of one model.

    Args:
        slices: the last is the resident one.
        in_place: whether slices compute with the parameters where they are.
        group: over which gradients are averaged before they leave the device.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        device: torch.device,
        *,
        in_place: bool,
        prefetch: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.slices, self.device, self.in_place = slices, device, in_place
        self.link = link_for(device, DEADLINE_SECONDS)
        self.updater: Callable[[], OffloadOptimizer | None] = lambda: None
        """Returns what takes gradients during the backward: an optimizer with `overlap="backward"`."""
        self._resident = len(slices) - 1
        self._prefetch, self._group = prefetch, group
        self._slots = [_Slot() for _ in range(3)]
        self._views: dict[int, list[Tensor]] = {}
        """The weights of slices in their buffers on the device."""
        self._last_load: Event = DONE
        self._leaving: tuple[list[Tensor], Event, Hashable] = [], DONE, None
        """Gradients of the latest slice that are copied to the host, and the stream that made them."""
        self._homes: dict[int, tuple[Tensor, StorageWeakRef]] = {}
        """Buffers on the host for gradients, by slice, and whether any of the gradients is still used."""
        self._versions: dict[int, list[int]] = {}
        """Of the parameters of entered slices."""
        self.is_in_forward = False
        """Whether the model's forward runs."""
        self._task = _NO_TASK
        """Autograd's number of the backward that runs."""
        self._running: int | None = None
        """The slice whose backward runs."""
        self._current: int | None = None
        """The slice whose forward runs."""
        self._before: dict[int, list[Tensor | None]] = {}
        """The gradients that parameters had before the backward of their slice."""
        # Not at exit: the end of the process must not wait for a GPU that hangs.
        weakref.finalize(self, self.link.before_free).atexit = False
        self.changing = [
            parameter
            for piece in slices
            for parameter, dtype in zip(piece.parameters, piece.layout.dtypes, strict=True)
            if not in_place and (device.type != "cpu" or dtype != parameter.dtype)
        ]
        """Parameters of another type on the device: autograd makes new nodes for their gradients at each move."""
        if self.changing:
            _engines.add(self)
            torch.autograd._engine_run_backward = _run_checked  # type: ignore[attr-defined]
        if not in_place:
            trained = (parameter for parameter in self.parameters if parameter.requires_grad)
            check = functools.partial(_check_arrival, weakref.ref(self))
            handles = [
                parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
                for parameter in trained
            ]
            weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them."""
        return (parameter for piece in self.slices for parameter in piece.parameters)

    def synchronize(self) -> None:
        """Block until all parameters are on the host and up to date, and no copy reads them."""
        if torch._C._current_graph_task_id() == _NO_TASK:
            self._abandon()
        self.link.synchronize(self._last_load, "the weights of a slice")
        for piece in self.slices:
            piece.wait_for_updates()

    # --- weights -----------------------------------------------------------------------------------------------------

    def _slot(self, index: int) -> _Slot:
        return self._slots[2 if index == self._resident else index % 2]

    def _slices_of(self, slot: _Slot) -> Iterator[Slice]:
        return (piece for piece in self.slices if self._slot(piece.index) is slot)

    def load(self, index: int) -> None:
        """Start to copy a slice to the device, unless it is there; its updates are waited for."""
        slot, piece = self._slot(index), self.slices[index]
        if slot.loaded == index:
            return
        piece.make_ready(self.link)
        slot.loaded = index
        if self.in_place or not piece.layout.num_bytes:
            return
        target = self._buffer(slot)[: piece.layout.num_bytes]
        # After the computation with the slice that was in this buffer, which has been enqueued already.
        slot.load = self._last_load = piece.reading = self.link.fetch([(piece.host, target)], [self.link.now()])

    def enter(self, index: int) -> None:
        """Let the parameters of a slice be those on the device."""
        self.load(index)
        piece = self.slices[index]
        if piece.is_entered:
            return
        piece.check_not_moved()
        piece.is_entered = True
        if self.in_place:
            return
        slot = self._slot(index)
        self.link.wait(slot.load, f"slice {index}")
        if index not in self._views:
            with torch.inference_mode(False):
                self._views[index] = piece.layout.views(self._buffer(slot))
        for parameter, view in zip(piece.parameters, self._views[index], strict=True):
            parameter.data = view

    def leave(self, index: int) -> None:
        """Let the parameters of a slice be those on the host."""
        piece = self.slices[index]
        piece.is_entered = False
        if not self.in_place:
            for parameter, master in zip(piece.parameters, piece.masters, strict=True):
                parameter.data = master

    def _buffer(self, slot: _Slot) -> Tensor:
        if slot.weights is None:
            num_bytes = max(piece.layout.num_bytes for piece in self._slices_of(slot))
            with torch.inference_mode(False):  # later forwards may be trained
                slot.weights = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return slot.weights

    # --- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Bring the resident slice; all slices are loaded anew, since weights may have changed."""
        if _NO_TASK not in (self._task, torch._C._current_graph_task_id()):
            raise UsageError("an OffloadModel was called in its own backward", hint="call it after the backward")
        if not self.in_place and torch._C._are_functorch_transforms_active():
            raise UnsupportedError(
                "an OffloadModel does not run under torch.func (grad, jvp, vmap): weights cannot move into its tensors",
                hint="use the plain model",
            )
        if not self.in_place and self.is_in_forward:
            raise UsageError(
                "an OffloadModel was called while another thread runs its forward, whose weights are on the device",
                hint="let threads call it in turn, with a threading.Lock",
            )
        self._abandon()
        for slot in self._slots:
            slot.loaded = None
        self.is_in_forward = True
        try:
            self._begin(self._resident)
        except BaseException:
            self.is_in_forward = False
            raise

    def switch_to(self, index: int) -> None:
        """Let the slice of the layer that runs next be the one on the device."""
        if index == self._current:
            return
        if self._current is not None:
            self._end(self._current)
        self._current = index
        self._begin(index)
        if self._prefetch and index + 1 < self._resident and self.slices[index + 1].is_ready():
            self.load(index + 1)  # otherwise when it is entered, after this slice's work has been enqueued

    def end_forward(self) -> None:
        """Bring all parameters back to the host; also after an error."""
        entered = [self._resident] if self._current is None else [self._current, self._resident]
        self._current = None
        try:
            for index in entered:
                self._end(index)
        finally:
            self.is_in_forward = False
            for index in entered:
                self.leave(index)
        if not torch.is_grad_enabled():  # no backward follows, in which the user's writes would be an error
            self.link.synchronize(self._last_load, "the weights of a slice")

    def _begin(self, index: int) -> None:
        self.enter(index)
        self._versions[index] = [parameter._version for parameter in self.slices[index].parameters]

    def _end(self, index: int) -> None:
        self._check_not_written(index, "a forward")
        self.leave(index)

    def _check_not_written(self, index: int, where: str) -> None:
        piece, before = self.slices[index], self._versions.pop(index, None)
        if before is None:
            return
        places = zip(piece.parameters, piece.masters if self.in_place else self._views[index], strict=True)
        # EEGNet's layers set `weight.data` in forward, and no version tells; nn.LSTM's `flatten_parameters()`, too, but
        # to the same values, which may be forgotten.
        is_another = any(
            value.data_ptr() != place.data_ptr() and not torch.equal(value, place) for value, place in places
        )
        if is_another or before != [parameter._version for parameter in piece.parameters]:
            raise UsageError(
                f"{where} of slice {index} writes to a weight, which is a copy on the device and never comes back",
                hint="change weights between steps (`with torch.no_grad(): weight.clamp_(...)`), not in a forward or in"
                ' hooks of a backward; an OffloadOptimizer with overlap="backward" updates them there',
            )

    # --- backward ----------------------------------------------------------------------------------------------------

    def watch(self, index: int | None, outputs: Sequence[Tensor], before: Sources) -> None:
        """Bring a slice (None: the resident one) when the gradient of a tensor is there that it made.

        A tensor that it only handed on, as it was before, tells nothing.
        """
        for tensor in outputs:
            if tensor.grad_fn is not None and (tensor.grad_fn, tensor.output_nr) not in before:
                hook = functools.partial(self.begin_backward, self._resident if index is None else index)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def begin_backward(self, index: int, _gradient: Tensor) -> None:
        """Bring a slice: the gradient of one of its outputs is there."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a second derivative through an OffloadModel (create_graph=True) is not served: the weights that it"
                " needs leave the device",
                hint="leave create_graph out, or use the plain model",
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._abandon()
            self._refuse_weights_used_directly()
            self._task = task
            end = functools.partial(self._end_backward)
            Variable._execution_engine.queue_callback(end)
            # If the backward fails, at once: a script clears gradients next, and none of before may come back later.
            weakref.finalize(end, self._abandon, task).atexit = False
            self._open(self._resident)
        if index in (self._running, self._resident):
            return
        if self._running is not None:
            self._finish(self._running)
        self._running = index
        self._open(index)
        if self._prefetch and index and self.slices[index - 1].is_ready():
            self.load(index - 1)

    def _refuse_weights_used_directly(self) -> None:
        """Refuse a backward that leads to parameters where they rest, too: autograd runs that in another thread."""
        trained = (parameter for parameter in self.changing if parameter.requires_grad)
        if any(torch._C._will_engine_execute_node(get_gradient_edge(param).node) for param in trained):
            raise _used_directly_error()

    def _open(self, index: int) -> None:
        """Bring a slice, whose gradients are to stay on the device for now."""
        piece = self.slices[index]
        if (updater := self.updater()) is not None:
            updater.check(piece)
        if not self.in_place:
            self._before[index] = [parameter.grad for parameter in piece.parameters]
            for parameter in piece.parameters:
                parameter.grad = None
        self._begin(index)

    def _finish(self, index: int) -> None:
        """Send the gradients of a slice home: the backward of its layers is over."""
        self._check_not_written(index, "a backward")
        piece = self.slices[index]
        self._average(piece)
        if self.in_place:
            self.leave(index)
            arrival = DONE
        else:
            arrival = self._send(piece)
        if (updater := self.updater()) is not None:
            updater.consume(piece, arrival)

    def _send(self, piece: Slice) -> Event:
        """Copy gradients to the host, in the type of their parameters; return when they are there."""
        slot = self._slot(piece.index)
        gradients = [(param, param.grad.to_dense()) for param in piece.parameters if param.grad is not None]
        self._restore(piece)
        self._settle(slot)
        updates_now = self.updater() is not None
        # Also where another parameter has a gradient (of another task's head, say): it lies in this slice's buffer.
        is_sum = any(parameter.grad is not None for parameter in piece.parameters)
        if updates_now and is_sum:
            raise UsageError(
                'a parameter has a gradient before a backward in which its OffloadOptimizer (overlap="backward")'
                " updates it",
                hint="call zero_grad() first",
            )
        layout = Layout([parameter.shape for parameter, _ in gradients], [gradient.dtype for gradient, _ in gradients])
        reserve = self._slab if updates_now or is_sum else self._home
        views = layout.views(reserve(piece, layout.num_bytes))
        copies = [
            pair
            for (_, gradient), view in zip(gradients, views, strict=True)
            for pair in zip(torch.split(gradient.flatten(), _PIECE), torch.split(view.flatten(), _PIECE), strict=True)
        ]
        arrival = self.link.send(copies, [self.link.now()])
        self._release()  # of the slice before, whose copy had the time of this one's backward
        self._leaving = [gradient for _, gradient in gradients], arrival, self.link.stream()
        arrived = [(parameter, view) for (parameter, _), view in zip(gradients, views, strict=True)]
        if is_sum:
            slot.sum = arrival, arrived
        else:
            for parameter, view in arrived:
                parameter.grad = view
        return arrival

    def _release(self) -> None:
        """Let go of gradients whose copy has begun; who gets their memory waits for it."""
        gradients, copy, stream = self._leaving
        self._leaving = [], DONE, None
        for gradient in gradients:
            self.link.before_reuse(gradient, copy, stream)

    def _end_backward(self) -> None:
        """Finish the last slices, and block until all gradients are on the host."""
        running, self._running = self._running, None
        if running is not None:
            self._finish(running)
        self._finish(self._resident)
        self._task = _NO_TASK
        if self.updater() is None:  # which waits itself
            self.link.synchronize(self._leaving[1], "the gradients of a slice")
        self._release()
        for slot in self._slots:
            self._settle(slot)
        self.link.synchronize(self._last_load, "the weights of a slice")

    def _restore(self, piece: Slice) -> None:
        """Bring a slice's parameters and the gradients from before its backward home."""
        for parameter in piece.parameters:
            parameter.grad = None
        self.leave(piece.index)
        for parameter, before in zip(piece.parameters, self._before.pop(piece.index), strict=True):
            parameter.grad = before

    def _abandon(self, task: int | None = None) -> None:
        """Forget a backward that failed half way: the last one, or none if that has another number."""
        if self._task == _NO_TASK or task not in (None, self._task):
            return
        self._task, self._running = _NO_TASK, None
        self._versions.clear()
        for index in [*self._before]:
            self._restore(self.slices[index])
        for piece in self.slices:
            piece.is_entered = False
        self.link.synchronize(self._leaving[1], "the gradients of a slice")
        self._release()
        for slot in self._slots:
            slot.sum = DONE, ()
        if (updater := self.updater()) is not None:
            updater.forget()

    # --- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self, slot: _Slot) -> None:
        """Add gradients that have come to a slab to those of before."""
        (arrival, terms), slot.sum = slot.sum, (DONE, ())
        self.link.synchronize(arrival, "the gradients of a slice")
        for parameter, term in terms:
            parameter.grad = term.clone() if parameter.grad is None else parameter.grad.add_(term)

    def _home(self, piece: Slice, num_bytes: int) -> Tensor:
        if not num_bytes:
            return piece.host[:0]
        piece.wait_for_updates()  # which read the gradients of before
        home, gradients = self._homes.get(piece.index, (None, None))
        # Scripts may keep gradients, and set `parameter.grad` to None: those must stay as they are.
        is_kept = gradients is not None and not gradients.expired()  # type: ignore[no-untyped-call]
        if home is None or home.nbytes < num_bytes or is_kept:
            home = pinned_bytes(self.device, num_bytes)
        own = with_own_storage(home[:num_bytes])
        self._homes[piece.index] = home, StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]
        return own

    def _slab(self, piece: Slice, num_bytes: int) -> Tensor:
        slot = self._slot(piece.index)
        if (user := slot.slab_user) is not None:
            user.wait_for_updates()
        slot.slab_user = piece
        if slot.slab is None or slot.slab.nbytes < num_bytes:
            slot.slab = pinned_bytes(self.device, max(piece.gradient_bytes() for piece in self._slices_of(slot)))
        return slot.slab[:num_bytes]

    def _average(self, piece: Slice) -> None:
        if self._group is None:
            return
        trained = [parameter for parameter in piece.parameters if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if len(gradients) < len(trained):
            raise UsageError(
                f"{len(trained) - len(gradients)} parameters of slice {piece.index} had no part in a backward, and"
                " other processes may have gradients for them",
                hint="with a process_group all parameters need a gradient; freeze the others (requires_grad_(False))",
            )
        with waiting(f"the average of the gradients of slice {piece.index}", self._group):
            # All on their way at once; in one flat tensor the device would hold them twice.
            works: list[Any] = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()
        for gradient in gradients:
            gradient.div_(self._group.size())


_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()
_run_backward: Final = torch.autograd.graph._engine_run_backward


def _run_checked(*args: Any, **kwargs: Any) -> Any:
    """Stand where `backward` and torch.autograd.grad call torch's engine, which would leave gradients out silently."""
    inputs = {id(argument) for argument in args[4]}
    if inputs and any(id(parameter) in inputs for engine in _engines for parameter in engine.changing):
        raise UnsupportedError(
            "parameters of an OffloadModel are `inputs` of a backward or of torch.autograd.grad, which finds no way to"
            " them: they were on the device when the graph was made",
            hint="leave `inputs` out, and read `parameter.grad`; freeze what shall have none (requires_grad_(False))",
        )
    return _run_backward(*args, **kwargs)


def _check_arrival(reference: weakref.ref[Engine], parameter: Tensor) -> None:
    gradient, engine = parameter.grad, reference()
    if gradient is None or engine is None:
        return
    if engine._task != _NO_TASK and gradient.device != engine.device:
        raise _used_directly_error()
    if gradient.device != parameter.device:
        raise UsageError(
            f"a weight of shape {tuple(parameter.shape)} got its gradient when its slice was not on the device",
            hint="does a layer compute partly on the CPU, or use another layer's weight? Use the plain model for it",
        )


def _used_directly_error() -> UnsupportedError:
    return UnsupportedError(
        "a loss depends on weights of an OffloadModel by its output and also directly, as with a penalty on weights;"
        " in one backward they would have to be on the device and on the host",
        hint="let the penalty have a backward of its own: `loss.backward()`, then `penalty.backward()`",
    )
