"""One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward.

Lowered to torch's non-reentrant checkpoint, which keeps what it is handed as positional tensors through the ambient
saved-tensor hooks (so that offloading sees them) and holds on to everything else. So every tensor that the call reads,
wherever it stands among the arguments or on the module, is taken out, each once, and handed over by position.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall, OriginalCall
from smpkit.torch.core.offload_hooks import offload_inputs
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.pipeline.random_streams import replayed_operation_streams, will_be_recomputed
from smpkit.torch.pipeline.stage_tensor import microbatch_between_units
from smpkit.torch.pipeline.units import pp_rank_of, pp_ranks_of, run_together
from smpkit.torch.recompute.module_state import ModuleStateSnapshot

__all__ = [
    "CheckpointRegion",
    "ModuleCheckpoint",
    "SequentialCheckpoint",
    "cannot_checkpoint",
    "check_checkpoint_ranks",
    "cut_groups",
    "is_plain",
    "name_of",
    "run_checkpointed",
]


# --- What modules are called: their paths in the wrapped model, as in its state dict ----------------------------------


class _Known:
    """The names of the model that was asked about last."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


_known = _Known()


def name_of(module: nn.Module) -> str:
    """Return the path of a module in the wrapped model, or the name of its class if it is in none."""
    root = None if state.model is None else state.model.module
    if root is not None and (_known.root is None or _known.root() is not root):
        _known.root = weakref.ref(root)
        _known.names = weakref.WeakKeyDictionary({each: name for name, each in root.named_modules() if name})
    return _known.names.get(module) or type(module).__name__


# --- One checkpointed call: run it, keep its inputs and nothing else, and run it again in backward --------------------


def run_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    """Call `function`; its backward computes again what it would otherwise keep.

    Args:
        function: calls `modules` and nothing else.
        name: path of the (first) module as in `state_dict`, for those who take the inputs away from the device.
        preserve_rng_state: whether recomputation draws the same random numbers.
    """
    if torch.compiler.is_compiling():  # torch.compile around us knows torch's checkpoint, and nothing of ours
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = CheckpointRegion(function, modules, args, kwargs, preserve_rng_state)
    if not _needs_backward(region.tensors, modules):
        return function(*args, **kwargs)
    tensors, region.tensors = region.tensors, []  # from here on only torch holds them, and those who offload
    # Inside another checkpointed call these are not kept: that one makes them again.
    with contextlib.nullcontext() if will_be_recomputed() else offload_inputs(name):
        return torch_checkpoint(
            region, *tensors, use_reentrant=False, preserve_rng_state=preserve_rng_state and not state.tracing
        )


class _TensorSlot:
    """Stands for an input tensor; no dataclass, which would count as a container of the user's."""

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
        self._slots.clear()  # ids mean nothing once the tensors are gone
        self._operations = replayed_operation_streams()
        self._is_done = False

    def _slot(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):  # weights stay where they are
            return tensor
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = _TensorSlot(len(self.tensors))
            self.tensors.append(tensor)
        return slot

    def __call__(self, *tensors: Tensor) -> Any:
        def kept(value: Any) -> Any:
            return tensors[value.index] if type(value) is _TensorSlot else value

        def filled(value: Any) -> Any:  # most arguments are tensors: no need to look for containers
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


def _needs_backward(tensors: Iterable[Tensor], modules: Sequence[nn.Module]) -> bool:
    """Return whether there is anything to compute again: a frozen stem has no backward."""
    return any(tensor.requires_grad for tensor in tensors) or any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    )


# --- Checkpoint one module as a whole, if it lies on one pipeline rank ------------------------------------------------


_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""Modules that were said to run un-checkpointed."""


class ModuleCheckpoint:
    """Checkpoints each call of `module`."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self._module = module
        self._preserve_rng_state = preserve_rng_state

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if pp_rank_of((args, kwargs)) is not None:
            _warn_once(self._module, "holds no parameters and no module that does, so it lies on no pipeline rank")
            return original(*args, **kwargs)
        if any(map(_is_filled, [*args, *kwargs.values()])):
            _warn_once(self._module, "is handed a cache that is filled, and filling it once more would change it")
            return original(*args, **kwargs)
        # Layers of Hugging Face append to an empty cache, in training to nobody's use; recomputing, they would again.
        args = tuple([None if _is_cache(each) else each for each in args])
        kwargs = {key: None if _is_cache(each) else each for key, each in kwargs.items()}
        name, preserve = name_of(self._module), self._preserve_rng_state
        return run_checkpointed(original, [self._module], name, args, kwargs, preserve_rng_state=preserve)


def check_checkpoint_ranks(root: nn.Module, placement: Mapping[str, int]) -> None:
    """Check that modules to be checkpointed lie on one rank each, once the partition is known.

    Raises:
        UsageError: one does not, and the user placed it so.
    """
    for name, module in root.named_modules():
        call = ModuleCall.of(module)
        if isinstance(call.checkpointing, ModuleCheckpoint) and cannot_checkpoint(module, pp_ranks_of(name, placement)):
            call.checkpointing = None


def cannot_checkpoint(module: nn.Module, pp_ranks: Collection[int]) -> bool:
    """Return whether a module on pipeline ranks `pp_ranks` cannot be checkpointed, after saying so once.

    Raises:
        UsageError: it cannot, and the user placed it so.
    """
    if len(pp_ranks) < 2:
        return False
    ranks = " and ".join(map(str, sorted(pp_ranks)))
    if not state.cfg.auto_partition:
        raise UsageError(
            f"`{name_of(module)}` is to be checkpointed, but parts of it were placed on pipeline ranks {ranks}",
            hint="place it on one rank with smp.set_partition, or checkpoint the modules in it",
        )
    _warn_once(module, f"lies on pipeline ranks {ranks}")
    return True


def _warn_once(module: nn.Module, why: str) -> None:
    if module not in _warned and (not state.initialized or state.rank == 0):
        warnings.warn(f"`{name_of(module)}` is not checkpointed: it {why}", UserWarning, stacklevel=2)
    _warned.add(module)


def _is_cache(argument: object) -> bool:
    return hasattr(argument, "get_seq_length")


def _is_filled(argument: Any) -> bool:
    return _is_cache(argument) and bool(argument.get_seq_length())


# --- Checkpoint the layers of an `nn.Sequential` in groups, each of which lies on one pipeline rank -------------------


class SequentialCheckpoint:
    """Checkpoints each call of a Sequential in groups of neighbouring layers.

    Args:
        size: how many layers a group has at most; None for as many as lie on one rank.
    """

    def __init__(self, module: nn.Sequential, preserve_rng_state: bool, size: int | None) -> None:
        self._module = module
        self._preserve_rng_state = preserve_rng_state
        self._size = size

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        """Run the Sequential's own call, with its hooks, around our loop over its layers."""
        attributes = vars(self._module)
        attributes["forward"] = self._forward
        try:
            return original(*args, **kwargs)
        finally:
            attributes.pop("forward", None)  # a parked microbatch may have been faster

    def _forward(self, input: Any) -> Any:  # noqa: A002 - nn.Sequential's own name, which callers may use
        spans_ranks = microbatch_between_units() is not None and len(ModuleCall.of(self._module).pp_ranks) > 1
        layers = list(self._module)
        for group in cut_groups([_ranks_of(layer) if spans_ranks else frozenset() for layer in layers], self._size):
            members = [layers[index] for index in group]
            if len(members) == 1:
                input = self._run_one(members[0], input)  # noqa: A001
            elif spans_ranks:
                input = run_together(self._as_group(members), {name_of(each): each for each in members}, input)  # noqa: A001
            else:
                input = self._as_group(members)(input)  # noqa: A001
        return input

    def _run_one(self, layer: nn.Module, value: Any) -> Any:
        call = ModuleCall.of(layer)
        refused = cannot_checkpoint(layer, call.pp_ranks)
        return call.run(None if refused else ModuleCheckpoint(layer, self._preserve_rng_state), (value,), {})

    def _as_group(self, layers: Sequence[nn.Module]) -> OriginalCall:
        def one_after_the_other(value: Any) -> Any:
            for layer in layers:
                value = layer(value)
            return value

        def checkpointed(value: Any) -> Any:
            name, preserve = name_of(layers[0]), self._preserve_rng_state
            return run_checkpointed(one_after_the_other, layers, name, (value,), {}, preserve_rng_state=preserve)

        return checkpointed


def is_plain(module: nn.Sequential) -> bool:
    """Return whether calling the module calls its layers one after the other and does nothing else."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return not own_forward and not ModuleCall.of(module).is_compiled


def cut_groups(ranks_of_layers: Sequence[frozenset[int] | None], size: int | None) -> Iterator[list[int]]:
    """Group neighbours that lie on the same rank.

    Args:
        ranks_of_layers: the rank of each layer; an empty set for one that holds nothing and goes with its neighbours,
            None for one that must stay alone.
        size: how many a group has at most.
    """
    group: list[int] = []
    pp_ranks: frozenset[int] = frozenset()
    for index, ranks in enumerate(ranks_of_layers):
        fits = ranks is not None and len(pp_ranks | ranks) < 2 and len(group) != size
        if group and not fits:
            yield group
            group, pp_ranks = [], frozenset()
        if ranks is None:
            yield [index]
        else:
            group.append(index)
            pp_ranks |= ranks
    if group:
        yield group


def _ranks_of(layer: nn.Module) -> frozenset[int] | None:
    call = ModuleCall.of(layer)
    return None if call.dispatch is None or len(call.pp_ranks) > 1 else call.pp_ranks
