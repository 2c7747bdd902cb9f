"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

It runs through torch's non-reentrant checkpoint, which saves positional tensors through the ambient saved-tensor hooks,
so that offloading sees them, and holds references to all other arguments. So every tensor that the call reads, among
its arguments or on the module, is taken out, each once, and passed by position (`CheckpointRegion`).

torch's checkpoint knows arguments and the default random generators only. A mask that the caller has put on the module,
a counter, or a generator of its own would by the time of backward be those of a later microbatch; BatchNorm would count
every microbatch twice; spectral normalisation would take two steps and compute with other weights. So what a module
reads and changes besides its arguments is restored for recomputation (`ModuleStateSnapshot`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.torch.core.offload_hooks import offload_inputs
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.pipeline.random_streams import replayed_operation_streams, will_be_recomputed

__all__ = ["CheckpointRegion", "name_of", "run_checkpointed"]

_COMMON: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has; looked up for every attribute at every call."""
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})
"""Attributes of these types are restored for recomputation; others are objects of the user, too expensive to copy."""
_mutated_buffers: Final[weakref.WeakKeyDictionary[nn.Module, set[str]]] = weakref.WeakKeyDictionary()
"""The buffers that a module's forward has changed so far; a module is listed from its first call on."""


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    """Call `function`, and recompute in backward what it would otherwise save.

    Args:
        function: calls `modules` and nothing else.
        name: path of the (first) module as in `state_dict`, for reports and errors of offloading.
        preserve_rng_state: whether recomputation draws the same random numbers.
    """
    if torch.compiler.is_compiling():  # torch.compile can trace torch's checkpoint, but not ours
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = CheckpointRegion(function, modules, args, kwargs, preserve_rng_state)
    if not any(tensor.requires_grad for tensor in region.tensors) and not any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    ):
        return function(*args, **kwargs)  # a frozen stem has no backward, so there is nothing to recompute
    # From here on only torch may hold the inputs, through the saved-tensor hooks, or offloading would free nothing.
    tensors, region.tensors = region.tensors, []
    # Inside another checkpointed call, that call's recomputation makes the inputs again: do not offload them.
    with contextlib.nullcontext() if will_be_recomputed() else offload_inputs(name):
        return torch_checkpoint(
            region, *tensors, use_reentrant=False, preserve_rng_state=preserve_rng_state and not state.tracing
        )


class _TensorSlot:
    """Stands for an input tensor."""

    # Not a dataclass: `map_leaves` would take it for one of the user's containers and look inside.

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CheckpointRegion:
    """A checkpointed call without its tensors, which torch keeps."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._function = function
        self._slots: dict[int, _TensorSlot] = {}
        self._args, self._kwargs = map_tensors(self._slot, (args, kwargs))
        self._snapshot = ModuleStateSnapshot(modules, self._slot, generators=preserve_rng_state)
        self._slots.clear()  # keyed by `id`, which another tensor can get once these are freed
        self._operations = replayed_operation_streams()
        self._is_done = False

    def _slot(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):  # weights are not offloaded
            return tensor
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = _TensorSlot(len(self.tensors))
            self.tensors.append(tensor)
        return slot

    def __call__(self, *tensors: Tensor) -> Any:
        def kept(value: Any) -> Any:
            return tensors[value.index] if type(value) is _TensorSlot else value

        def filled(value: Any) -> Any:  # fast path: most arguments are tensors, not containers
            return tensors[value.index] if type(value) is _TensorSlot else map_leaves(kept, value)

        args = [filled(value) for value in self._args]
        kwargs = {key: filled(value) for key, value in self._kwargs.items()}
        if self._is_done:
            with self._operations(), self._snapshot.restored(kept):
                return self._function(*args, **kwargs)
        with self._operations():
            output = self._function(*args, **kwargs)
        self._is_done = True
        self._snapshot.end_forward()
        return output


@dataclass(frozen=True)
class _Buffer:
    """A buffer at the time of a call."""

    module: nn.Module
    name: str
    value: Tensor
    version: int
    copy: Tensor | None
    """Its content; None if recomputation does not need it."""

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.name)

    def has_changed(self) -> bool:
        return self.now is not self.value or _version(self.value) != self.version or _updates_statistics(self.module)


class ModuleStateSnapshot:
    """What the modules of one checkpointed call read besides their arguments.

    Args:
        modules: the roots of what is called.
        keep: returns a placeholder for a tensor that is saved for backward; called for each tensor attribute.
        generators: whether the modules' own generators must draw the same numbers again.
    """

    def __init__(self, modules: Sequence[nn.Module], keep: Callable[[Tensor], Any], *, generators: bool) -> None:
        everything = list({id(each): each for root in modules for each in root.modules()}.values())
        self._modes = [(each, each.training) for each in everything]
        self._custom_modules = [each for each in everything if _is_custom(type(each))]
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for module in self._custom_modules:
            for name, value in vars(module).items():
                if name in _COMMON:
                    continue
                if type(value) in _SIMPLE:
                    self._attributes.append((module, name, value))
                elif isinstance(value, Tensor):
                    self._attributes.append((module, name, keep(value)))
                elif generators and isinstance(value, torch.Generator):
                    self._generators.append((value, value.get_state()))
        self._buffers: list[_Buffer] = []
        for module in everything:
            if not module._buffers:
                continue
            for name, value in module._buffers.items():
                if value is None:
                    continue
                # Whether a buffer changes is known after a module's first call, which copies them all and drops the
                # copies of those that did not. A norm's statistics do not affect its output in training: no copy.
                needed = name in _mutated_buffers.get(module, (name,)) and not isinstance(module, _NormBase)
                copy = value.clone() if needed else None
                self._buffers.append(_Buffer(module, name, value, _version(value), copy))

    def end_forward(self) -> None:
        """Note which buffers the call has changed, and drop the others."""
        for buffer in self._buffers:
            _mutated_buffers.setdefault(buffer.module, set())
        self._buffers = [buffer for buffer in self._buffers if buffer.has_changed()]
        for buffer in self._buffers:
            _mutated_buffers[buffer.module].add(buffer.name)

    @contextlib.contextmanager
    def restored(self, kept: Callable[[Any], Any]) -> Iterator[None]:
        """Restore inside what the call has read.

        Args:
            kept: returns the tensor for a placeholder of `keep`, and anything else unchanged.
        """
        switched = [(each, each.training) for each, mode in self._modes if each.training is not mode]
        attributes = [(vars(each), dict(vars(each))) for each in self._custom_modules]
        states = [(generator, generator.get_state()) for generator, _ in self._generators]
        buffers = [(buffer, buffer.now) for buffer in self._buffers]
        try:
            for each, mode in switched:
                each.training = not mode
            for module, name, value in self._attributes:
                vars(module)[name] = kept(value)
            for generator, state in self._generators:
                generator.set_state(state)
            for buffer, now in buffers:
                found = now if buffer.copy is None else buffer.copy
                buffer.module._buffers[buffer.name] = None if found is None else found.clone()
            yield
        finally:
            for each, mode in switched:
                each.training = mode
            for where, content in attributes:
                where.clear()
                where.update(content)
            for generator, state in states:
                generator.set_state(state)
            for buffer, now in buffers:
                buffer.module._buffers[buffer.name] = now


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _updates_statistics(module: nn.Module) -> bool:
    """Return whether this is a norm that updates its statistics, which does not change their versions."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _is_custom(kind: type[nn.Module]) -> bool:
    """Return whether a module is not one of torch's, which keep no state between calls but buffers."""
    return not kind.__module__.startswith("torch.nn.modules.")


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
