"""Cut a model into units, and learn what each costs from one run of the step on tensors without data.

::

    run_fake ──► TrialStep ──► forward of each unit ──► FlopCounterMode, FusedKernels   operations
    (fake model)                                   ──► _SavedBytes                      what autograd keeps for backward
                                                   ──► CheckpointedCalls                what is recomputed there instead

Fake tensors have shapes and no memory, so the pass needs neither a GPU nor time, and gives the same on every machine:
on a laptop, which has none, and in the job, whose step works on GPUs. A step that reads values cannot run so; then the
model is partitioned by the sizes of its parameters, in the order of definition.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.partition.units import Node, UnitTree, unit_tree
from smpkit.torch.core import devices
from smpkit.torch.core.offloader import Offloader, install
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, storage_of, tensors_in
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.fused_kernels import FusedKernels

__all__ = [
    "CheckpointedCall",
    "CheckpointedCalls",
    "TrialStep",
    "measure_units",
    "node_of",
    "restoring_model",
    "run_fake",
    "units_of",
]

_log = logging.getLogger("smpkit")


# --- units ------------------------------------------------------------------------------------------------------------


_UNCUT: Final = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Classes of torch that are never cut: what their parts compute depends on values."""


def units_of(module: nn.Module, split: Collection[str] = ()) -> UnitTree:
    """Cut a model into units; leaves without parameters are none, they run on the rank that has their input.

    Args:
        split: names of modules that must be cut, because the user placed their parts apart.
    """
    tree = unit_tree(node_of(module), split)
    placed = tuple(unit for unit in tree.units if unit.parameters_bytes)
    return UnitTree(placed, tree.spanning, tree.loose)


def node_of(module: nn.Module) -> Node:
    """Describe a model to the planner; a module that appears twice is listed once."""
    return _node(module, "", set())


def _node(module: nn.Module, name: str, seen: set[int]) -> Node:
    seen.add(id(module))
    children = []
    is_whole = isinstance(module, _UNCUT)
    if not is_whole:
        for child_name, child in module.named_children():
            if id(child) not in seen:
                children.append(_node(child, f"{name}.{child_name}" if name else child_name, seen))
    owned = [*module.parameters(recurse=is_whole), *_statistics(module)]
    return Node(
        name,
        type(module).__qualname__,
        is_stack=isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict),
        children=tuple(children),
        parameters={str(id(each)): each.numel() * each.element_size() for each in owned},
    )


def _statistics(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a module of torch's own, such as BatchNorm's statistics.

    Its calls change them, so it has to be placed on a rank even if it has no parameters.
    """
    return list(module.buffers(recurse=False)) if type(module).__module__.startswith("torch.nn") else []


# --- their costs ------------------------------------------------------------------------------------------------------


def measure_units(
    root: nn.Module,
    tree: UnitTree,
    body: Callable[[], Any] | None,
    untraced: Callable[[str], object] | None = None,
) -> list[UnitCost]:
    """Return what the units cost, in the order in which `body` calls them.

    Args:
        body: runs the step for one microbatch on arguments that `fake` has converted; None to skip the pass.
        untraced: is told why the pass failed; None: a warning says so, and what follows for the partition.
    """
    costs = {unit.name: UnitCost(unit.name, unit.parameters_bytes, shared=unit.shared) for unit in tree.units}
    measured = _trace(root, costs, body, untraced or _warn) if body is not None else {}
    in_order = [*measured, *(name for name in costs if name not in measured)]
    every = [measured.get(name, costs[name]) for name in in_order]
    if any(cost.flops for cost in every):
        return every
    # Multiplying by a weight takes two operations per element and sample: parameters measure compute up to a factor.
    return [replace(cost, flops=float(cost.parameters_bytes)) for cost in every]


def _warn(reason: str) -> None:
    _log.warning(
        "the step could not be traced on tensors without data (%s); the model is partitioned by the sizes of its"
        " parameters, without regard to what it computes and keeps. `skip_tracing: True` leaves the pass out",
        reason,
    )


def _trace(
    root: nn.Module, costs: Mapping[str, UnitCost], body: Callable[[], Any], untraced: Callable[[str], object]
) -> dict[str, UnitCost]:
    measured: dict[str, UnitCost] = {}
    counter, kernels = FlopCounterMode(display=False), FusedKernels()
    started: dict[str, tuple[_Part, dict[str, int], int, _Inputs]] = {}
    live = _LiveBytes()
    saved = _SavedBytes(root, live)
    operators = _Operators(saved, live, lambda: bool(started))

    def flops_so_far() -> int:
        return counter.get_total_flops() + kernels.flops

    checkpointed = CheckpointedCalls(saved, live, flops_so_far)

    def so_far() -> dict[str, int]:
        return {"flops": flops_so_far(), "activation_bytes": saved.total, **operators.counts}

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            checkpointed.begin_unit(name)
            started[name] = live.begin(), so_far(), len(checkpointed.calls), _Inputs((args, kwargs), saved)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            part, then, num_calls, inputs = started.pop(name)
            live.end(part)
            checkpointed.end_unit()
            inside = [call for call in checkpointed.calls[num_calls:] if call.unit is None]
            known = measured.get(name, costs[name])
            grown = {key: getattr(known, key) + now - then[key] for key, now in so_far().items()}
            grown["working_bytes"] = max(known.working_bytes, part.needed)
            grown["unsaved_input_bytes"] = known.unsaved_input_bytes + inputs.unsaved_bytes()
            saved.end_unit()
            measured[name] = _checkpointed(known, inside, output_bytes=_bytes_of(output), **grown)

        return hook

    try:
        with contextlib.ExitStack() as hooks:
            for name in costs:  # a scripted module takes no hooks
                module = root.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(before(name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after(name)))
            watched = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
            with _without_torchs_log(), operators, counter, kernels.installed(), checkpointed.watch(), watched:
                body()
    except Exception as error:  # user code on tensors without data may fail in any way
        untraced(f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}")
        return {}
    finally:
        saved.forget()
    for call in checkpointed.calls:
        if call.unit is not None:  # it spans units: its inputs are kept on the rank of the first one
            known = measured[call.unit]
            measured[call.unit] = _checkpointed(
                known, [call], activation_bytes=known.activation_bytes + call.boundary_bytes
            )
    return measured


@contextlib.contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Keep the traceback to ourselves that torch logs where an operation has no shapes to offer: we warn, once."""
    log = logging.getLogger(fake_tensor.__name__)

    def drop(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def _checkpointed(cost: UnitCost, calls: Sequence[CheckpointedCall], **changes: Any) -> UnitCost:
    return replace(
        cost,
        boundary_bytes=cost.boundary_bytes + sum(call.boundary_bytes for call in calls),
        recomputed_bytes=max([cost.recomputed_bytes, *(call.recomputed_bytes for call in calls)]),
        recomputed_flops=cost.recomputed_flops + sum(call.flops for call in calls),
        spared_bytes=cost.spared_bytes + sum(call.spared_bytes for call in calls),
        **changes,
    )


def _bytes_of(value: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_in(value))


class _SavedBytes:
    """Counts what autograd keeps for backward, each storage once, parameters and their views not at all."""

    def __init__(self, root: nn.Module, live: _LiveBytes) -> None:
        self.total = 0
        self._live = live
        self._parameters: Callable[[], Iterable[nn.Parameter]] = root.parameters
        # By the tensors, which keep the storages alive: the address of a freed one could become that of another.
        self._seen: dict[int, torch.Tensor] = {storage_of(parameter): parameter for parameter in root.parameters()}
        self._made_of_parameters: dict[int, torch.Tensor] = dict(self._seen)
        self._modes: set[int] = set()
        self._packed: list[torch.Tensor] = []
        self._since_unit: set[int] = set()

    def end_unit(self) -> None:
        """Note that a unit has ended; what is saved from now on is of the next one."""
        self._since_unit.clear()

    def is_of_this_unit(self, storage: int) -> bool:
        """Return whether a storage was saved first since the last unit ended."""
        return storage in self._since_unit

    def is_of_parameters(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter, a view of one, or was noted as made of parameters alone."""
        self._know_mode_of(tensor)
        return storage_of(tensor) in self._made_of_parameters

    def note_made_of_parameters(self, tensor: torch.Tensor) -> None:
        """Count a tensor, such as a weight in another dtype, as a parameter in `is_of_parameters`."""
        self._made_of_parameters[storage_of(tensor)] = tensor

    def pack(self, tensor: torch.Tensor) -> int:
        self._know_mode_of(tensor)
        if storage_of(tensor) not in self._seen:
            self._seen[storage_of(tensor)] = tensor
            self._since_unit.add(storage_of(tensor))
            self.total += tensor.untyped_storage().nbytes()
        self._live.note_saved()
        self._packed.append(tensor)
        return len(self._packed) - 1

    def forget(self) -> None:
        """Drop all tensors.

        Their autograd graphs hold this object through its hooks, a cycle that Python's collector cannot see: the model,
        and the threads that end with it, would never be freed.
        """
        self._seen.clear()
        self._made_of_parameters.clear()
        self._packed.clear()
        self._parameters = tuple

    def _know_mode_of(self, tensor: torch.Tensor) -> None:
        """Count the fake tensors that a tensor's mode makes of the parameters as seen: operations save those."""
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        if mode is None or id(mode) in self._modes:
            return
        self._modes.add(id(mode))
        for parameter in self._parameters():  # under `run_fake` these are fake already
            fake = parameter if isinstance(parameter, FakeTensor) else mode.from_tensor(parameter)
            self._seen[storage_of(fake)] = self._made_of_parameters[storage_of(fake)] = fake

    def unpack(self, number: int) -> torch.Tensor:
        return self._packed[number]


# --- checkpointed calls -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointedCall:
    """The costs of one call whose activations are recomputed in backward."""

    unit: str | None
    """The first unit that ran inside; None if the call was inside of one unit itself."""
    boundary_bytes: int
    """The inputs that it keeps, as far as nothing before it keeps them."""
    recomputed_bytes: int
    """The most that is alive at a time of what its operators make again in backward, where it ends with the last tensor
    that is saved."""
    flops: int
    spared_bytes: int
    """What its operations save for a backward that never needs it, each storage once."""


class CheckpointedCalls(Offloader):
    """Records checkpointed calls. It is installed as the offload engine, which every checkpointed call asks for.

    Args:
        saved: what autograd keeps so far.
        live: what is alive of what operators have made.
        flops: returns the operations computed so far.
    """

    def __init__(self, saved: _SavedBytes, live: _LiveBytes, flops: Callable[[], int]) -> None:
        self.calls: list[CheckpointedCall] = []
        self._live = live
        self._inside: list[int] = []
        """For each open call, what the largest recomputation inside it holds."""
        self._started_units: list[str] = []
        self._num_open_units = 0
        self._saved = saved
        self._flops = flops

    def begin_unit(self, name: str) -> None:
        """Record that a unit's forward begins."""
        self._started_units.append(name)
        self._num_open_units += 1

    def end_unit(self) -> None:
        """Record that the forward of the latest unit ends."""
        self._num_open_units -= 1

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record checkpointed calls in this block."""
        previous = install(self)
        try:
            yield
        finally:
            install(previous)

    def around(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 - of every Offloader
        """Return the context that records one checkpointed call."""
        return self._record()

    @contextlib.contextmanager
    def _record(self) -> Iterator[None]:
        saved_before, flops_before = self._saved.total, self._flops()
        num_started_before = len(self._started_units)
        is_inside_unit = self._num_open_units > 0
        spared: dict[int, torch.Tensor] = {}
        part = self._live.begin()
        self._inside.append(0)

        def note(tensor: torch.Tensor) -> None:
            self._live.note_saved()
            if not self._saved.is_of_parameters(tensor):
                spared[storage_of(tensor)] = tensor

        with _noting_saved(note):
            yield
        self._live.end(part)
        started_inside = self._started_units[num_started_before:]
        unit = None if is_inside_unit or not started_inside else started_inside[0]
        saved, flops = self._saved.total - saved_before, self._flops() - flops_before
        num_bytes = sum(each.untyped_storage().nbytes() for each in spared.values())
        # A call inside this one is recomputed once more in backward, beside what this one has saved by then.
        kept = sum(each.untyped_storage().nbytes() for each in spared.values() if self._live.is_of(part, each))
        inside = self._inside.pop()
        recomputed = max(part.needed, kept + inside if inside else 0)
        if self._inside:
            self._inside[-1] = max(self._inside[-1], recomputed)
        spared.clear()  # as in `_SavedBytes.forget`: their graphs hold them through the hooks
        self.calls.append(CheckpointedCall(unit, saved, recomputed, flops, num_bytes))


_push_hooks: Final[Any] = torch._C._autograd._push_saved_tensors_default_hooks


@contextlib.contextmanager
def _noting_saved(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `note` with each tensor that is given to a checkpoint's hooks in this block; they save nothing.

    What a checkpoint inside it is given is noted for that one alone.
    """
    hooks: Any = torch._C._autograd
    before = hooks._push_saved_tensors_default_hooks

    def noted(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        def both(tensor: torch.Tensor) -> Any:
            note(tensor)
            return pack(tensor)

        _push_hooks(both, unpack)

    hooks._push_saved_tensors_default_hooks = noted
    try:
        yield
    finally:
        hooks._push_saved_tensors_default_hooks = before


class _Inputs:
    """The differentiable inputs of a unit, each storage once; none without gradients, where nothing is saved."""

    def __init__(self, arguments: Any, saved: _SavedBytes) -> None:
        tensors = [each for each in tensors_in(arguments) if each.requires_grad and not saved.is_of_parameters(each)]
        self._by_storage = {storage_of(each): each for each in tensors} if torch.is_grad_enabled() else {}
        self._saved = saved

    def unsaved_bytes(self) -> int:
        """Return the bytes of those that the unit has not saved, or that a unit before had saved already."""
        found = [each for key, each in self._by_storage.items() if not self._saved.is_of_this_unit(key)]
        return sum(each.untyped_storage().nbytes() for each in found)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, views among them; the bytes that those read and write whose products nobody counts; what is
    alive of what they make; and the gradients for which weights wait where a backward is split, as `split_backward`
    does it.
    """

    def __init__(self, saved: _SavedBytes, live: _LiveBytes, is_in_unit: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self.counts = {"operations": 0, "moved_bytes": 0, "postponed_bytes": 0, "weight_products": 0}
        """By field of a `UnitCost`."""
        self._saved, self._is_in_unit = saved, is_in_unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question about a tensor
            return output
        self.counts["operations"] += 1
        self._live.add(output, func)
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and func.overloadpacket not in flop_registry:
            self.counts["moved_bytes"] += _bytes_of((args, output))
        if not is_view and self._is_in_unit():  # what fake parameters are made with comes before
            self._note_gradients(tensors_in((args, kwargs)), tensors_in(output))
        return output

    def _note_gradients(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Count an operator's outputs, whose gradients are as large, if a weight meets something that is computed.

        Biases and norms have their gradients in the first half.
        """
        weights: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for each in inputs:
            (weights if self._saved.is_of_parameters(each) else others).append(each)
        if weights and not others:
            for each in outputs:
                self._saved.note_made_of_parameters(each)
        elif any(each.dim() > 1 for each in weights) and any(each.is_floating_point() for each in others):
            self.counts["weight_products"] += 1
            self.counts["postponed_bytes"] += _bytes_of(list(outputs))


class _Part:
    """A part of the trace, and the bytes that its operators have made."""

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
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], tuple[_Part, ...]]] = {}

    def begin(self) -> _Part:
        """Begin a part, maybe inside of others."""
        self._open.append(_Part())
        return self._open[-1]

    def end(self, part: _Part) -> None:
        """End a part: what is made from now on is none of it."""
        self._open.remove(part)

    def note_saved(self) -> None:
        """Note that autograd saves a tensor."""
        for part in self._open:
            part.note_saved()

    def is_of(self, part: _Part, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made in a part."""
        known = self._alive.get(storage_of(tensor))
        return known is not None and part in known[1]

    def add(self, output: Any, func: Any) -> None:
        """Count what an operator has made."""
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

        self._alive[key] = weakref.ref(storage, gone), parts
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
    fakes = _FakeTensors(mode, _device_of(step))

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fakes(tensor) if isinstance(tensor, nn.Parameter) else mode.from_tensor(tensor)

    args, kwargs = map_tensors(fake, (step.args, step.kwargs))
    with restoring_model(root, fakes), _fake_parameters(root, fakes), mode:
        TrialStep(step.body, args, kwargs)()


def _device_of(step: TrialStep) -> torch.device:
    tensors = [each for each in tensors_in((step.args, step.kwargs)) if not isinstance(each, nn.Parameter)]
    places = sorted({each.device for each in tensors}, key=lambda device: device.type == "cpu")
    return places[0] if places else devices.current_device()


class _FakeTensors:
    """Makes fakes of a model's tensors on a device; a tensor with several names gets one fake."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a parameter or buffer."""
        if id(tensor) not in self._known:
            # With the tensor, so that its id stays its own.
            self._known[id(tensor)] = tensor, self._make_fake(tensor)
        return self._known[id(tensor)][1]

    def _make_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode, torch.no_grad():
            if is_delayed(tensor):  # one element, expanded: results would get its strides of 0
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            else:
                value = self._mode.from_tensor(tensor).detach().to(self._device)
        if not isinstance(tensor, nn.Parameter):
            return value
        parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for name, attribute in vars(tensor).items():
            vars(parameter).setdefault(name, attribute)  # not those that a fake tensor has of its own
        return parameter


@contextlib.contextmanager
def _fake_parameters(root: nn.Module, fakes: _FakeTensors) -> Iterator[None]:
    """Replace the parameters of a model by their fakes in this block."""
    saved_state = [(module._parameters, dict(module._parameters)) for module in root.modules()]
    try:
        for place, parameters in saved_state:
            for name, parameter in parameters.items():
                if parameter is not None:
                    place[name] = cast("nn.Parameter", fakes(parameter))
        yield
    finally:
        for place, parameters in saved_state:
            place.clear()
            place.update(parameters)


_MUTABLE_CONTAINERS: Final = frozenset({list, deque, dict, OrderedDict, defaultdict, set})


@contextlib.contextmanager
def restoring_model(root: nn.Module, make_buffer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Restore the model and the random number generators after a trial of the step on this rank only.

    Forward may change buffers (running statistics), set attributes (a mask kept for the next call), append to lists
    and register hooks. If the generators were not restored, a step that draws random numbers would draw others here
    than on the ranks that ran no trial, and could take another path.

    Args:
        make_buffer: makes the buffer that forward may change meanwhile.
    """
    saved_state = [(module, dict(vars(module)), dict(module._buffers)) for module in root.modules()]
    containers = [
        each for _, attributes, _ in saved_state for each in attributes.values() if type(each) in _MUTABLE_CONTAINERS
    ]
    contents = [copy.copy(each) for each in containers]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for module, _, buffers in saved_state:
            made = {name: None if each is None else make_buffer(each) for name, each in buffers.items()}
            module._buffers.update(made)
        with devices.fork_rng(devices.current_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, attributes, buffers in saved_state:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for container, content in zip(containers, contents, strict=True):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
