"""Dispatch the calls of modules and operations to the rank that runs them; the others make placeholders.

`install` gives every module a `ModuleCall` by what it lies on::

    model                    the root                runs on every rank, as any module
    ├── stack                on several ranks        runs on every rank
    ├── encoder              encloses units of one   runs on its owner: its units are called together
    │   ├── layer 0          a unit                  runs on its owner
    │   │   └── attention    nested in a unit        as any module, inside the unit's call
    │   └── layer 1          a unit                  runs on its owner
    ├── dropout              without weights         runs where its input is, if it is torch's or applies a Function
    └── head                 a unit of another rank  runs on its owner

An operation between units (`x + y`) runs where its parameter is, else where most of its bytes are
(`owner_of_operation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES, tensors_in
from smpkit.torch.distributed.deadline import add_error_context
from smpkit.torch.pipeline.outputs import (
    active_collectors,
    add_collected,
    collector_key,
    returning_collected,
)
from smpkit.torch.pipeline.random_streams import RandomStreams
from smpkit.torch.pipeline.stage_context import NO_RANK, StageContext
from smpkit.torch.pipeline.stage_tensor import Callee, Current, StageTensor, current_microbatch
from smpkit.torch.placement.dtensor import is_dtensor
from smpkit.torch.placement.placement import enclosing_unit, names_by_module, pp_ranks_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_IN_VMAP: Final = ("vmap: called random operation", "BatchedTensorImpl")
"""Torch's errors under torch.vmap: of a module that draws random numbers, and of one whose tensors are inspected."""
_MIXED: Final = "got mixed torch.Tensor and DTensor"
"""Torch's words for a call with plain tensors of a module whose weights are divided."""


class _Where(Enum):
    """Where a module runs; see the drawing at the top."""

    EVERYWHERE = auto()
    ENCLOSING = auto()
    UNIT = auto()
    NESTED = auto()
    AT_INPUT = auto()


def install(root: nn.Module, placement: Mapping[str, int], stage: StageContext) -> None:
    """Dispatch the calls of every module of `root`, and give each a stream of random numbers of its own."""
    for module, names in names_by_module(root).items():
        name = names[0]
        pp_ranks = pp_ranks_of(name, placement)
        if module is root and pp_ranks and name not in placement:
            # No rank skips it, so the stream may go on where the modules in it have left it.
            stage.modules[name], ModuleCall.on(module).pp_ranks = module, frozenset(pp_ranks)
            continue
        is_remote = len(pp_ranks) == 1 and stage.rank not in pp_ranks
        (stage.remote_modules if is_remote else stage.modules)[name] = module
        if isinstance(module, _CONTAINERS) and pp_ranks:
            continue  # they are never called
        if len(pp_ranks) > 1:
            where = _Where.EVERYWHERE
        elif not pp_ranks:
            if not _runs_whole(module):
                continue
            where = _Where.AT_INPUT
        else:
            unit = enclosing_unit(name, placement)
            where = _Where.ENCLOSING if unit is None else _Where.UNIT if unit == name else _Where.NESTED
        call = _DispatchedCall(module, name or "model", where, stage.random, pp_ranks)
        # A module that several units share is a part of each of them.
        if len(pp_ranks) == 1 and stage.rank != NO_RANK:
            call.is_here = any(stage.rank in pp_ranks_of(other, placement) for other in names)
        module._compiled_call_impl = call


def install_streams(root: nn.Module, units: Collection[str], random: RandomStreams) -> None:
    """Give the modules of a model without a pipeline the streams of random numbers that they would have over one."""
    above: set[str] = set()
    for unit in units:
        parents = unit.split(".")[:-1]
        above.update(".".join(parents[:depth]) for depth in range(len(parents) + 1))
    placement = dict.fromkeys(units, 0)
    for name, module in root.named_modules():
        if isinstance(module, _CONTAINERS) or enclosing_unit(name.rpartition(".")[0], placement) is not None:
            continue
        if module is root and name in above:
            continue
        if name in placement or name in above or _runs_whole(module):
            where = _Where.EVERYWHERE if name in above else _Where.AT_INPUT
            module._compiled_call_impl = _DispatchedCall(module, name or "model", where, random, ())


def refuse_compiled(root: nn.Module, placement: Mapping[str, int] | None = None) -> None:
    """Raise UsageError if torch.compile would trace a module on several ranks, and so the messages between them.

    Args:
        placement: None before it is known: then only the whole model is checked, which will lie on several ranks.
    """
    for name, module in root.named_modules() if placement is not None else [("", root)]:
        compiled = "_orig_mod" in module._modules or ModuleCall.of(module).is_compiled
        if compiled and (placement is None or len(pp_ranks_of(name, placement)) > 1):
            raise compile_error(f"`{name}`" if name else "the whole model")


def with_other_names(root: nn.Module, placement: Mapping[str, int]) -> dict[str, int]:
    """Return `placement` under every name of its units: T5's decoder, say, calls the embedding that another rank holds.

    Names inside another unit are left out: there the module is a part of that unit.
    """
    all_names = names_by_module(root)
    others = {
        name: rank
        for unit, rank in placement.items()
        for name in all_names[root.get_submodule(unit)]
        if enclosing_unit(name, placement) is None
    }
    return {**placement, **others}


def _runs_whole(module: nn.Module) -> bool:
    """Return whether a module without weights runs as a whole: a leaf of torch.nn's, or one with a custom Function."""
    if type(module).__module__.startswith(("torch.nn", "smpkit.torch.tensor_parallel")):
        return not any(True for _ in module.children())
    methods = vars(type(module))
    return any(_names_custom_function(function, methods) for function in (type(module).forward, *vars(module).values()))


def _names_custom_function(value: Any, methods: Mapping[str, Any], depth: int = 3) -> bool:
    """Return whether a function, or one that it names, names a custom autograd.Function.

    Such a Function needs real tensors. Any other code may run on every rank, operation by operation.
    """
    if isinstance(value, type):
        return issubclass(value, torch.autograd.Function)
    if not isinstance(value, FunctionType) or not depth or (value.__module__ or "").startswith("torch."):
        return False
    named = [value.__globals__.get(name, methods.get(name)) for name in value.__code__.co_names]
    with contextlib.suppress(ValueError):  # a cell that nothing has filled yet
        named += [cell.cell_contents for cell in value.__closure__ or ()]
    return any(_names_custom_function(function, methods, depth - 1) for function in named)


class _DispatchedCall(ModuleCall):
    """The call of a module, which runs on the rank that has the module."""

    is_here = True
    """Whether the module is part of this rank's units, or this process stands for all ranks."""

    def __init__(
        self, module: nn.Module, name: str, where: _Where, random: RandomStreams, pp_ranks: Collection[int]
    ) -> None:
        super().__init__(module)
        self.pp_ranks = frozenset(pp_ranks)
        self._module, self._name, self._random = module, name, random
        self._is_everywhere, self._is_nested = where is _Where.EVERYWHERE, where is _Where.NESTED
        self._closed = where not in (_Where.EVERYWHERE, _Where.ENCLOSING)
        self._callee = Callee(name, name, self._closed)
        self._owner = min(self.pp_ranks) if where not in (_Where.EVERYWHERE, _Where.AT_INPUT) else None
        self.stream = None if self._is_nested or self._is_everywhere else name
        self._get_collectors = None if self._owner is None else active_collectors()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original if self.checkpointing is None else self.checkpointing(self.original)
        try:
            microbatch, owner = Current.microbatch, self._owner
            if microbatch is not None and not self._is_everywhere and not microbatch.stage.inside_unit:
                if owner is None:
                    owner = pp_rank_of((args, kwargs), microbatch.stage)
                elif microbatch.unit_wrapper is not None:
                    original = microbatch.unit_wrapper(original)
                if owner is not None:
                    mode: object = self._module.training
                    if self._get_collectors is not None and (collectors := self._get_collectors()):
                        # Outputs that a Hugging Face model collects by hooks must reach every rank: see `outputs.py`.
                        original, mode = returning_collected(collectors, original), (mode, collector_key(collectors))
                        result = microbatch.run_on_owner(owner, self._callee, original, args, kwargs, mode)
                        return add_collected(collectors, result)
                    return microbatch.run_on_owner(owner, self._callee, original, args, kwargs, mode)
            if not self.is_here:
                place, hint = "outside a step", "call it in a function with @smp.step, which all pipeline ranks run"
                if microbatch is not None:
                    place = "inside a layer"
                    hint = "give the layer its result, or make it a child of that layer, too: `layer.child = child`"
                raise UsageError(
                    f"`{self._name}`, whose weights pipeline rank {self._owner} holds, was called {place}, on rank"
                    f" {state.pp_rank}",
                    hint=hint,
                )
            if self._is_nested:
                return original(*args, **kwargs)
            return self._random.run(self._name, self._closed, original, args, kwargs)
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Add the module to the notes of an error, or raise a clearer one."""
        add_error_context(error, module=f"`{self._name}`")
        is_vmap_error = any(text in str(error) for text in _IN_VMAP)
        if is_vmap_error and torch._C._functorch.peek_interpreter_stack() is not None:
            raise vmap_error(self._name) from error
        if _MIXED in str(error) and any(map(is_dtensor, self._module.parameters(recurse=False))):
            raise UsageError(
                f"`{self._name}` was called while this rank had a part of its weights only: sharded data parallelism"
                " gathers them when the model is called",
                hint="call the wrapped model, and let an argument of its forward say what to run"
                " (`return self.decode(z)`)",
            ) from error


def pp_rank_of(arguments: Any, stage: StageContext | None = None) -> int | None:
    """Return the owner of the first stage tensor among arguments, or the first weight that not every rank holds."""
    for tensor in tensors_in(arguments):
        if isinstance(tensor, StageTensor):
            return tensor.owner
        if stage is not None and (weight := stage.weight_of(tensor)) is not None:
            return stage.parameter_owners[id(weight)]
    return None


def run_together(
    function: Callable[..., Any], members: Sequence[nn.Module], names: tuple[str, ...], argument: Any
) -> Any:
    """Run `function`, which calls neighbouring modules of one rank in turn, as one call on that rank.

    Args:
        members: the modules; if none of them has weights, they run where `argument` is.
        names: of the modules.
    """
    calls = [ModuleCall.of(module) for module in members]
    pp_ranks = {owner for call in calls for owner in call.pp_ranks}
    owner = next(iter(pp_ranks), pp_rank_of(argument))
    if owner is None:
        return function(argument)
    stage = current_microbatch().stage
    modes = tuple([module.training for module in members])
    together = Callee(names, f"{names[0]} to {names[-1]}")
    result = current_microbatch().run_on_owner(owner, together, function, (argument,), {}, modes)
    if owner != stage.rank:
        for call in calls:
            if call.stream is not None:
                stage.random.skip(call.stream)
    return result


def compile_error(compiled: str) -> UsageError:
    return UsageError(
        f"torch.compile was asked to compile {compiled}, which lies on several pipeline ranks",
        hint="compile its layers instead: `for layer in model.layers: layer.compile()`",
    )


def vmap_error(name: str) -> UsageError:
    return UsageError(
        f"torch.vmap was called around `{name}`, which is one of several parts over a pipeline",
        hint="call it in a torch.nn.Module, which is placed as a whole; layers take batches anyway",
    )


def owner_of_operation(args: tuple[Any, ...], kwargs: dict[str, Any], stage: StageContext) -> int:
    """Return the owner of the first parameter among the arguments, else the (last) rank with most of their bytes."""
    if not kwargs:  # a fast path for stage tensors of one owner among plain numbers, as most operations have
        only: int | None = None
        for argument in args:
            kind = type(argument)
            if kind is StageTensor:
                if only is None:
                    only = argument.owner
                elif only != argument.owner:
                    break
            elif kind not in NON_TENSOR_TYPES:
                break
        else:
            if only is not None:
                return only
    num_bytes: dict[int, int] = {}
    for tensor in tensors_in((args, kwargs)):
        if type(tensor) is StageTensor:
            num_bytes[tensor.owner] = num_bytes.get(tensor.owner, 0) + tensor.spec.num_bytes
        elif (weight := stage.weight_of(tensor)) is not None:
            return stage.parameter_owners[id(weight)]
    return max(num_bytes, key=lambda owner: (num_bytes[owner], owner))
