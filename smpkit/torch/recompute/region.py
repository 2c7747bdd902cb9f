"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

::

    forward     keep the inputs ──► run, saved tensors ──► promises
    backward    the first promise is called in ──► take the inputs, run again up to the last saved tensor
                                                   └──► each promise that is still awaited gets its tensor

The hooks are our own (`CheckpointRegion`): torch's checkpoint takes more time for every call, and cannot say which
layer failed. Inputs are saved through the hooks around the call, so that offloading sees them, and an outer checkpoint
can make them again.

A forward must do the same both times. Buffers are put back for the second run (`core/buffers.py`): BatchNorm would
count every microbatch twice, and spectral normalisation would compute with other weights. Changed inputs and weights
are an error that names the layer. With SMPKIT_CHECK=1 all saved tensors are compared, too.
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
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.errors import UsageError
from smpkit.torch.core.buffers import Buffers, is_checked
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
    if not any(tensor.requires_grad for tensor in (*region.tensors, *region.weights)):
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
        """The tensors among the arguments, each once; until `run`."""
        parameters: list[Any] = [each for module in modules for each in module.parameters()]
        self.weights: list[Tensor] = [each for each in parameters if not is_lazy(each)]
        self._function = function
        self._modules = modules
        self._slots: dict[int, _TensorSlot] = {}
        self._args = [map_tensors(self._slot, value) for value in args]
        self._kwargs = {key: map_tensors(self._slot, value) for key, value in kwargs.items()}
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
        self._promises: list[tuple[weakref.ref[_Promise], _Look]] = []
        """What the forward has saved, in order."""
        self._look = _look_inside if is_checked() else _look

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
            self._buffers, self._versions = Buffers(self._modules), [*map(version_of, self.weights)]
            with saved_tensors_hooks(self._pack, self._unpack), self._operations():
                output = self._function(*args, **kwargs)
        versions = [version for _, _, version, _ in self._inputs]
        self._is_overwritten = versions != [version_of(tensor) for tensor in tensors]
        self._buffers.end_forward()
        return output

    def _pack(self, tensor: Tensor) -> _Promise:
        promise = _Promise()
        self._promises.append((weakref.ref(promise), self._look(tensor)))
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
        self._check_weights()
        tensors = self._taken_inputs()
        promises, count = self._promises, 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count == len(promises):  # code of the user's that cleans up after `_AllSaved`
                raise _AllSaved
            reference, expected = promises[count]
            if (found := self._look(tensor)) != expected:
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
                self._buffers.restored(),
            ):
                self._function(*args, **kwargs)
        except _AllSaved:
            note_memory()
            return
        raise self._differs(f"it saves {count} tensors instead of {len(promises)}")

    def _taken_inputs(self) -> list[Tensor]:
        if self._is_overwritten:
            raise UsageError(
                f"{self._name} changes a tensor in place that it was given, so it cannot be run again for backward",
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

    def _check_weights(self) -> None:
        if [*map(version_of, self.weights)] == self._versions:
            return
        pairs = zip(self.weights, self._versions, strict=True)
        changed = {id(weight) for weight, version in pairs if version_of(weight) != version}
        parameters = [each for module in self._modules for each in module.named_parameters()]
        name = next((f"`{name}`" for name, each in parameters if id(each) in changed), "a weight")
        raise UsageError(
            f"{name} of {self._name} was changed in place in a forward or before its backward, which runs that forward"
            " again",
            hint="run backward first (optimizer.step() changes weights), or do not checkpoint this module",
        )

    def _differs(self, how: str) -> UsageError:
        return UsageError(
            f"when backward ran the forward of {self._name} again, it computed something else: {how}",
            hint="it must do the same both times: nothing in it may depend on attributes, generators, globals or time"
            " that change between forward and backward",
        )

    @property
    def _name(self) -> str:
        return f"`{name_of(self._modules[0])}`"


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


_Look = tuple[torch.Size, torch.dtype, torch.device, int | None]
"""Of a saved tensor, what both runs must have alike; the last is a checksum, if somebody wants one."""


def _look(tensor: Tensor) -> _Look:
    return tensor.shape, tensor.dtype, tensor.device, None


def _look_inside(tensor: Tensor) -> _Look:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return _look(tensor)
    plain = tensor.detach().resolve_neg().resolve_conj().cpu().flatten()
    return *_look(tensor)[:3], hash(plain.view(torch.uint8).numpy().tobytes())


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device, checksum: int | None) -> str:
    content = "" if checksum is None else f" with content {checksum % (1 << 32):08x}"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{content}"


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
