"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

It runs through torch's non-reentrant checkpoint, which saves positional tensors through the ambient saved-tensor hooks,
so that offloading sees them, and holds references to all other arguments. So every tensor that the call reads, among
its arguments or on the module, is taken out, each once, and passed by position (`CheckpointRegion`).

torch's checkpoint knows arguments and the default random generators only. A mask that the caller has put on the module,
a counter, or a generator of its own would by the time of backward be those of a later microbatch; BatchNorm would count
every microbatch twice; spectral normalisation would take two steps and compute with other weights. So what a module
reads and changes besides its arguments is restored for recomputation (`core/module_state.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.torch.core.module_state import ModuleState
from smpkit.torch.core.offload_hooks import offload_inputs
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.pipeline.random_streams import replayed_operation_streams, will_be_recomputed

__all__ = ["CheckpointRegion", "Offload", "name_of", "run_checkpointed"]

Offload = Callable[[str], AbstractContextManager[object]]
"""Returns a context in which what autograd saves leaves the device; takes the path of the module, for reports."""


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
    offload: Offload = offload_inputs,
) -> Any:
    """Call `function`, and recompute in backward what it would otherwise save.

    Args:
        function: calls `modules` and nothing else.
        name: path of the (first) module as in `state_dict`, for reports and errors of offloading.
        preserve_rng_state: whether recomputation draws the same random numbers.
        offload: what offloads the inputs, by `name`.
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
    with contextlib.nullcontext() if will_be_recomputed() else offload(name):
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
        self._args = [map_tensors(self._slot, value) for value in args]
        self._kwargs = {key: map_tensors(self._slot, value) for key, value in kwargs.items()}
        self._state = ModuleState(modules, self._slot, generators=preserve_rng_state)
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
            with self._operations(), self._state.restored(kept):
                return self._function(*args, **kwargs)
        with self._operations():
            output = self._function(*args, **kwargs)
        self._is_done = True
        self._state.end_forward()
        return output


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
