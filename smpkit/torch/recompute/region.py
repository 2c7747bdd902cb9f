"""One checkpointed call: run it, keep its inputs (and outputs that a policy names), and run it again in backward.

::

    forward     park the inputs ──► run, saved tensors ──► promises
    backward    the first promise is called in ──► take the inputs, run again up to the last saved tensor
                                                   └──► each promise that is still awaited gets its tensor

What a forward may do is that of `torch.utils.checkpoint`, which enters this region too: it is run twice, and must do
the same both times. Besides its arguments it may depend on weights, buffers, torch's default generators and autocast.
Buffers are put back for the second run, whose writes are dropped (`surroundings.py`); changed inputs and weights are an
error that names them. With SMPKIT_CHECK=1 the second run is compared with the first, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.errors import UsageError
from smpkit.torch.core import offloader, status
from smpkit.torch.core.offloader import KEEPING, Offloader, Parked, changed_in_place
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import Structure, as_bytes, flatten, version_of
from smpkit.torch.pipeline.random_streams import replayed_operation_streams
from smpkit.torch.recompute.surroundings import AutocastState, Buffers, RandomState, all_modules, is_checked
from smpkit.torch.recording.recorder import note_memory

_NOTHING: Final = contextlib.nullcontext()
_CPU: Final = torch.device("cpu")
_requires_grad: Final = attrgetter("requires_grad")


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
    keeper: Offloader | None = None,
) -> Any:
    """Call `function`, and recompute in backward what it would otherwise save.

    Args:
        function: calls `modules` and nothing else.
        keeper: has the inputs until backward; None: what is installed in this process.
    """
    if torch.compiler.is_compiling():  # torch.compile can trace torch's checkpoint, but not ours
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    name = name_of(modules[0])
    with checkpointing(function, modules, args, kwargs, name, keeper, preserve_rng_state=preserve_rng_state):
        return function(*args, **kwargs)


def checkpointing(
    function: Callable[..., Any],
    roots: Iterable[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    keeper: Offloader | None = None,
    **settings: Any,
) -> AbstractContextManager[object]:
    """Return a context for a call of `function` with these arguments, by which it is recomputed in backward.

    Args:
        roots: the modules that it calls, as far as they are known.
        settings: of `_Region`.
    """
    status.checkpoints = True
    if not torch.is_grad_enabled():
        return _NOTHING
    modules = all_modules(roots)
    weights: list[Any] = [weight for module in modules for weight in module._parameters.values()]
    weights = [weight for weight in weights if weight is not None and not is_lazy(weight)]
    tensors, arguments = flatten((args, kwargs), weights)  # which are not offloaded
    if modules and not any(map(_requires_grad, (*tensors, *weights))):
        return _NOTHING  # a frozen stem has no backward, so there is nothing to recompute
    if (trial := offloader.current().trial(tensors)) is not None:
        return trial
    region = _Region(function, modules, weights, tensors, arguments, name, keeper or offloader.current(), **settings)
    return region.recording(tensors)


class _Promise:
    """Stands in the graph for a tensor that its node would save; holds it from recomputation until backward takes it.

    A later backward takes what an earlier one has left, if it has not changed since.
    """

    tensor: Tensor | None = None
    version = 0


class _AllSaved(BaseException):
    """Ends a recomputation; no `except Exception` of the user's may catch it."""


class _Region:
    """A checkpointed call: what it needs to run again, and what backward awaits of that.

    Args:
        function: called by the caller in `recording`, and by the region in backward.
        modules: that the function runs, the outermost first.
        weights: those of the modules, and those in `arguments`.
        tensors: the others in `arguments`.
        name: of the module, or of the function, for reports and errors.
        keeper: has the inputs until backward.
        contexts: of the user, around the forward and around its recomputation.
        stops_early: whether a recomputation ends with the last tensor that backward needs.
        compares: whether the shapes of what a recomputation saves must be those of the forward.
        norms: that the function may run besides `modules`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        weights: Sequence[Tensor],
        tensors: Sequence[Tensor],
        arguments: Structure,
        name: str,
        keeper: Offloader,
        *,
        preserve_rng_state: bool = True,
        contexts: tuple[AbstractContextManager[object], AbstractContextManager[object]] = (_NOTHING, _NOTHING),
        stops_early: bool = True,
        compares: bool = True,
        norms: Sequence[nn.Module] = (),
    ) -> None:
        self._function, self._arguments, self._path, self._keeper = function, arguments, name, keeper
        # A layer may be called with nothing of the device's: without a tensor, or with token ids that it sends there.
        devices = {tensor.device for tensor in (*tensors, *weights) if not tensor.is_cpu}
        self._random = RandomState(devices) if preserve_rng_state else None
        self._autocast = AutocastState()
        self._default_device = _default_device()
        self._operations = replayed_operation_streams()
        self._buffers = Buffers([*modules, *norms])
        self._modules, self._weights, self._versions = modules, weights, list(map(version_of, weights))
        self._forward_context, self._recompute_context = contexts
        self._inputs: Parked | _Hooked
        self._outputs: Parked | None = None
        """With the inputs, if these are parked."""
        self._num_outputs = 0
        self._taken: list[Tensor] = []
        """The outputs of operators that are parked, while the call runs again."""
        self._promises: list[tuple[weakref.ref[_Promise], Any]] = []
        """What the forward has saved, in order."""
        # RReLU saves its noise before it has drawn it: an end at that moment would leave chance bytes (pytorch#193671).
        self._stops_early = stops_early and nn.RReLU not in map(type, modules)
        self._check = _checksum if is_checked() else _shape if compares else _nothing

    @contextlib.contextmanager
    def recording(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Return a context for the forward, whose arguments have these tensors."""
        outer, recording.region = recording.region, self
        try:
            # Under hooks (of another checkpoint, whose recomputation makes the inputs again) inputs go where other
            # saved tensors do.
            is_inside = _top_hooks() is not None
            self._inputs = _Hooked(tensors) if is_inside else self._keeper.park(self._path, tensors)
            with (
                saved_tensors_hooks(self._pack, self._unpack),
                _as_written(),
                self._operations(),
                self._forward_context,
            ):
                yield
        finally:
            recording.region = outer
        self._buffers.end_forward()

    def park_output(self, tensor: Tensor, must_leave: str | None) -> Callable[[], Tensor]:
        """Park the output of an operator, which is not run again in backward; return what gives it back then.

        `must_leave` is the operator's name, if the output may not stay on the device.
        """
        if torch._C._current_graph_task_id() != -1:
            # In a backward (an outer checkpoint runs this call again) it is needed at once, and stays.
            kept = KEEPING.park(self._path, [tensor])
            return lambda: kept.take()[0]
        if self._outputs is None:
            self._outputs = self._keeper.park(self._path, ()) if isinstance(self._inputs, _Hooked) else self._inputs
        self._outputs.add(tensor, must_leave=must_leave)
        self._num_outputs += 1
        # Not this region: its context for the recomputation holds what is returned.
        return functools.partial(self._taken.__getitem__, self._num_outputs - 1)

    def _pack(self, tensor: Tensor) -> _Promise:
        promise = _Promise()
        self._promises.append((weakref.ref(promise), self._check(tensor)))
        return promise

    def _unpack(self, promise: _Promise) -> Tensor:
        if promise.tensor is None:
            self._recompute()
        tensor, promise.tensor = promise.tensor, None
        if tensor is None:
            raise self._differs("it does not save a tensor that backward needs")
        if tensor._version != promise.version:
            raise changed_in_place(f"`{self._path}`")
        return tensor

    def _recompute(self) -> None:
        """Run the forward again, and fulfil the promises that are still awaited."""
        self._check_weights()
        promises, count = self._promises, 0
        tensors = self._inputs.take()
        if self._outputs is not None:
            parked = tensors if self._outputs is self._inputs else self._outputs.take()
            self._taken[:] = parked[-self._num_outputs :]

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count < len(promises):
                reference, expected = promises[count]
                if (actual := self._check(tensor)) != expected:
                    was, now = _text(expected), _text(actual)
                    raise self._differs(f"tensor {count} that it saves was {was}, and now is {now}")
                tensor = tensor.detach() if tensor.requires_grad else tensor
                promise = reference()
                if promise is not None:
                    promise.tensor, promise.version = tensor, tensor._version
            count += 1
            if count == len(promises) and self._stops_early:
                raise _AllSaved
            return tensor

        args, kwargs = self._arguments.fill(tensors)
        to_device = self._default_device != _default_device()
        try:
            with (
                saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.enable_grad(),
                _as_written(),
                _NOTHING if self._random is None else self._random.restored(),
                self._autocast.restored(),
                self._default_device if to_device else _NOTHING,
                self._operations(),
                self._buffers.restored(),
                self._recompute_context,
            ):
                self._function(*args, **kwargs)
        except (_AllSaved, Exception):
            # What TorchScript runs turns the end of a recomputation into an error of its own.
            if count < len(promises) or not self._stops_early:
                raise
        else:
            if count != len(promises) and self._check is not _nothing:
                raise self._differs(f"it saves {count} tensors instead of {len(promises)}")
        finally:
            self._taken.clear()
        note_memory()

    def _check_weights(self) -> None:
        if list(map(version_of, self._weights)) == self._versions:
            return
        pairs = zip(self._weights, self._versions, strict=True)
        changed = {id(weight) for weight, version in pairs if version_of(weight) != version}
        parameters = [named for module in self._modules for named in module.named_parameters()]
        name = next((f"`{name}`" for name, weight in parameters if id(weight) in changed), "a weight")
        raise UsageError(
            f"{name} of `{self._path}` was changed in place in a forward or before its backward, which runs that"
            " forward again",
            hint="run backward first (optimizer.step() changes weights), or do not checkpoint this module",
        )

    def _differs(self, how: str) -> UsageError:
        return UsageError(
            f"when backward ran the forward of `{self._path}` again, it computed something else: {how}",
            hint="it must do the same both times: nothing in it may depend on attributes, generators, globals or time"
            " that change between forward and backward",
        )


def _as_written() -> AbstractContextManager[object]:
    """Have TorchScript run its operations as they are written.

    Its first run is a trial, and those after it are optimised and save other tensors, or the same in another order.
    """
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


class _Hooked:
    """Inputs that are saved through the hooks around the call, as other tensors of the graph are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        pack, self._unpack = _top_hooks()
        with torch.no_grad():
            self._inputs = [(pack(tensor.detach()), tensor.requires_grad) for tensor in tensors]

    def take(self) -> list[Tensor]:
        taken = [(self._unpack(packed), requires_grad) for packed, requires_grad in self._inputs]
        return [tensor.detach().requires_grad_() if requires_grad else tensor for tensor, requires_grad in taken]


class _Recording(threading.local):
    """The checkpointed call whose forward runs in a thread; suspended microbatches have threads of their own."""

    region: _Region | None = None


recording: Final = _Recording()


def _top_hooks() -> Any:
    """Return the saved-tensor hooks around the running code; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _default_device() -> torch.device:
    """Return where factories make tensors; a mode, which the threads of backward do not inherit."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _nothing(_tensor: Tensor) -> tuple[Any, ...]:
    return ()


def _checksum(tensor: Tensor) -> tuple[Any, ...]:
    # Not of uint8: LSTMs save the workspace of their kernel, which leaves some of its bytes to chance.
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype is torch.uint8:
        return _shape(tensor)
    plain = tensor.detach().resolve_neg().resolve_conj().contiguous().cpu()
    return (*_shape(tensor), zlib.crc32(as_bytes(plain).numpy().tobytes()))


def _text(expected: tuple[Any, ...]) -> str:
    shape, dtype, device, *checksum = expected
    content = f" (CRC {checksum[0]:08x})" if checksum else ""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{content}"


_names: Final[weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, str]]] = (
    weakref.WeakKeyDictionary()
)
"""The paths of all modules, by the wrapped model that they are in."""


def name_of(module: nn.Module) -> str:
    """Return the path of a module in the wrapped model, or the name of its class if it is in none."""
    root = None if state.model is None else state.model.module
    if root is None:
        return type(module).__name__
    if root not in _names:
        _names[root] = weakref.WeakKeyDictionary({part: name for name, part in root.named_modules() if name})
    return _names[root].get(module) or type(module).__name__
