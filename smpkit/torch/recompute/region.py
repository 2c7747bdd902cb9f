"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

::

    forward     keep the inputs ──► run, saved tensors ──► promises
    backward    the first promise is called in ──► take the inputs, run again up to the last saved tensor
                                                   └──► each promise that is still awaited gets its tensor

The hooks are our own (`CheckpointRegion`): torch's checkpoint takes more time for every call, and cannot say which
layer failed. Inputs are saved through the hooks around the call, so that offloading sees them, and an outer checkpoint
can make them again.

A mask that the caller has put on the module, a counter, or a generator of its own would by the time of backward be
those of a later microbatch; BatchNorm would count every microbatch twice; spectral normalisation would take two steps
and compute with other weights. So what a module reads and changes besides its arguments is restored for recomputation
(`core/module_state.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.errors import UsageError
from smpkit.torch.core.module_state import ModuleState
from smpkit.torch.core.offload_hooks import current_offloader, offload_inputs
from smpkit.torch.core.rng_and_autocast import AutocastState, RandomState
from smpkit.torch.core.runtime import state
from smpkit.torch.core.status import note_checkpoint
from smpkit.torch.core.tensor_spec import map_tensors, version_of
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.distributed.recorder import note_memory
from smpkit.torch.offload.saved_storage import check_version
from smpkit.torch.pipeline.random_streams import replayed_operation_streams, will_be_recomputed

__all__ = ["Offload", "name_of", "run_checkpointed"]

Offload = Callable[[str], AbstractContextManager[object]]
"""Returns a context in which what autograd saves leaves the device; takes the path of the module, for reports."""

_NOTHING: Final = contextlib.nullcontext()
_CPU: Final = torch.device("cpu")


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
    offload: Offload = offload_inputs,
) -> Any:
    """Call `function`, and recompute in backward what it would otherwise save.

    Args:
        function: calls `modules` and nothing else.
        preserve_rng_state: whether recomputation draws the same random numbers.
        offload: what offloads the inputs, by the path of the (first) module.

    Raises:
        UsageError: in backward, if the call cannot be repeated.
    """
    if torch.compiler.is_compiling():  # torch.compile can trace torch's checkpoint, but not ours
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    note_checkpoint()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = CheckpointRegion(function, modules, args, kwargs, preserve_rng_state)
    if not any(tensor.requires_grad for tensor in region.tensors) and not any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    ):
        return function(*args, **kwargs)  # a frozen stem has no backward, so there is nothing to recompute
    # Inside another checkpointed call, that call's recomputation makes the inputs again: do not offload them.
    skips = will_be_recomputed() or (offload is offload_inputs and current_offloader() is None)
    return region.run(args, kwargs, _NOTHING if skips else offload(name_of(modules[0])))


class _TensorSlot:
    """Stands for an input tensor."""

    # Not a dataclass: `map_leaves` would take it for one of the user's containers and look inside.

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Promise:
    """Stands in the graph for a tensor that its node would save; holds it from recomputation until backward takes it.

    A later backward takes what an earlier one has left, if it has not changed since.
    """

    tensor: Tensor | None = None
    version = 0


class _AllSaved(BaseException):
    """Ends a recomputation; no `except Exception` of the user's may catch it."""


class CheckpointRegion:
    """A checkpointed call: what it needs to run again, and what backward awaits of that."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        self.tensors: list[Tensor] = []
        """The input tensors, each once, among the arguments or on the modules; until `run`."""
        self._function = function
        self._module = modules[0]
        self._slots: dict[int, _TensorSlot] = {}
        self._args = [map_tensors(self._slot, value) for value in args]
        self._kwargs = {key: map_tensors(self._slot, value) for key, value in kwargs.items()}
        self._state = ModuleState(modules, self._slot, generators=preserve_rng_state)
        self._slots.clear()  # keyed by `id`, which another tensor can get once these are freed
        devices = {tensor.device for tensor in self.tensors if not tensor.is_cpu}
        self._random = RandomState(devices) if preserve_rng_state and not state.tracing else None
        self._autocast = AutocastState(devices)
        self._default_device = _default_device()
        self._operations = replayed_operation_streams()
        self._inputs: list[tuple[Any, Callable[[Any], Tensor] | None, int, bool]] = []
        """Of each: the tensor, or the handle of the hooks around the call; their other half; its version; whether it
        requires a gradient."""
        self._is_overwritten = False
        """Whether the call has changed an input in place."""
        self._promises: list[tuple[weakref.ref[_Promise], tuple[torch.Size, torch.dtype, torch.device]]] = []
        """What the forward has saved, in order."""
        self._is_done = False

    def _slot(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):  # weights are not offloaded
            return tensor
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = _TensorSlot(len(self.tensors))
            self.tensors.append(tensor)
        return slot

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], offloading: AbstractContextManager[object]) -> Any:
        """Run the forward in the context that offloads its inputs, or records what the call costs."""
        tensors, self.tensors = self.tensors, []  # from here on only the inputs' hooks may hold them
        with offloading:
            self._inputs = [_save(tensor) for tensor in tensors]
            with saved_tensors_hooks(self._pack, self._unpack), self._operations():
                output = self._function(*args, **kwargs)
        self._is_done = True
        versions = [version for _, _, version, _ in self._inputs]
        self._is_overwritten = versions != [version_of(tensor) for tensor in tensors]
        self._state.end_forward()
        return output

    def _pack(self, tensor: Tensor) -> _Promise:
        promise = _Promise()
        self._promises.append((weakref.ref(promise), (tensor.shape, tensor.dtype, tensor.device)))
        return promise

    def _unpack(self, promise: _Promise) -> Tensor:
        if promise.tensor is None:
            self._recompute()
        tensor, promise.tensor = promise.tensor, None
        assert tensor is not None
        if tensor._version != promise.version:
            check_version(tensor, promise.version, self._name)
        return tensor

    def _recompute(self) -> None:
        """Run the forward again, and fulfil the promises that are still awaited."""
        tensors = self._taken_inputs()
        promises, count = self._promises, 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count == len(promises):  # code of the user's that cleans up after `_AllSaved`
                raise _AllSaved
            reference, expected = promises[count]
            if (found := (tensor.shape, tensor.dtype, tensor.device)) != expected:
                raise self._differs(f"tensor {count} that it saves was {_text(*expected)}, and now is {_text(*found)}")
            count += 1
            tensor = tensor.detach() if tensor.requires_grad else tensor
            promise = reference()
            if promise is not None:
                promise.tensor, promise.version = tensor, tensor._version
            if count == len(promises):
                raise _AllSaved
            return tensor

        def kept(value: Any) -> Any:
            return tensors[value.index] if type(value) is _TensorSlot else value

        def filled(value: Any) -> Any:  # fast path: most arguments are tensors, not containers
            return tensors[value.index] if type(value) is _TensorSlot else map_leaves(kept, value)

        args = [filled(value) for value in self._args]
        kwargs = {key: filled(value) for key, value in self._kwargs.items()}
        to_device = self._default_device != _default_device()
        try:
            with (
                saved_tensors_hooks(pack, _as_it_is),
                torch.enable_grad(),
                _NOTHING if self._random is None else self._random.restored(),
                self._autocast.restored(),
                self._default_device if to_device else _NOTHING,
                self._operations(),
                # A backward in the forward finds everything as the forward has left it so far.
                self._state.restored(kept) if self._is_done else _NOTHING,
            ):
                self._function(*args, **kwargs)
        except _AllSaved:
            note_memory()
            return
        raise self._differs(f"it saves {count} tensors instead of {len(promises)}")

    def _taken_inputs(self) -> list[Tensor]:
        if self._is_overwritten:
            raise UsageError(
                f"{self._name} changes a tensor in place that it was given, or that it has as an attribute, so it"
                " cannot be run again for backward",
                hint="write `x = x + y` instead of `x += y`, or clone the tensor first",
            )
        tensors = list[Tensor]()
        for tensor, unpack, version, requires_grad in self._inputs:
            if unpack is not None:
                taken = unpack(tensor)
                tensors.append(taken.detach().requires_grad_() if requires_grad else taken)
                continue
            if version_of(tensor) != version:
                check_version(tensor, version, self._name)
            tensors.append(tensor)
        return tensors

    def _differs(self, how: str) -> UsageError:
        return UsageError(
            f"when backward ran the forward of {self._name} again, it computed something else: {how}",
            hint="it must do the same both times: no branch or shape in it may depend on globals, time, or objects that"
            " change",
        )

    @property
    def _name(self) -> str:
        return f"`{name_of(self._module)}`"


def _save(tensor: Tensor) -> tuple[Any, Callable[[Any], Tensor] | None, int, bool]:
    """Save an input as a node of the graph would: through the hooks around the call, if there are any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return tensor, None, version_of(tensor), tensor.requires_grad
    pack, unpack = hooks
    with torch.no_grad():
        return pack(tensor.detach()), unpack, version_of(tensor), tensor.requires_grad


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _default_device() -> torch.device:
    """Return where factories make tensors; a mode, which the threads of backward do not inherit."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


class _ModuleNames:
    """Names of the modules of one model, the last that was wrapped."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


_module_names = _ModuleNames()


def name_of(module: nn.Module) -> str:
    """Return the path of a module in the wrapped model, or the name of its class if it is in none."""
    root = None if state.model is None else state.model.module
    if root is not None and (_module_names.root is None or _module_names.root() is not root):
        _module_names.root = weakref.ref(root)
        _module_names.names = weakref.WeakKeyDictionary({each: name for name, each in root.named_modules() if name})
    return _module_names.names.get(module) or type(module).__name__
