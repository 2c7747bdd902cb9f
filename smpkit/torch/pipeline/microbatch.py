"""One microbatch of a step on this rank: what it runs here, sends, receives, and leaves for backward.

Every rank runs the user's code for every microbatch, so all ranks see the same calls and transfers in the same order,
and number them alike. They differ in who holds the data: the owner of a call runs it, and the other ranks make
placeholders from its output spec (`outputs.py`).

[Note: segments] A rank's work for one microbatch is cut into segments: a new one begins where the rank receives after
it has sent. What it receives may depend on what it sent, so it may have to wait there, and backward waits at the same
places in reverse::

    rank 0   [embedding] --x-->            --y--> [head, loss]      two segments
    rank 1               --x--> [ layers ] --y-->                   one segment

A value made in one segment and used in a later one is detached there; see `backward.py`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import torch

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.microbatches import root_gradient
from smpkit.torch.core.module_call import CallWrapper
from smpkit.torch.core.tensor_spec import (
    NON_TENSOR_TYPES,
    TensorSpec,
    dense_spec_of,
    describe,
    map_tensors,
    spec_of_unwrapped,
    tensors_in,
    to_layout,
    version_of,
)
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.core.warn import ScriptLine, script_line
from smpkit.torch.pipeline.backward import BackwardWork
from smpkit.torch.pipeline.changes import (
    Arguments,
    Change,
    ValueChanges,
    changed_arguments,
    changed_through_view_error,
    contents_of,
    held_everywhere_error,
    unrecorded_change_error,
    versions_of,
    written_container_error,
)
from smpkit.torch.pipeline.messages import TRANSFERS_PER_MICROBATCH, P2PTransfer, TransferRecord, message_of
from smpkit.torch.pipeline.outputs import (
    MISSING,
    CallKind,
    describe_difference,
    expand_distributions,
    has_same_specs,
    infer_output,
    make_placeholders,
    restore_distributions,
    spec_of_leaf,
    with_strides_of,
)
from smpkit.torch.pipeline.parameters import parameter_change_error, refuse_made_of_weights, refuse_nonresident
from smpkit.torch.pipeline.stage_tensor import (
    Callee,
    Function,
    StageTensor,
    become_stage_tensor,
    changes_in_place,
    make_stage_tensor,
    refuse_foreign_graph,
)
from smpkit.torch.pipeline.units import compile_error, owner_of_operation, vmap_error

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage_context import StageContext

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_OWN_USES: Final = 2
"""References to a storage that `_give_to_owner` itself accounts for: the tensor's and its own."""
_NoTorchFunction: Final = torch._C.DisableTorchFunction
"""Around this module's own reads of tensors, which must not be dispatched as operations of the step."""
_WithTorchFunction: Final = torch._C._EnableTorchFunction
"""Around the user's code within such a block."""


class Microbatch:
    """The run of a step function for one microbatch on this rank."""

    # Defaults on the class, since most microbatches keep them.
    record: TransferRecord | None = None
    """The transfers that it should make; None for the first of its kind, where each may differ, or if this one does."""
    diverged = False
    """Whether it has diverged from the record. All ranks must detect this at the same transfer, or they deadlock."""
    divergence: tuple[str, ScriptLine | None] | None = None
    """How it has diverged, and at which line of the script; None as line: at the end of the step function."""
    segment = 0
    """The segment that this rank is in."""
    has_backward = False
    released = False
    """Whether nothing is kept for backward any more."""
    before_wait: Callable[[], None] | None = None
    """Called where a new segment begins, to run other work of this rank instead of waiting."""
    unit_wrapper: CallWrapper | None = None
    """Wraps each unit that code between units calls: torch's checkpoint, around such code, recomputes unit by unit."""
    unsplittable: frozenset[int] = frozenset()
    """Segments of this rank whose backward must run in one: their hooks would run in both halves."""
    _first_number = 0
    """Of transfers since it has diverged."""
    _num_open_hooks = 0
    """How many blocks of hooks on saved tensors the code is in."""
    _consumer = ""
    """The latest call, for which values are transferred."""

    def __init__(self, stage: StageContext, index: int) -> None:
        self.stage = stage
        self.index = index
        self.transfers: list[P2PTransfer] = []
        self.call_trace: list[str] = []
        """All calls and transfers in order; if they differ between ranks, the ranks run different programs."""
        self._rank, self._device_type, self._output_specs = stage.rank, stage.device.type, stage.output_specs
        self.current_segments = [0] * stage.size
        """The segment that each rank is in."""
        self._sent = [False] * stage.size
        """By rank, whether it has sent in its current segment: its next receive begins a new one."""
        self._sent_versions: list[tuple[int, torch.Tensor, int]] = []
        """While this microbatch is recorded: number, tensor and version of each value that this rank has sent."""
        self._weights: dict[int, tuple[torch.Tensor, StageTensor]] = {}
        """By id, the weights (and views of weights) used as values, and their stage tensors."""
        self._fresh: dict[int, weakref.ref[torch.Tensor]] = {}
        """By id, the tensors that a factory such as `torch.zeros` has just made between units, on every rank."""
        self.changes = ValueChanges(stage, self.current_segments)
        self.backward_work = BackwardWork(stage.transport, index)

    @property
    def num_segments(self) -> tuple[int, ...]:
        """How many segments each rank has had so far."""
        return tuple(segment + 1 for segment in self.current_segments)

    @property
    def num_own_segments(self) -> int:
        return self.segment + 1

    @property
    def has_run_backward(self) -> bool:
        """Whether all of this rank's backward has run, halves for weights included."""
        work = self.backward_work
        return len(work.done) == self.segment + 1 and not work.weight_backwards

    # --- calls ---------------------------------------------------------------------------------------------------

    def run_operation(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mode: object = None
    ) -> Any:
        """Run one torch operation on the rank that has its data; `mode` is what else decides its result's shape."""
        # Names of operations that change their first argument end with an underscore, or `inplace` says so.
        changes = (name.endswith("_") or bool(kwargs)) and bool(args) and changes_in_place(func, name, kwargs)
        targets: Sequence[Any] = args[:1] if changes else tensors_in(kwargs.get("out"))
        if not targets:
            return self.run_plain_operation(Callee(func, name, is_operation=True), args, kwargs, mode)
        if self.stage.inside_unit:
            raise _inside_a_unit_error(name)
        for target in targets:
            if id(target) in self.stage.parameter_owners:
                raise parameter_change_error(name, target)
            if type(target) is not StageTensor:
                self._give_to_owner(target, name, owner_of_operation(args, kwargs, self.stage))
        callee = Callee(func, name, is_operation=True, changes_first=changes)
        result = self.run_on_owner(targets[0].owner, callee, func, args, kwargs)
        return targets[0] if isinstance(result, StageTensor) else result

    def note_fresh(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a factory such as `torch.zeros` has just made between units, on every rank."""
        self._fresh[id(tensor)] = weakref.ref(tensor)

    def _give_to_owner(self, tensor: torch.Tensor, name: str, owner: int) -> None:
        """Make a fresh tensor a value of rank `owner`, which fills it in place; raise if other tensors may share it."""
        fresh = self._fresh.pop(id(tensor), None)
        with _NoTorchFunction():
            storage = tensor.untyped_storage() if fresh is not None and fresh() is tensor else None
            # Views of it would keep their contents on the other ranks.
            if storage is None or torch._C._storage_Use_Count(storage._cdata) > _OWN_USES:
                raise held_everywhere_error(name, tensor)
            value = tensor.detach() if owner == self._rank else None
            become_stage_tensor(tensor, owner, value, self.current_segments[owner])

    def run_plain_operation(
        self, operation: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], mode: object = None
    ) -> Any:
        """Run an operation that changes none of its arguments; see `run_operation`."""
        if self.stage.inside_unit:
            raise _inside_a_unit_error(operation.name)
        owner = owner_of_operation(args, kwargs, self.stage)
        return self.run_on_owner(owner, operation, operation.target, args, kwargs, mode)

    def run_on_owner(
        self,
        owner: int,
        callee: Callee,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: object = None,
    ) -> Any:
        """Call `function`, which runs `callee`, on rank `owner`; make placeholders of its result everywhere else.

        Every rank goes through the same transfers: it sends, receives, or only counts.

        Args:
            mode: what else decides the result, such as a module's `training`.
        """
        with _NoTorchFunction():
            # Before any wait: if ranks differ in this very call, the trace of a waiting rank must show it.
            self.call_trace.append(callee.name)
            self._consumer = callee.name
            autocast = torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type)
            key = [callee.target, mode, torch.is_grad_enabled(), autocast, len(args)]
            owner_args, owner_kwargs = self._transfer_arguments(owner, args, kwargs, key)
            kind = self._output_specs[tuple(key)]
            if kind.output_spec is MISSING:
                self._check_new_kind(callee, kind, (owner_args, owner_kwargs))
                self._begin_new_kind(callee, function, kind, (owner_args, owner_kwargs))
            if owner == self._rank:
                result, tensors = self._run_call(callee, function, kind, owner_args, owner_kwargs)
            else:
                result, tensors = self._placeholders(owner, callee, kind), None
            if kind.changes:
                on_owner = owner_args, owner_kwargs
                self.changes.apply(kind.changes, owner, callee.name, (args, kwargs), on_owner, tensors)
            return result

    def _transfer_arguments(
        self, owner: int, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Append a description of the arguments of a call to `key`; return them as rank `owner` has them."""
        transferred = list(args)
        for number, argument in enumerate(args):
            kind = type(argument)
            if kind is StageTensor:
                key.append(argument.spec.parts)
                if argument.owner != owner or argument.grad_fn is not None or argument.changed_by is not None:
                    transferred[number] = self._transfer_once(argument, owner)
            elif kind in NON_TENSOR_TYPES:
                key += kind, argument
            elif kind in _PLAIN:
                transferred[number] = self._transfer_argument(owner, key, argument)
            else:
                visit = functools.partial(self._transfer_argument, owner, key)
                transferred[number] = describe(argument, key, visit)
        if kwargs:
            kwargs = describe(kwargs, key, functools.partial(self._transfer_argument, owner, key))
        return transferred, kwargs

    def _transfer_argument(self, owner: int, key: list[Any], tensor: torch.Tensor) -> torch.Tensor:
        """Do what `_transfer_arguments` does for one tensor, which may lie in a container or be no stage tensor."""
        if type(tensor) is not StageTensor:
            weight = self.stage.weight_of(tensor)
            if weight is None:
                if type(tensor) not in _PLAIN:
                    refuse_made_of_weights(tensor, self.stage)
                key += torch.Tensor, spec_of_unwrapped(tensor).parts
                return tensor
            if self.stage.holds(owner, weight):
                key.append(dense_spec_of(tensor).parts)
                return tensor
            tensor = self._value_of_weight(tensor, weight)
        key.append(tensor.spec.parts)
        return self._transfer_once(tensor, owner)

    def _value_of_weight(self, tensor: torch.Tensor, weight: torch.Tensor) -> StageTensor:
        """Return a weight, or a view of it, as a value of the first rank that holds it; the same one each time."""
        if id(tensor) not in self._weights:
            owner = self.stage.parameter_owners[id(weight)]
            data = tensor if owner == self._rank else None
            value = make_stage_tensor(
                dense_spec_of(tensor), self.stage.device, owner, data, self.current_segments[owner]
            )
            self._weights[id(tensor)] = tensor, value
        return self._weights[id(tensor)][1]

    def _check_new_kind(self, callee: Callee, kind: CallKind, arguments: Arguments) -> None:
        """Raise if arguments of a new kind of call are none of a step over a pipeline."""
        if torch.compiler.is_dynamo_compiling():  # what calls the layers was compiled: the wrapped model, or the step
            raise compile_error("the whole model")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise vmap_error(callee.name)
        tensors = tensors_in(arguments)
        for tensor in tensors:
            if type(tensor) is not StageTensor and self.stage.weight_of(tensor) is None:
                refuse_made_of_weights(tensor, self.stage)
        args, kwargs = arguments
        kind.has_tensors_only = not kwargs and len(tensors) == len(args) and all(map(is_, tensors, args))

    def _begin_new_kind(self, callee: Callee, function: Function, kind: CallKind, arguments: Arguments) -> None:
        """Infer what a new kind of call returns; where that is impossible, prepare for its owner to broadcast it."""
        output_specs = self._output_specs
        if callee.is_operation and not callee.changes_first:
            inferred = infer_output(function, *arguments, self._spec_without_data, self.stage.device)
            if inferred is not MISSING:
                kind.is_inferred = True
                output_specs.remember(kind, inferred, ())
                return
        if self.record is not None and output_specs.expect_other_floats(kind):
            return
        # All ranks must reach a broadcast in program order, so scheduled work runs first; it may include such a call.
        self._diverge(f"`{callee.name}` was called in a way in which the first one did not call it")

    def _spec_without_data(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Return the spec of a tensor whose data some ranks lack; None for one that all ranks hold."""
        if type(tensor) is StageTensor:
            return tensor.spec
        return None if self.stage.weight_of(tensor) is None else dense_spec_of(tensor)

    def _placeholders(self, owner: int, callee: Callee, kind: CallKind) -> Any:
        """Return the result of a call that another rank runs."""
        if callee.has_closed_stream is not None:
            self.stage.random.skip(callee.name)  # else what follows would draw other numbers here than on the owner
        spec, device = kind.output_spec, self.stage.device
        if type(spec) is TensorSpec:  # most calls
            return make_stage_tensor(spec, device, owner)
        if spec is MISSING:
            what = f"the transfer of the first output of `{callee.name}`"
            output_spec, changes = self.stage.transport.hosts.receive_object(owner, what)
            self._output_specs.remember(kind, output_spec, changes)
        return make_placeholders(kind.output_spec, device, owner)

    def _run_call(
        self,
        callee: Callee,
        function: Function,
        kind: CallKind,
        owner_args: Sequence[Any],
        owner_kwargs: dict[str, Any],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run a call that this rank owns; return its result, and the data of its arguments."""
        stage, name, is_closed, known = self.stage, callee.name, callee.has_closed_stream, kind.output_spec
        if is_closed:
            self.backward_work.units[self.segment].append(name)
        # Only after all transfers: a receive may have begun a segment, in which values of older ones are detached.
        if kind.has_tensors_only:
            tensors = list(map(self._local_value, owner_args))
            args: Sequence[Any] = tensors
            kwargs = owner_kwargs
        else:
            args, kwargs, tensors = self._as_local_data(owner_args, owner_kwargs)
        versions = versions_of(tensors)
        # Calls of one kind do the same, so checking their containers once is enough.
        contents = contents_of((args, kwargs)) if known is MISSING else None
        try:
            stage.inside_unit = not callee.is_operation
            try:
                with _WithTorchFunction():
                    if is_closed is None:
                        output = function(*args, **kwargs)
                    else:
                        output = stage.random.run(name, is_closed, function, args, kwargs)
            finally:
                stage.inside_unit = False
            has_changed = callee.changes_first or versions != versions_of(tensors)
            # The fast path: most calls change nothing and return one tensor of the known spec.
            if not has_changed and type(output) is torch.Tensor and spec_of_unwrapped(output) is known:
                return make_stage_tensor(known, stage.device, self._rank, output, self.segment), tensors
            if contents is not None and contents != contents_of((args, kwargs)):
                raise written_container_error(name)
            changes = changed_arguments(tensors, versions, changes_first=callee.changes_first) if has_changed else ()
            return self._publish(name, kind, output, changes), tensors
        except Exception:
            stage.failed_alone = True  # no other rank runs this: the others would wait for a message in vain
            raise

    def _as_local_data(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any], list[torch.Tensor]]:
        """Return the local data of a call's arguments, and the tensors among them in order."""
        tensors = []

        def to_local(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(self._local_value(tensor))
            return tensors[-1]

        args = map_tensors(to_local, args)
        return args, map_tensors(to_local, kwargs) if kwargs else kwargs, tensors

    def _local_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value that this rank owns, detached if an earlier segment made it."""
        segment = self.segment
        if type(tensor) is not StageTensor:
            # Every rank has made a plain tensor by itself. One with a graph counts as made in the first segment.
            if segment > 0 and tensor.requires_grad and not tensor.is_leaf:
                return self.backward_work.cut(tensor, 0, segment)
            return tensor
        value = tensor.value
        assert value is not None, "only the owner of a value is asked for its data"
        if self.changes.missed:
            self.changes.check(value)
        if tensor.segment != segment and not value.is_leaf:
            return self.backward_work.cut(value, tensor.segment, segment)
        return value

    def _publish(self, name: str, kind: CallKind, output: Any, changes: tuple[Change, ...]) -> Any:
        """Return the result of a call that ran here as stage tensors; broadcast its spec if its kind is new."""
        device, owner, segment = self.stage.device, self._rank, self.segment
        known, is_tensor = kind.output_spec, type(output) is torch.Tensor
        if kind.is_inferred and not (is_tensor and output.stride() == known.stride):
            output = with_strides_of(known, output)
        if not is_tensor:
            refuse_nonresident(name, output)
        if known is MISSING and any(
            value.is_nested or value.layout is not torch.strided for value in tensors_in(output)
        ):
            raise UsageError(
                f"`{name}` returned a nested or a sparse tensor, whose layout other pipeline ranks cannot know",
                hint="make it and use it in one torch.nn.Module, or return its values and offsets or indices",
            )
        parts = output if is_tensor else expand_distributions(output)
        stage_tensors = map_tensors(
            lambda tensor: make_stage_tensor(spec_of_unwrapped(tensor), device, owner, tensor, segment), parts
        )
        output_spec = map_leaves(lambda leaf: spec_of_leaf(leaf, name), stage_tensors)
        if known is MISSING:
            self._output_specs.remember(kind, output_spec, changes)
            self.stage.transport.hosts.send_object((output_spec, changes))
        elif known is not output_spec and known != output_spec and not has_same_specs(known, output_spec):
            raise UsageError(
                f"`{name}` returned {describe_difference(known, output_spec)} for arguments of the same shapes",
                hint="shapes and Python's numbers that depend on values cannot cross pipeline ranks; put the code that"
                " makes and the code that uses them into one torch.nn.Module, which is placed as a whole, or return"
                " numbers as tensors",
            )
        for change in changes:
            if change not in kind.changes:
                raise unrecorded_change_error(name, change)
        return stage_tensors if parts is output else restore_distributions(stage_tensors)

    # --- transfers -----------------------------------------------------------------------------------------------

    def _transfer_once(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Return the value as rank `owner` has it; transfer it there the first time."""
        if type(tensor) is not StageTensor:
            return tensor
        if (grad_fn := tensor.grad_fn) is not None:
            refuse_foreign_graph(grad_fn)
        tensor.refuse_stale()
        if tensor.owner == owner:
            return tensor
        copy = tensor.copies.get(owner)
        if copy is None:
            copy = self._transfer(tensor, owner, tensor.spec)
            tensor.copies = {**tensor.copies, owner: copy}
        elif tensor.value is not None:
            if self.changes.missed:
                self.changes.check(tensor.value)
            if tensor.sent_version != version_of(tensor.value):
                self.stage.failed_alone = True  # no other rank knows what lies in the same memory
                raise changed_through_view_error(tensor, owner)
        return copy

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a value on every rank, without its graph."""
        if type(tensor) is not StageTensor:
            return tensor
        tensor.refuse_stale()
        spec = tensor.spec.without_gradient
        copies = [self._transfer(tensor, rank, spec) for rank in range(self.stage.size) if rank != tensor.owner]
        mine = tensor if tensor.owner == self.stage.rank else next(c for c in copies if c.owner == self.stage.rank)
        # The owner's strides may differ from those of the copies: give all ranks the same.
        return to_layout(self._local_value(mine).detach(), tensor.spec.as_sent.order)

    def _transfer(self, tensor: StageTensor, target: int, spec: TensorSpec) -> StageTensor:
        """Send a value from its owner to `target`; all ranks call this alike, to count segments and transfers."""
        source, spec = tensor.owner, spec.as_sent
        begins_segment = self._sent[target]  # see [Note: segments]
        if begins_segment:
            self.current_segments[target] += 1
            self.segment += target == self._rank
            self._sent[target] = False
        self._sent[source] = True
        transfer = self._next_transfer(source, target, spec)
        self.transfers.append(transfer)
        self.call_trace.append(transfer.trace)
        if source == self._rank:
            self._send(tensor, transfer)
        elif target == self._rank and begins_segment and self.before_wait is not None:
            self.before_wait()  # other microbatches run while this value is under way
        copy = make_stage_tensor(spec, self.stage.device, target, None, self.current_segments[target])
        if target == self._rank:
            self.changes.received.append(weakref.ref(copy))
            copy.value = self._receive(transfer)
        return copy

    def _send(self, tensor: StageTensor, transfer: P2PTransfer) -> None:
        transport, record = self.stage.transport, self.record
        value = self._local_value(tensor)
        if value.requires_grad is not tensor.spec.requires_grad:
            self.stage.failed_alone = True  # no other rank knows what lies in the same memory
            raise changed_through_view_error(tensor, transfer.target)
        # Send first, since the target waits for it; bookkeeping can come later.
        sent, message = value.detach(), message_of(self.index, transfer, False)
        if record is None:
            transport.announce(message)
            self._sent_versions.append((transfer.number, sent, version_of(sent)))
        # The value may be changed in place while it travels, unless the record says that it is not.
        transport.send(sent, message, copy=record is None or transfer.number in record.changed)
        tensor.sent_version = version_of(sent)
        if transfer.spec.requires_grad:
            self.backward_work.add_send(value, transfer)

    def _receive(self, transfer: P2PTransfer) -> torch.Tensor:
        stage, spec, message = self.stage, transfer.spec, message_of(self.index, transfer, False)
        if self._num_open_hooks:
            self.unsplittable |= {transfer.target_segment}
        if self.record is None:
            text = stage.transport.announced(message)
            if not spec.text.startswith(text):
                stage.failed_alone = True  # the sender is done with this message, and waits for others
                raise UsageError(
                    f"pipeline rank {transfer.source} sends {text} for `{self._consumer}` in microbatch {self.index},"
                    f" where pipeline rank {self._rank} expects {spec}",
                    hint="a step runs on every pipeline rank, and what it does between layers (a slice, say) must not"
                    " depend on the rank or on data of its own",
                )
        value = stage.transport.receive(message)
        assert value is not None, "only gradients may be None"
        return self.backward_work.add_receive(value, transfer) if spec.requires_grad else value

    def _next_transfer(self, source: int, target: int, spec: TensorSpec) -> P2PTransfer:
        """Return the record's next transfer if it is this one; else diverge from the record, and make a new one."""
        number, record, known = len(self.transfers), self.record, None
        if record is not None and number < len(record.transfers):
            known = record.transfers[number]
            if known.source == source and known.target == target and (known.spec is spec or known.spec == spec):
                return known
        # Use numbers, and so tags, beyond the record's: receives that were posted for it must not match.
        number += self._first_number if record is None else len(record.transfers)
        if number >= TRANSFERS_PER_MICROBATCH:
            raise UnsupportedError(
                f"one microbatch sends more than {len(self.transfers):,} values between pipeline ranks, the last for "
                f"`{self._consumer or 'the step function'}`",
                hint="put a loop that goes from rank to rank and back (as over time steps) into one torch.nn.Module, "
                "which is placed as a whole",
            )
        segments = self.current_segments[source], self.current_segments[target]
        transfer = P2PTransfer(number, source, target, *segments, spec, self._consumer)
        if record is not None:
            self._diverge(f"it sent {transfer}, where the first one sent {known or 'nothing more'}")
        return transfer

    def _diverge(self, how: str) -> None:
        """Leave the record for good, and run everything that still follows it first."""
        if self.record is not None:
            self._first_number, self.record = len(self.record.transfers), None
            self.diverged, self.divergence = True, (how, script_line())
            if self.before_wait is not None:
                self.before_wait()

    def end_forward(self, output: Any) -> None:
        """Note that the step function has run to its end, and what it has returned."""
        self.changes.end(output)
        # An entry in the trace, so that a rank whose program ends earlier than its neighbour's is reported.
        self.call_trace.append("the end of the step function")
        if self.record is not None and len(self.transfers) < len(self.record.transfers):
            # As `_diverge` does, but no code is left that could wait for other ranks.
            self.diverged, self.divergence = True, ("it ended before the first one", None)

    def make_record(self) -> TransferRecord:
        changed = [number for number, sent, version in self._sent_versions if version_of(sent) != version]
        self._sent_versions.clear()
        return TransferRecord(tuple(self.transfers), frozenset(changed))

    # --- backward and the end ------------------------------------------------------------------------------------

    def backward(self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float = 1.0) -> None:
        """Note where backward starts, and with which gradients times `scale`; the schedule decides when it runs.

        Args:
            grads: the gradient of each root; None for a scalar.
        """
        self.has_backward = True
        self._consumer = "model.backward"
        self.call_trace.append(self._consumer)  # a rank that leaves it out would train on without these gradients
        with _NoTorchFunction():
            for root, grad in zip(roots, grads, strict=True):
                # A loss in which no unit took part is held by all ranks; it must count once.
                owner = 0
                if isinstance(root, StageTensor):
                    owner = root.owner
                    root.refuse_stale()
                    if root.grad_fn is not None:
                        refuse_foreign_graph(root.grad_fn)
                else:
                    refuse_made_of_weights(root, self.stage)
                start = None if grad is None else self._transfer_once(grad, owner)
                if owner == self._rank and (value := self._local_value(root)).requires_grad:
                    gradient = None if start is None else self._local_value(start)
                    start = root_gradient(value, gradient, scale)
                    self.backward_work.add_root(value, start, self.segment)

    def note_hooks(self, change: int) -> None:
        """Note that the current segment uses hooks that would run in both halves of a split backward.

        Args:
            change: 1 where code enters a block of hooks on saved tensors, -1 where it leaves it, 0 for any other hook.
        """
        self._num_open_hooks += change
        self.unsplittable |= {self.segment}

    def release(self) -> None:
        """Let go of what is kept for backward."""
        self.backward_work.release()
        self._weights, self._sent_versions, self.released = {}, [], True


def _inside_a_unit_error(name: str) -> UsageError:
    # Inside a unit only its owner runs, so no other rank would take part in this operation.
    return UsageError(
        f"`{name}` was called inside a layer on a value that another pipeline rank may hold: it came in an object (a"
        " cache of keys and values, say), in which smpkit does not look, or in a weight's place"
        " (torch.func.functional_call)",
        hint="give it to the layer as an argument: a tensor, or a tuple, list, dict or dataclass with tensors; make a"
        " weight in the module that uses it",
    )
