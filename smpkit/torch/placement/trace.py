"""Learn what each unit of a model costs from one run of its step on tensors without data.

::

    run_fake ──► TrialStep ──► forward of each unit ──► FlopCounterMode, FusedKernels   operations
                                                    ──► _SavedBytes    what autograd keeps for backward
                                                    ──► _LiveBytes     what its operators hold at a time

Fake tensors have shapes and no memory, so the run needs neither a GPU nor time, and gives the same on every machine: on
a laptop, which has none, and in the job, whose step works on GPUs.

What runs counts for the unit whose forward runs, and between units (`F.relu`) for the one before: it runs where its
input is. A step that reads values cannot run so; then the model is partitioned by the sizes of its parameters, in the
order of definition.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import operator
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.core import devices
from smpkit.torch.core.offloader import Offloader, install
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, storage_of, tensors_in
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.fused_kernels import FusedKernels

_log = logging.getLogger("smpkit")


def measure_units(
    root: nn.Module,
    units: Sequence[UnitCost],
    body: Callable[[], Any] | None,
    untraced: Callable[[str], object] | None = None,
) -> list[UnitCost]:
    """Return what the units cost, in the order in which `body` calls them.

    Args:
        units: those of `root`, whose memory is known.
        body: runs the step for one microbatch on tensors without data, as `run_fake` does; None to skip the pass.
        untraced: is told why the pass failed; None: a warning says so, and what follows for the partition.
    """
    costs = {unit.name: unit for unit in units}
    measured: dict[str, UnitCost] = {}
    if body is not None:
        mode = _CostMode(root, costs)
        try:
            with mode.watch():
                body()
            measured = {name: replace(costs[name], **dict[str, Any](cost)) for name, cost in mode.measured.items()}
        except Exception as error:  # user code on tensors without data may fail in any way
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}"
            (untraced or _warn)(reason)
    in_order = [*measured, *(name for name in costs if name not in measured)]
    every = [measured.get(name, costs[name]) for name in in_order]
    if any(cost.flops for cost in every):
        return every
    # Multiplying by a weight takes two operations per element and sample: parameters measure compute up to a factor.
    return [replace(cost, flops=float(cost.parameters_bytes)) for cost in every]


def _warn(reason: str) -> None:
    _log.warning(
        "the step could not be traced on tensors without data (%s); the model is partitioned by the sizes of its"
        " parameters, without regard to what it computes and keeps; `skip_tracing: true` skips this attempt",
        reason,
    )


# --- a step without data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialStep:
    """A step function and the arguments of one microbatch, to run once before training."""

    body: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Run forward only: `model.backward` does nothing meanwhile, and `smp.is_tracing()` is true.

        With gradients, also where the first step of a job is one without: training keeps activations.
        """
        state.tracing = True
        try:
            with torch.enable_grad():
                return self.body(*self.args, **self.kwargs)
        finally:
            state.tracing = False


def run_fake(root: nn.Module, step: TrialStep) -> None:
    """Run a step with fake arguments and a fake model, on the device of the arguments.

    The step will run there, though the weights may still be elsewhere: each rank moves its own once it knows them.
    """
    mode, arguments = FakeTensorMode(allow_non_fake_inputs=True), (step.args, step.kwargs)
    places = {tensor.device for tensor in tensors_in(arguments) if not isinstance(tensor, nn.Parameter)}
    device = min(places, key=lambda place: place.type == "cpu", default=devices.current_device())

    @functools.cache  # a tensor with several names gets one fake
    def fake_of_model(tensor: torch.Tensor) -> torch.Tensor:
        with mode, torch.no_grad():
            if is_delayed(tensor):  # one element, expanded: results would get its strides of 0
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            else:
                value = mode.from_tensor(tensor).detach().to(device)
        if not isinstance(tensor, nn.Parameter):
            return value
        parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for name, attribute in vars(tensor).items():
            vars(parameter).setdefault(name, attribute)  # not those that a fake tensor has of its own
        return parameter

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fake_of_model(tensor) if isinstance(tensor, nn.Parameter) else mode.from_tensor(tensor)

    args, kwargs = map_tensors(fake, arguments)
    try:
        with restoring_model(root, fake_of_model), mode:
            TrialStep(step.body, args, kwargs)()
    finally:
        _clear_caches_of_fakes()


def _clear_caches_of_fakes() -> None:
    """Clear the caches of functions that have kept a fake tensor: tables of positions, in models of transformers."""
    for candidate in gc.get_objects():
        if type(candidate) is functools._lru_cache_wrapper:
            kept = [value for value in gc.get_referents(candidate) if isinstance(value, _CACHED)]
            if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(kept)):
                candidate.cache_clear()


_CACHED: Final = (torch.Tensor, tuple, list, dict)
_MUTABLE_CONTAINERS: Final = frozenset({list, deque, dict, OrderedDict, defaultdict, set})


@contextlib.contextmanager
def restoring_model(root: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Restore the model and the random number generators after a trial of the step on this rank only.

    Forward may change buffers (running statistics), set attributes (a mask kept for the next call), append to lists
    and register hooks. If the generators were not restored, a step that draws random numbers would draw others here
    than on the ranks that ran no trial, and could take another path.

    Args:
        stand_in: returns what is in the place of a parameter or buffer meanwhile.
    """
    saved = [(module, dict(vars(module))) for module in root.modules()]
    # Among them those of the parameters and buffers.
    containers = [
        value for _, attributes in saved for value in attributes.values() if type(value) in _MUTABLE_CONTAINERS
    ]
    contents = [copy.copy(container) for container in containers]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for module, _ in saved:
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                place.update({name: None if tensor is None else stand_in(tensor) for name, tensor in place.items()})
        with devices.fork_rng(devices.current_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in zip(containers, contents, strict=True):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)


# --- what a unit costs ------------------------------------------------------------------------------------------------


class _CostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures while a model runs what each of its units computes, makes and keeps for backward."""

    def __init__(self, root: nn.Module, units: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root, self._units = root, units
        self.measured: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Of the units that ran, in that order: what they cost, by field of a `UnitCost`."""
        self._begun: list[str] = []
        """Units whose forwards have begun, in that order."""
        self._running: dict[str, tuple[_Part, Mapping[int, torch.Tensor]]] = {}
        """Units whose forwards run, with their differentiable inputs by storage."""
        self._is_in_model = False
        self._latest: str | None = None
        """The unit that counts what runs now; None before the first in this call of the model, and after the call."""
        self._counted: Counter[str] = Counter()
        """All that had run when it was counted last, by field of a `UnitCost`."""
        self._counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _flops_of_groups})
        self._kernels = FusedKernels()
        self._counts: Counter[str] = Counter()
        """Of all operators, by field of a `UnitCost`."""
        self._live = _LiveBytes()
        self._saved = _SavedBytes(root, self._live)
        self._innermost_saved = self._saved
        """Of the innermost open checkpointed call, while there is one."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._saved.seen.clear)
            stack.enter_context(self._root.register_forward_pre_hook(self._begin_model))
            for name in self._units:  # a scripted module takes no hooks
                module = self._root.get_submodule(name)
                begin, end = functools.partial(self._begin_unit, name), functools.partial(self._end_unit, name)
                stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(end))
            stack.enter_context(self._root.register_forward_hook(self._end_model))
            # torch logs a traceback for an operation whose shapes depend on data: `measure_units` warns once.
            log = logging.getLogger(fake_tensor.__name__)
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
            for context in (self, self._counter, self._kernels.installed()):
                stack.enter_context(context)
            # Every checkpointed call asks the offload engine for the context of a trial.
            stack.callback(install, install(_CostOffloader(self._checkpointed)))
            stack.enter_context(saved_tensors_hooks(self._saved.pack, operator.call))
            yield

    def _begin_model(self, _: nn.Module, __: Any) -> None:
        self._is_in_model, self._latest, self._counted = True, None, self._totals()

    def _end_model(self, _: nn.Module, __: Any, ___: Any) -> None:
        self._count()
        self._is_in_model, self._latest = False, None  # the script's own loss, which `smpkit plan` does not see

    def _count(self) -> None:
        """Count what ran since the last call of this for the latest unit."""
        totals = self._totals()
        if self._latest is not None:
            self.measured[self._latest].update(totals)
            self.measured[self._latest].subtract(self._counted)
            self._counted = totals

    def _begin_unit(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._count()
        if self._latest is not None:
            self._saved.begin_unit()
        elif not self._is_in_model:  # else what comes before all units is the first's
            self._counted = self._totals()
        self._latest = name
        self._begun.append(name)
        tensors = tensors_in((args, kwargs)) if torch.is_grad_enabled() else []
        trained = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        self._running[name] = self._live.begin(), {storage_of(tensor): tensor for tensor in trained}

    def _end_unit(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self._count()
        part, inputs = self._running.pop(name)
        self._live.end(part)
        cost = self.measured[name]
        cost["output_bytes"] = _bytes_of(output)
        cost["working_bytes"] = max(cost["working_bytes"], part.needed)
        cost["unsaved_input_bytes"] += self._saved.end_unit(inputs)
        self._latest = next(reversed(self._running), name if self._is_in_model else None)

    def _flops(self) -> int:
        return self._counter.get_total_flops() + self._kernels.flops

    def _totals(self) -> Counter[str]:
        return self._counts + Counter(flops=self._flops(), activation_bytes=self._saved.total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = _run(func, args, kwargs or {})
        if func.namespace == "prim":  # a question about a tensor
            return output
        self._counts["operations"] += 1
        self._live.add(output, func)
        is_view = all(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not is_view and func.overloadpacket not in self._counter.flop_registry:
            self._counts["moved_bytes"] += _bytes_of((args, output))
        if func.overloadpacket in _PRODUCTS_WITH_WEIGHTS:
            self._counts["weight_products"] += 1
            self._counts["postponed_bytes"] += _bytes_of(output)
        return output

    @contextlib.contextmanager
    def _checkpointed(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run a checkpointed call in this block as if it were not checkpointed; count what its backward recomputes."""
        saved_before, flops_before, num_begun = self._saved.total, self._flops(), len(self._begun)
        part, outside = self._live.begin(), self._innermost_saved
        with torch.no_grad():
            for tensor in inputs:
                outside.pack(tensor.detach())
        boundary = self._saved.total - saved_before  # the inputs that it keeps, as far as nothing before it keeps them
        if not self._running:
            self._saved.total -= boundary
        self._innermost_saved = spared = _SavedBytes(self._root, self._live)
        with saved_tensors_hooks(spared.pack, operator.call):
            yield
        self._innermost_saved = outside
        self._live.end(part)
        spared.seen.clear()
        # If units run inside, the call is the first one's, whose rank begins it.
        unit = next(iter([*reversed(self._running), *self._begun[num_begun:]]), None)
        if not self._running and unit is None:
            self._saved.total += boundary
        if unit is not None:
            cost = self.measured[unit]
            cost["activation_bytes"] += 0 if self._running else boundary
            cost["boundary_bytes"] += boundary
            cost["recomputed_bytes"] = max(cost["recomputed_bytes"], part.needed)
            cost["recomputed_flops"] += self._flops() - flops_before
            cost["spared_bytes"] += spared.total


class _CostOffloader(Offloader):
    """An engine for which every checkpointed call is a trial, run in `context`."""

    def __init__(self, context: Callable[[Sequence[torch.Tensor]], AbstractContextManager[object]]) -> None:
        self._context = context

    def trial(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        return self._context(inputs)


_PRODUCTS_WITH_WEIGHTS: Final = [
    getattr(torch.ops.aten, name) for name in ("addmm", "mm", "convolution", "_grouped_mm")
]
"""What linear layers, convolutions and experts become. Where a backward is split, as `split_backward` does it, their
weights wait for the gradients of their outputs, which are as large; biases and norms have theirs in the first half."""


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator. torch multiplies by experts without data in bfloat16 only; with data it takes any dtype."""
    if operator is torch.ops.aten._grouped_mm.default and args[0].dim() == 2 and args[1].dim() == 3:
        return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
    return operator(*args, **kwargs)


def _flops_of_groups(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> int:
    """Count the product of each row by one of several weights, which torch's counter does not know."""
    return 2 * rows[-2] * rows[-1] * weights[-1]


def _bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


class _SavedBytes:
    """Counts what autograd keeps for backward, each storage once, parameters and their views not at all.

    The graphs of a step, which its script may keep, hold this object through its hook: so it holds no model, no tensors
    with a graph (Python's collector could not see that cycle), and no storages once `seen` is cleared.
    """

    def __init__(self, root: nn.Module, live: _LiveBytes) -> None:
        self.total = 0
        self.seen = {storage_of(parameter): parameter.untyped_storage() for parameter in root.parameters()}
        """Alive until this is cleared, because the address of a freed one could become that of another."""
        self._live, self._root = live, weakref.proxy(root)
        self._modes: set[int] = set()
        self._since_unit: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Count a tensor that autograd saves; return what makes one like it, which the graph keeps in its place."""
        self._see_parameters_of_mode(tensor)
        if storage_of(tensor) not in self.seen:
            self.seen[storage_of(tensor)] = tensor.untyped_storage()
            self._since_unit.add(storage_of(tensor))
            self.total += tensor.untyped_storage().nbytes()
        self._live.note_saved()
        shape, stride = tuple(tensor.shape), tensor.stride()
        return functools.partial(torch.empty_strided, shape, stride, dtype=tensor.dtype, device=tensor.device)

    def begin_unit(self) -> None:
        """Begin a unit: what was saved since the one before is not its own."""
        self._since_unit.clear()

    def end_unit(self, inputs: Mapping[int, torch.Tensor]) -> int:
        """Return the bytes of a unit's inputs that it has not saved, or that were saved before it; the unit ends."""
        unsaved = [tensor for key, tensor in inputs.items() if key not in self._since_unit]
        self._since_unit.clear()
        return sum(tensor.untyped_storage().nbytes() for tensor in unsaved)

    def _see_parameters_of_mode(self, tensor: torch.Tensor) -> None:
        """Count as seen the fake parameters of a tensor's mode: operations save these, not the parameters."""
        if not isinstance(tensor, FakeTensor) or id(tensor.fake_mode) in self._modes:
            return
        self._modes.add(id(tensor.fake_mode))
        for parameter in self._root.parameters():  # under `run_fake` these are fake already
            fake = parameter if isinstance(parameter, FakeTensor) else tensor.fake_mode.from_tensor(parameter)
            self.seen[storage_of(fake)] = fake.untyped_storage()


@dataclass(eq=False)
class _Part:
    """A part of the trace (a unit or a checkpointed call), and the bytes that its operators have made.

    Args:
        alive: those that are alive.
        most: the most of these at a time.
        needed: the most until the latest tensor was saved, where a recomputation in backward ends.
    """

    alive: int = 0
    most: int = 0
    needed: int = 0


class _LiveBytes:
    """Counts what operators make, each storage while it lives: not their views and changes in place.

    Tensors without data live as long as those with data, since the same code holds them.
    """

    def __init__(self) -> None:
        self._open: list[_Part] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin(self) -> _Part:
        """Begin a part, maybe inside of others."""
        self._open.append(_Part())
        return self._open[-1]

    def end(self, part: _Part) -> None:
        """End a part: what is made from now on does not count for it."""
        self._open.remove(part)

    def note_saved(self) -> None:
        for part in self._open:
            part.needed = part.most

    def add(self, output: Any, func: Any) -> None:
        values = output if isinstance(output, tuple | list) else (output,)
        for value, declared in zip(values, func._schema.returns, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is None:
                self._add(value.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes, parts = storage._cdata, storage.nbytes(), tuple(self._open)
        if key in self._alive or not parts:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            for part in parts:
                part.alive -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        for part in parts:
            part.alive += num_bytes
            part.most = max(part.most, part.alive)
