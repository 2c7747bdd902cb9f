"""Record what a microbatch sends between ranks without ranks and without data, for `smpkit plan --model`.

One process stands for all ranks, as a rank that holds nothing: like any other rank it skips each call and makes
placeholders from the call's output spec, so it sees the same calls and transfers in the same order. Only the spec comes
from elsewhere: a job broadcasts it from the rank that runs the call; here the call itself runs, once for each kind of
call, on fake tensors that have the shapes of the placeholders::

    job        new kind of call ──► the owner runs it      ──► broadcasts the output spec ──► placeholders
    recording  new kind of call ──► runs on fake tensors   ──► remembers the output spec  ──► placeholders

The pass on fake tensors that finds out what layers cost has run most of these calls already: `LayerOutputs` keeps what
they returned, and recording runs what is left, operations between layers above all.

What depends on values (a branch on a tensor, the shape of `x[mask]`) has no answer, so recording raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smpkit.plan.partition.assignment import Assignment
from smpkit.plan.schedule.graph import Segment
from smpkit.plan.schedule.recorded_graph import RecordedGraph, SentValue
from smpkit.torch.core.tensor_spec import (
    NON_TENSOR_TYPES,
    TensorSpec,
    map_tensors,
    signature,
    spec_of_unwrapped,
    tensors_in,
)
from smpkit.torch.core.tree import children
from smpkit.torch.pipeline.backward import mutable_alias
from smpkit.torch.pipeline.changes import Arguments, Change, changed_arguments, versions_of
from smpkit.torch.pipeline.messages import P2PTransfer
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.outputs import CallKind, expand_distributions
from smpkit.torch.pipeline.random_streams import RandomStreams
from smpkit.torch.pipeline.stage_context import NO_RANK, StageContext
from smpkit.torch.pipeline.stage_tensor import Callee, Current, Function, StageTensor
from smpkit.torch.pipeline.units import install, with_other_names
from smpkit.torch.placement.placement import enclosing_unit, pp_ranks_by_parameter


class LayerOutputs:
    """What layers of a model have returned for which arguments, and which of these they have changed in place.

    Args:
        units: the names of the parts that have a rank each; what is inside of them is not noted.
    """

    def __init__(self, root: nn.Module, units: Collection[str]) -> None:
        self._modules = [
            (name, module)
            for name, module in root.named_modules()
            if not any(name.startswith(f"{unit}.") for unit in units) and not isinstance(module, torch.jit.ScriptModule)
        ]
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Change, ...]]] = {}
        self._begun: dict[str, tuple[tuple[Any, ...], list[torch.Tensor], list[int]]] = {}

    def noted(self, call: Callable[[], object]) -> None:
        """Run a call of the model on tensors without data, and note what its layers return."""
        with contextlib.ExitStack() as stack:
            for name, module in self._modules:
                begin, end = functools.partial(self._begin, name), functools.partial(self._end, name)
                stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(end))
            call()

    def of(self, callee: Callee, mode: object, arguments: Arguments) -> tuple[Any, tuple[Change, ...]] | None:
        """Return the output spec and changes of a call; None if they are not known."""
        args, kwargs = arguments
        key = (callee.target, *signature((tuple(args), kwargs)))  # a list would be another signature
        # Any other mode has the call return what a Hugging Face model collects, too.
        return self._known.get(key) if type(mode) is bool else None

    def _begin(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        self._begun[name] = (name, *signature((args, kwargs))), tensors, versions_of(tensors)

    def _end(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        key, tensors, versions = self._begun.pop(name)
        if _is_plain(output):
            changes = changed_arguments(tensors, versions, changes_first=False)
            self._known[key] = map_tensors(spec_of_unwrapped, output), changes


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of tensors and numbers, and of no object that may hold tensors."""
    inside = children(value)
    if inside is None:
        return isinstance(value, torch.Tensor) or type(value) in NON_TENSOR_TYPES
    return all(map(_is_plain, inside.values()))


def record_on_fakes(
    root: nn.Module,
    assignment: Assignment,
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    outputs: LayerOutputs | None = None,
) -> list[RecordedGraph]:
    """Return what each microbatch runs and sends.

    Args:
        root: the model. Its calls are dispatched afterwards, so it can be described, but not called.
        calls: for each microbatch a call of its step, under a fake tensor mode.
        device: of the tensors that the model is given.
        outputs: what is known of the outputs of layers.
    """
    placement = with_other_names(root, assignment.partition_of)
    nothing_is_sent: Any = None
    stage = StageContext(
        NO_RANK,
        assignment.num_partitions,
        device,
        nothing_is_sent,
        RandomStreams(0, device),
        pp_ranks_by_parameter(root, placement),
    )
    install(root, placement, stage)
    return [_recorded(stage, assignment, call, outputs) for call in calls]


def _recorded(
    stage: StageContext, assignment: Assignment, call: Callable[[], object], outputs: LayerOutputs | None
) -> RecordedGraph:
    microbatch = _FakeMicrobatch(stage, outputs)
    Current.microbatch = microbatch
    try:
        stage.random.call_between_units(call)
    finally:
        Current.microbatch = None
    called: dict[Segment, list[str]] = {
        Segment(rank, index): [] for rank, count in enumerate(microbatch.num_segments) for index in range(count)
    }
    for segment, name in microbatch.module_calls:
        called[segment].extend(_units_in(name, assignment.partition_of))
    segments = tuple((segment, tuple(names)) for segment, names in called.items())
    return RecordedGraph(assignment.units, segments, tuple(map(_sent_value, microbatch.transfers, microbatch.numbers)))


def _units_in(module: str, placement: Mapping[str, int]) -> list[str]:
    """Return the unit that a module is or is a part of, or the units that it encloses."""
    enclosing = enclosing_unit(module, placement)
    return [unit for unit in placement if unit.startswith(f"{module}.")] if enclosing is None else [enclosing]


def _sent_value(transfer: P2PTransfer, number: int) -> SentValue:
    spec = transfer.spec
    return SentValue(
        Segment(transfer.source, transfer.source_segment),
        Segment(transfer.target, transfer.target_segment),
        tuple(spec.shape),
        str(spec.dtype).removeprefix("torch."),
        spec.num_bytes,
        spec.requires_grad,
        transfer.consumer,
        number,
    )


class _FakeMicrobatch(Microbatch):
    """A microbatch of no rank: a call runs only to learn its output spec, on fake tensors."""

    def __init__(self, stage: StageContext, outputs: LayerOutputs | None) -> None:
        super().__init__(stage, 0)
        self._outputs = outputs
        self.module_calls: list[tuple[Segment, str]] = []
        """The modules that code on all ranks has called, each with the segment that would run it."""
        self.numbers: list[int] = []
        """By transfer, which value it sends; a value that was changed in place since is another one."""
        self._sent_values: dict[int, tuple[StageTensor, int]] = {}
        """By id, the tensors that were sent, kept so that no other one gets their id, and the numbers of the values."""

    def _transfer(self, tensor: StageTensor, target: int, spec: TensorSpec) -> StageTensor:
        if not tensor.copies or id(tensor) not in self._sent_values:
            self._sent_values[id(tensor)] = tensor, len(self.numbers)
        return self._count_and_send(tensor, target, spec, self._sent_values[id(tensor)][1])

    def _count_and_send(self, tensor: StageTensor, target: int, spec: TensorSpec, number: int) -> StageTensor:
        self.numbers.append(number)
        return super()._transfer(tensor, target, spec)

    def run_on_owner(self, owner: int, callee: Callee, *call: Any) -> Any:
        """Return placeholders of what a call returns on rank `owner`; note the call if it is one of a module."""
        result = super().run_on_owner(owner, callee, *call)
        segment = Segment(owner, self.current_segments[owner])
        names = callee.target if isinstance(callee.target, tuple) else (callee.target,)
        self.module_calls += [(segment, name) for name in names if isinstance(name, str)]
        return result

    def _begin_new_kind(self, callee: Callee, function: Function, kind: CallKind, arguments: Arguments) -> None:
        """Learn on fake tensors what a new kind of call returns, and which arguments it changes in place."""
        if self._outputs is not None and (known := self._outputs.of(callee, kind.key[1], arguments)) is not None:
            self._output_specs.remember(kind, *known)
            return
        fakes: dict[int, torch.Tensor] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not StageTensor:
                return tensor
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake_value(tensor, self.stage.device)
            return fakes[id(tensor)]

        args, kwargs = map_tensors(fake, arguments)
        tensors = tensors_in((args, kwargs))
        versions = versions_of(tensors)
        self.stage.inside_unit = True
        try:
            with torch._C._EnableTorchFunction():  # the caller has disabled it
                output = function(*args, **kwargs)
        finally:
            self.stage.inside_unit = False
        changes = changed_arguments(tensors, versions, changes_first=callee.changes_first)
        self._output_specs.remember(kind, map_tensors(spec_of_unwrapped, expand_distributions(output)), changes)

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data in place of the value that every rank would get; count the transfers."""
        if type(tensor) is not StageTensor:
            return tensor
        number = len(self.numbers)
        for rank in range(self.stage.size):
            if rank != tensor.owner:
                self._count_and_send(tensor, rank, tensor.spec.without_gradient, number)
        return torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype, device=self.stage.device)


def _fake_value(tensor: StageTensor, device: torch.device) -> torch.Tensor:
    """Return a tensor without data of a value's shape, which may be changed in place as on its owner."""
    spec = tensor.spec
    value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    if not spec.requires_grad:
        return value
    with torch.enable_grad():
        return mutable_alias(value.requires_grad_())
