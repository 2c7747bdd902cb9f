"""Learn what each unit of a model costs from one run of its step on tensors without data.

::

    run_fake ──► TrialStep ──► forward of each unit ──► FlopCounterMode, FusedKernels   operations
    (fake model)                                   ──► _SavedBytes                      what autograd keeps for backward
                                                   ──► _CheckpointedCall                what is recomputed there instead

Fake tensors have shapes and no memory, so the pass needs neither a GPU nor time, and gives the same on every machine:
on a laptop, which has none, and in the job, whose step works on GPUs. A step that reads values cannot run so; then the
model is partitioned by the sizes of its parameters, in the order of definition.
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
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from smpkit.plan.partition.units import UnitTree
from smpkit.torch.core import devices
from smpkit.torch.core.offloader import Offloader, install
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, storage_of, tensors_in
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.fused_kernels import FusedKernels

_log = logging.getLogger("smpkit")


def measure_units(
    root: nn.Module,
    tree: UnitTree,
    body: Callable[[], Any] | None,
    untraced: Callable[[str], object] | None = None,
) -> list[UnitCost]:
    """Return what the units cost, in the order in which `body` calls them.

    Args:
        body: runs the step for one microbatch on tensors without data, as `run_fake` does; None to skip the pass.
        untraced: is told why the pass failed; None: a warning says so, and what follows for the partition.
    """
    costs = {unit.name: unit for unit in tree.units}
    measured: dict[str, UnitCost] = {}
    if body is not None:
        mode = _CostMode(root, costs)
        try:
            with mode.watch():
                body()
            measured = mode.costs()
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


# --- what a unit costs ------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A unit whose forward runs."""

    part: _Part
    totals: Mapping[str, int]
    """Of all that ran before it, by field of a `UnitCost`."""
    num_checkpointed: int
    """How many checkpointed calls have ended before it."""
    inputs: Mapping[int, torch.Tensor]
    """Those that need gradients, by storage."""


@dataclass(frozen=True)
class _CheckpointedCall:
    """The costs of one call whose activations are recomputed in backward."""

    unit: str | None
    """The first unit that ran inside; None if the call was inside of one unit itself."""
    boundary_bytes: int
    """The inputs that it keeps, as far as nothing before it keeps them."""
    recomputed_bytes: int
    """The most that is alive at a time of what its operators make again in backward, where it ends with the last tensor
    that is saved. A call inside another one counts as if it were not checkpointed."""
    flops: int
    spared_bytes: int
    """What its operations save for a backward that never needs it, each storage once."""


class _CostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures while a model runs what each of its units computes, makes and keeps for backward."""

    def __init__(self, root: nn.Module, costs: Mapping[str, UnitCost]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unmeasured = costs
        self._measured: dict[str, UnitCost] = {}
        self._begun: list[str] = []
        """Units whose forwards have begun, in that order."""
        self._running: dict[str, _Running] = {}
        self._ended: str | None = None
        """The unit whose forward ended last in this call of the model."""
        self._counted: Mapping[str, int] = {}
        """All that had run, by field of a `UnitCost`, when that unit ended, or the model's own forward began."""
        self._counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _flops_of_groups})
        self._kernels = FusedKernels()
        self._counts = {"operations": 0, "moved_bytes": 0, "postponed_bytes": 0, "weight_products": 0}
        """Of all operators, by field of a `UnitCost`."""
        self._live = _LiveBytes()
        self._saved = _SavedBytes(root, self._live)
        self._calls: list[_CheckpointedCall] = []
        self._innermost_saved = self._saved
        """Of the innermost open checkpointed call, while there is one."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        root = self._saved.root
        with contextlib.ExitStack() as stack:
            stack.callback(self._saved.forget)
            stack.enter_context(root.register_forward_pre_hook(self._begin_model))
            for name in self._unmeasured:  # a scripted module takes no hooks
                module = root.get_submodule(name)
                begin, end = functools.partial(self._begin_unit, name), functools.partial(self._end_unit, name)
                stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(end))
            stack.enter_context(root.register_forward_hook(self._end_model))
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

    def costs(self) -> dict[str, UnitCost]:
        """Return the costs of the units that ran, in that order."""
        for call in self._calls:
            if call.unit is not None:  # it spans units: its inputs are kept on the rank of the first one
                known = self._measured[call.unit]
                activation_bytes = known.activation_bytes + call.boundary_bytes
                self._measured[call.unit] = _with_checkpointed(known, [call], activation_bytes=activation_bytes)
        return self._measured

    def _begin_model(self, _: nn.Module, __: Any) -> None:
        self._ended, self._counted = None, self._totals()

    def _end_model(self, _: nn.Module, __: Any, ___: Any) -> None:
        self._count_between()
        self._ended, self._counted = None, {}  # the script's own loss, which `smpkit plan` does not see, is no unit's

    def _count_between(self) -> None:
        """Count what ran since a unit ended, such as `F.relu`, for that unit: it runs where its input is."""
        if self._ended is not None:
            self._measured[self._ended] = self._with_cost_since(self._measured[self._ended], self._counted)
            self._saved.begin_unit()

    def _with_cost_since(self, known: UnitCost, before: Mapping[str, int]) -> UnitCost:
        return replace(
            known, **{key: getattr(known, key) + total - before[key] for key, total in self._totals().items()}
        )

    def _begin_unit(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        before: Mapping[str, int] = self._totals()
        if not self._running and self._counted:
            self._count_between()
            before = before if self._ended is not None else self._counted  # what comes before all units is the first's
        self._begun.append(name)
        tensors = tensors_in((args, kwargs)) if torch.is_grad_enabled() else []
        trained = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        inputs = {storage_of(tensor): tensor for tensor in trained}
        self._running[name] = _Running(self._live.begin(), before, len(self._calls), inputs)

    def _end_unit(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        run = self._running.pop(name)
        self._live.end(run.part)
        inside = [call for call in self._calls[run.num_checkpointed :] if call.unit is None]
        known = self._with_cost_since(self._measured.get(name, self._unmeasured[name]), run.totals)
        most = max(known.working_bytes, run.part.needed)
        unsaved = known.unsaved_input_bytes + self._saved.end_unit(run.inputs)
        self._measured[name] = _with_checkpointed(
            known, inside, output_bytes=_bytes_of(output), working_bytes=most, unsaved_input_bytes=unsaved
        )
        if not self._running and self._counted:
            self._ended, self._counted = name, self._totals()

    def _flops(self) -> int:
        return self._counter.get_total_flops() + self._kernels.flops

    def _totals(self) -> dict[str, int]:
        return {"flops": self._flops(), "activation_bytes": self._saved.total, **self._counts}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = _run(func, args, kwargs or {})
        if func.namespace == "prim":  # a question about a tensor
            return output
        self._counts["operations"] += 1
        self._live.add(output, func)
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and func.overloadpacket not in self._counter.flop_registry:
            self._counts["moved_bytes"] += _bytes_of((args, output))
        if func.overloadpacket in _PRODUCTS_WITH_WEIGHTS:
            self._counts["weight_products"] += 1
            self._counts["postponed_bytes"] += _bytes_of(output)
        return output

    @contextlib.contextmanager
    def _checkpointed(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record one checkpointed call, which runs in this block as if it were not checkpointed."""
        saved_before, flops_before = self._saved.total, self._flops()
        num_units_before, is_inside_unit = len(self._begun), bool(self._running)
        part, outside = self._live.begin(), self._innermost_saved
        with torch.no_grad():
            for tensor in inputs:
                outside.pack(tensor.detach())
        boundary = self._saved.total - saved_before
        if not is_inside_unit:  # the rank of the first unit inside keeps it: see `costs`
            self._saved.total -= boundary
        self._innermost_saved = spared = _SavedBytes(self._saved.root, self._live)
        with saved_tensors_hooks(spared.pack, operator.call):
            yield
        self._innermost_saved = outside
        self._live.end(part)
        unit = None if is_inside_unit else next(iter(self._begun[num_units_before:]), None)
        if unit is None and not is_inside_unit:
            self._saved.total += boundary
        self._calls.append(_CheckpointedCall(unit, boundary, part.needed, self._flops() - flops_before, spared.total))
        spared.forget()


class _CostOffloader(Offloader):
    """An engine for which every checkpointed call is a trial, run in `context`."""

    def __init__(self, context: Callable[[Sequence[torch.Tensor]], AbstractContextManager[object]]) -> None:
        self._context = context

    def trial(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        return self._context(inputs)


_PRODUCTS_WITH_WEIGHTS: Final = (
    *(torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution, torch.ops.aten._grouped_mm),
)
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


def _with_checkpointed(cost: UnitCost, calls: Sequence[_CheckpointedCall], **changes: Any) -> UnitCost:
    return replace(
        cost,
        boundary_bytes=cost.boundary_bytes + sum(call.boundary_bytes for call in calls),
        recomputed_bytes=max([cost.recomputed_bytes, *(call.recomputed_bytes for call in calls)]),
        recomputed_flops=cost.recomputed_flops + sum(call.flops for call in calls),
        spared_bytes=cost.spared_bytes + sum(call.spared_bytes for call in calls),
        **changes,
    )


def _bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


class _SavedBytes:
    """Counts what autograd keeps for backward, each storage once, parameters and their views not at all."""

    def __init__(self, root: nn.Module, live: _LiveBytes) -> None:
        self.total = 0
        self._live, self.root = live, root
        # By the tensors, which keep the storages alive: the address of a freed one could become that of another.
        self._seen: dict[int, torch.Tensor] = {storage_of(parameter): parameter for parameter in root.parameters()}
        self._modes: set[int] = set()
        self._since_unit: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Count a tensor that autograd saves; return what makes one like it, which the graph keeps in its place."""
        self._see_parameters_of_mode(tensor)
        if storage_of(tensor) not in self._seen:
            self._seen[storage_of(tensor)] = tensor
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

    def forget(self) -> None:
        """Drop all tensors.

        Their autograd graphs hold this object through its hook, a cycle that Python's collector cannot see: the model,
        and the threads that end with it, would never be freed.
        """
        self._seen.clear()
        self.root = nn.Module()

    def _see_parameters_of_mode(self, tensor: torch.Tensor) -> None:
        """Count as seen the fake parameters of a tensor's mode: operations save these, not the parameters."""
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        if mode is None or id(mode) in self._modes:
            return
        self._modes.add(id(mode))
        for parameter in self.root.parameters():  # under `run_fake` these are fake already
            fake = parameter if isinstance(parameter, FakeTensor) else mode.from_tensor(parameter)
            self._seen[storage_of(fake)] = fake


class _Part:
    """A part of the trace (a unit or a checkpointed call), and the bytes that its operators have made."""

    def __init__(self) -> None:
        self.alive = self.needed = 0
        """Those alive, and the most of these until the latest tensor was saved."""
        self._most = 0

    def add(self, num_bytes: int) -> None:
        self.alive += num_bytes
        self._most = max(self._most, self.alive)

    def note_saved(self) -> None:
        self.needed = self._most


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
            part.note_saved()

    def add(self, output: Any, func: Any) -> None:
        if not self._open:
            return
        values = output if isinstance(output, tuple | list) else (output,)
        for value, declared in zip(values, func._schema.returns, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is None:
                self._add(value.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes, parts = storage._cdata, storage.nbytes(), tuple(self._open)
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            for part in parts:
                part.alive -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        for part in parts:
            part.add(num_bytes)


# --- the step, without data and without a trace in the model ----------------------------------------------------------


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
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_of_model = _fakes_on(mode, _device_of(step))

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fake_of_model(tensor) if isinstance(tensor, nn.Parameter) else mode.from_tensor(tensor)

    args, kwargs = map_tensors(fake, (step.args, step.kwargs))
    try:
        with restoring_model(root, fake_of_model), mode:
            TrialStep(step.body, args, kwargs)()
    finally:
        _clear_caches_of_fakes()


def _clear_caches_of_fakes() -> None:
    """Clear the caches of functions that have kept a fake tensor: tables of positions, in models of transformers."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper:
            kept = [value for value in gc.get_referents(each) if isinstance(value, _CACHED)]
            if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(kept)):
                each.cache_clear()


_CACHED: Final = (torch.Tensor, tuple, list, dict)


def _device_of(step: TrialStep) -> torch.device:
    tensors = [tensor for tensor in tensors_in((step.args, step.kwargs)) if not isinstance(tensor, nn.Parameter)]
    places = sorted({tensor.device for tensor in tensors}, key=lambda device: device.type == "cpu")
    return places[0] if places else devices.current_device()


def _fakes_on(mode: FakeTensorMode, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes the fake of a model's parameter or buffer, on a device."""

    @functools.cache  # a tensor with several names gets one fake
    def fake(tensor: torch.Tensor) -> torch.Tensor:
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

    return fake


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
    saved = [(module, dict(vars(module)), _tensors_of(module)) for module in root.modules()]
    containers = [
        value for _, attributes, _ in saved for value in attributes.values() if type(value) in _MUTABLE_CONTAINERS
    ]
    contents = [copy.copy(container) for container in containers]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for _, _, tensors in saved:
            for place, values in tensors:
                place.update({name: None if tensor is None else stand_in(tensor) for name, tensor in values.items()})
        with devices.fork_rng(devices.current_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, attributes, tensors in saved:
            vars(module).clear()
            vars(module).update(attributes)
            for place, values in tensors:
                place.clear()
                place.update(values)
        for container, content in zip(containers, contents, strict=True):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)


def _tensors_of(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the two dicts that hold a module's own parameters and buffers, and a copy of each."""
    return [(place, dict(place)) for place in (module._parameters, module._buffers)]
