"""Copy the inputs of checkpointed calls to the host, free their device memory, and load them before backward.

A call *parks* its inputs when its forward begins, and takes them when backward runs it again. Only two things wait:
compute for a load that it needs, and the reuse of memory for copies that still use it. Events alone order both::

    on the device ──send──► both, copying out ──copied──► on the host ──load──► both, copying back ──take──► on the host

An object holds what it may still need, and Python's reference counts do the rest: a graph holds its `_Parked`, that its
`_Storage`, those their `Block`, which goes back to the arena with the last of them. When a call has taken its inputs,
the engine drops the device's bytes; those on the host stay as long as the graph, for a second backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.core import devices
from smpkit.torch.core.offloader import Offloader, OffloadUse, Parked, changed_in_place
from smpkit.torch.core.tensor_spec import version_of
from smpkit.torch.offload.arena import Arena, Block, aligned, arena_for
from smpkit.torch.offload.link import DONE, Event, Link, link_for
from smpkit.torch.offload.order import BackwardOrder, Lead, LeadTuner
from smpkit.torch.offload.report import OffloadStats, StepReport

_MIN_HELD: Final = 2
"""Calls whose copies get time to end before a stream waits for them, where this thread runs ahead of the device."""


class _Storage:
    """The memory of a tensor: its bytes are on the device, on the host, or on both."""

    def __init__(self, engine: ActivationEngine, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.engine = engine
        self.storage, self.version = weakref.ref(storage), tensor._version
        self.data: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        """Flat bytes on the device; held until their copy is complete, even if the user frees the tensor."""
        self.num_bytes = storage.nbytes()
        self.stream: Hashable = engine.link.stream()
        """The stream whose work uses `data`."""
        self.block: Block | None = None
        self.host: Tensor | None = None
        """Its piece of the block."""
        self.out: Event | None = None
        """Of the copy to the host, once that has begun."""
        self.back: Event | None = None
        """Of the copy back, once that has begun; `DONE` if it was needed before it had left, and so stayed."""
        self.num_waiting = 0
        """How many calls have yet to take it."""

    def is_leaving(self) -> bool:
        """Return whether the device's bytes are only there for a copy to the host."""
        return self.data is not None and self.out is not None and self.back is None

    def last_copy(self) -> Event | None:
        """Return the latest copy from or to the device's bytes; a copy back comes after the copy out."""
        return self.out if self.back is None or self.back is DONE else self.back

    def free(self) -> None:
        """Let go of the device's memory; whoever gets it waits for the copies that use it."""
        if self.data is None:
            return
        if (copy := self.last_copy()) is not None:  # even if it is over: the forward may still read the memory
            self.engine.link.before_reuse(self.data, copy, self.stream)
        self.data = None
        self.engine.stats.release(self.num_bytes)

    __del__ = free


class _ParkedTensor:
    """One tensor of a call: all of a `_Storage`, a view of one, or, if it stays, the tensor itself."""

    def __init__(self, tensor: Tensor, saved: _Storage | None, alias: Tensor | None = None) -> None:
        self.saved, self.version = saved, version_of(tensor)
        self.alias = tensor
        """Tells whether somebody has changed the tensor; without memory, if that leaves."""
        if saved is not None:
            self.requires_grad, self.dtype, self.shape = tensor.requires_grad, tensor.dtype, tensor.shape
            self.stride, self.offset = tensor.stride(), tensor.storage_offset()
            self.alias = tensor.detach() if alias is None else alias
            self.alias.data = saved.engine.empty  # keeps the version counter

    def take(self, name: str) -> Tensor:
        """Return the tensor, which is on the device."""
        if version_of(self.alias) != self.version:
            raise changed_in_place(name)
        if self.saved is None:
            return self.alias
        data = self.saved.data
        assert data is not None
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        tensor.set_(data.untyped_storage(), self.offset, self.shape, self.stride)
        return tensor.requires_grad_(self.requires_grad)


class _Parked(Parked):
    """What one call keeps, from its forward until its graph is gone."""

    def __init__(self, engine: ActivationEngine, index: int, name: str, microbatch: int | None) -> None:
        self._engine, self.index, self.name, self.microbatch = engine, index, name, microbatch
        self.tensors: list[_ParkedTensor] = []
        self.saved: list[_Storage] = []
        """The memory of those that may leave, each once."""

    @property
    def label(self) -> str:
        """The call, as errors and reports name it."""
        return f"`{self.name}`" if self.microbatch is None else f"`{self.name}` (microbatch {self.microbatch})"

    def add(self, tensor: Tensor, *, must_leave: str | None) -> None:
        self._engine.add(self, tensor, must_leave)

    def take(self) -> list[Tensor]:
        self._engine.bring_back(self)
        tensors = [tensor.take(self.label) for tensor in self.tensors]
        self._engine.let_go(self)
        return tensors

    def __del__(self) -> None:
        self._engine.order.gone.append(self.index)


class ActivationEngine(Offloader):
    """Offloads what checkpointed calls keep; see `make_engine` for its settings."""

    why_not = "a graph is captured, whose replays would read the memory of others"
    hint = "PREFER_CPU_OFFLOAD keeps it on the device"

    def __init__(
        self,
        link: Link,
        arena: Arena,
        order: BackwardOrder | None = None,
        *,
        lead: Lead = "auto",
        min_bytes: int | None = None,
        rank: int = 0,
    ) -> None:
        self.link, self.arena, self.order = link, arena, order or BackwardOrder()
        self.tuner = LeadTuner(link, lead)
        self.stats = OffloadStats(link, rank)
        self.empty = torch.empty(0, device=link.device)
        self.num_calls = 0
        self.on_stall: Callable[[str, Any, Any], object] | None = None
        """Called with a call's label, and the link's stamps before and after each wait for one of its copies."""
        self._min_bytes = max(1, link.min_bytes if min_bytes is None else min_bytes)
        self._saved: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        """By the address of the storage, to recognise one that several calls keep."""
        self._parked: weakref.WeakValueDictionary[int, _Parked] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[int, weakref.ref[_Storage]]] = deque()
        """What is being copied out, with the number of its call, the oldest first."""
        self._loaded: set[int] = set()
        """Calls that were loaded ahead, and that backward has not come to."""
        self._microbatch: int | None = None
        self._current: int | None = None
        """The call whose backward runs."""

    # --- the life of a step ------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        self.order.follow(actions)

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        self._microbatch, self._current = microbatch, None
        self.order.begin(kind, segment, microbatch)
        self._load_ahead()

    def begin_microbatch(self, microbatch: int) -> None:
        """Note which microbatch runs, where there is no pipeline."""
        self._microbatch = microbatch

    def end_step(self) -> StepReport:
        """Close the step's statistics; graphs may outlive it."""
        self.abandon_step()
        self._free_copied()
        report = self.stats.end_step(self.tuner.lead, self.arena)
        self.tuner.end_step(report.stall_seconds)
        return report

    def abandon_step(self) -> None:
        """Forget what was expected of a step; its graphs give back what they hold when they go."""
        self._microbatch = self._current = None
        self.order.end()
        for index in self._loaded:  # on a wrong prediction: the host has it all
            if (parked := self._parked.get(index)) is not None:
                for saved in parked.saved:
                    if saved.back is not None:
                        saved.free()
        self._loaded.clear()

    def footprint(self) -> int:
        kept = {saved for parked in self._parked.values() for saved in parked.saved}
        return sum(aligned(saved.num_bytes) for saved in kept)

    def reserve(self, num_bytes: int) -> None:
        self.arena.reserve(num_bytes)

    def use(self) -> OffloadUse:
        arena, stats = self.arena, self.stats
        stats.hold(0)
        arena.collect()
        return OffloadUse(stats.device_bytes, arena.used_bytes, arena.mapped_bytes, stats.bytes_out, stats.bytes_back)

    def close(self) -> None:
        """Block this thread until all copies have ended."""
        self.link.close()

    # --- forward: from the device to the host ------------------------------------------------------------------------

    def park(self, name: str, tensors: Iterable[Tensor]) -> Parked:
        """Take over what a call keeps; begin to copy it to the host, unless it is needed again very soon."""
        self.num_calls += 1
        if devices.is_capturing(self.link.device):
            # What a graph captures stays (`why_not`); and nobody may ask for its events.
            return super().park(name, tensors)
        parked = _Parked(self, self.order.add(), name, self._microbatch)
        self._free_copied()  # of the calls before: this one is the latest now
        self.tuner.begin_layer(0)
        self._load_ahead()
        new: list[_Storage] = []
        parked.tensors = [
            _ParkedTensor(tensor, self._saved_of(tensor, parked, new, self._min_bytes)) for tensor in tensors
        ]
        self._parked[parked.index] = parked
        self._begin_leaving(parked, new)
        return parked

    def add(self, parked: _Parked, tensor: Tensor, must_leave: str | None) -> None:
        """Park one more tensor of a call, an output of an operator that a policy offloads."""
        new: list[_Storage] = []
        saved = self._saved_of(tensor, parked, new, 1 if must_leave else self._min_bytes)
        # What is empty, such as the output of an expert without a token, has nothing to take away.
        reason = None if saved or not tensor.numel() else self._why_not(tensor)
        parked.tensors.append(_ParkedTensor(tensor, saved, alias=tensor))
        if not reason and not self._begin_leaving(parked, new):
            reason = "host memory for activations is used up"
        if reason:
            self.say_it_stays(parked.label, must_leave, reason)

    def _saved_of(self, tensor: Tensor, parked: _Parked, new: list[_Storage], min_bytes: int) -> _Storage | None:
        """Return the record of a tensor's memory for a call; None if that stays on the device."""
        if not self._can_leave(tensor):
            return None
        storage = tensor.untyped_storage()
        # A small part of a large memory, such as a slice of the batch, stays with it: the user has that all the same.
        # One of an activation does not: the graph alone would keep all of its memory. Calls that keep parts share it.
        is_small_part = storage.nbytes() >= 2 * tensor.nbytes and not tensor.requires_grad
        if storage.nbytes() < min_bytes or is_small_part:
            return None
        saved = self._saved.get(storage._cdata)
        if saved is None or saved.storage() is not storage or saved.version != tensor._version:
            saved = self._saved[storage._cdata] = _Storage(self, tensor, storage)
            new.append(saved)
        elif (stream := self.link.stream()) != saved.stream:
            self.link.before_reuse(tensor, DONE, stream)  # this call's work reads the memory when another gives it back
        if saved not in parked.saved:
            parked.saved.append(saved)
            saved.num_waiting += 1
        return saved

    def _can_leave(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self.link.device
            # A view of a parameter or of a subclass: FSDP makes parameters for a layer's forward that the model does
            # not know, and resizes their storage to nothing afterwards, whether we have copied it or not.
            and (tensor._base is None or type(tensor._base) is Tensor)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference())
            and not torch._C._are_functorch_transforms_active()  # they would take our copies for the user's
        )

    def _why_not(self, tensor: Tensor) -> str:
        if self._can_leave(tensor):
            return f"it has {tensor.nbytes} bytes of a memory of {tensor.untyped_storage().nbytes()}"
        if tensor.device != self.link.device:
            return f"it lies on {tensor.device}, not on {self.link.device}"
        return f"it is a {type(tensor).__name__} of layout {tensor.layout}, a view of a weight, or under a transform"

    def _begin_leaving(self, parked: _Parked, new: Sequence[_Storage]) -> bool:
        """Begin to copy to one block, unless backward needs it soon; return False if there is no room for it."""
        self.stats.hold(sum(saved.num_bytes for saved in new))
        if not new or self.order.is_needed_within(self.tuner.lead):
            return True
        block = self.arena.take(sum(aligned(saved.num_bytes) for saved in new))
        if block is None:
            self.stats.kept_bytes += sum(saved.num_bytes for saved in new)
            budget = self.arena.budget_bytes or self.arena.mapped_bytes
            self._warn_once(
                "host memory",
                f"host memory for activations is used up ({budget} bytes): those of {parked.label}, and others, stay"
                " on the device",
            )
            return False
        copies, offset = list[tuple[Tensor, Tensor]](), 0
        for saved in new:
            saved.block, saved.host = block, block.memory[offset : offset + saved.num_bytes]
            assert saved.data is not None
            copies.append((saved.data, saved.host))
            offset += aligned(saved.num_bytes)
        out = self.link.send(copies, (self.link.now(), block.after))
        for saved in new:
            saved.out = out
            self._leaving.append((parked.index, weakref.ref(saved)))
            self.stats.bytes_out += saved.num_bytes
        return True

    def _free_copied(self) -> None:
        """Free device memory whose copy is complete, the oldest first."""
        if devices.is_capturing(self.link.device):  # a graph may not wait for what is not in it
            return
        # Without a plan backward may begin now, and it begins with the latest calls: keep those on the device.
        held = 0 if self.order.is_planned else self.tuner.lead
        held = max(held, _MIN_HELD) if self.link.runs_ahead else held
        while self._leaving:
            index, saved = self._leaving[0][0], self._leaving[0][1]()
            if saved is not None and saved.is_leaving():
                assert saved.out is not None
                if self.order.is_recent(index, held) or not (saved.out.done() or self.link.runs_ahead):
                    return
                self._free(saved, index)
            self._leaving.popleft()

    def _free(self, saved: _Storage, index: int) -> None:
        """Let go of the device's memory. Where this thread is ahead, compute may wait for a copy out: a stall."""
        copy = saved.last_copy()
        is_late = saved.data is not None and copy is not None and copy is saved.out and not copy.done()
        with self._stall(self._parked.get(index)) if is_late else contextlib.nullcontext():
            saved.free()

    # --- backward: from the host to the device -----------------------------------------------------------------------

    def bring_back(self, parked: _Parked) -> None:
        """Have all that a call keeps on the device, and load what calls after it keep."""
        if self._current != parked.index:
            self._current = parked.index
            self.order.begin_backward(parked.index)
            self._loaded.discard(parked.index)
            self._cancel_leaving(parked)
            self._free_copied()
            self.tuner.begin_layer(sum(saved.num_bytes for saved in parked.saved))
        self._load(parked)
        self._load_ahead()
        for event in {saved.back for saved in parked.saved if saved.back is not None and not saved.back.done()}:
            with self._stall(parked):
                self.link.wait(event, parked.label)
        stream = self.link.stream()
        for saved in parked.saved:
            if saved.stream != stream and saved.data is not None and saved.back is not None:
                self.link.before_reuse(saved.data, saved.back, stream)  # its allocator does not know of this stream

    def let_go(self, parked: _Parked) -> None:
        """Drop the engine's hold on what a call has taken: the host has it, or the graph."""
        for saved in parked.saved:
            saved.num_waiting -= 1
            if saved.num_waiting <= 0 and saved.out is not None:
                self._free(saved, parked.index)

    def _load_ahead(self) -> None:
        """Issue the loads of what is needed soon."""
        for index in self.order.upcoming(self.tuner.lead):
            if (parked := self._parked.get(index)) is not None and (self._cancel_leaving(parked) | self._load(parked)):
                self._loaded.add(index)

    def _cancel_leaving(self, parked: _Parked) -> bool:
        """Let what is still on the device stay there, for its load is due; return whether there was any."""
        leaving = [saved for saved in parked.saved if saved.is_leaving()]
        for saved in leaving:
            saved.back = DONE
        return bool(leaving)

    def _load(self, parked: _Parked) -> bool:
        """Issue one copy for all that a call lacks on the device; return whether there was any."""
        absent = [saved for saved in parked.saved if saved.data is None]
        if not absent:
            return False
        rooms = [torch.empty(saved.num_bytes, dtype=torch.uint8, device=self.link.device) for saved in absent]
        # The event comes after the allocations: work already queued on this stream may still use that memory.
        after = [saved.out for saved in absent if saved.out is not None]
        after.append(self.link.now())
        copies = [(saved.host, room) for saved, room in zip(absent, rooms, strict=True) if saved.host is not None]
        back, stream = self.link.fetch(copies, after), self.link.stream()
        for saved, room in zip(absent, rooms, strict=True):
            assert saved.block is not None
            saved.data, saved.back, saved.stream, saved.block.last_read = room, back, stream, back
            self.stats.hold(saved.num_bytes)
            self.stats.bytes_back += saved.num_bytes
        return True

    @contextlib.contextmanager
    def _stall(self, parked: _Parked | None) -> Iterator[None]:
        """Note how long compute waits inside, for a copy of this call."""
        first = self.link.stamp()
        yield
        last = self.link.stamp()
        if parked is not None:
            self.stats.add_wait(parked.name, parked.microbatch, first, last)
            if self.on_stall is not None:
                self.on_stall(parked.label, first, last)


def make_engine(
    device: torch.device,
    *,
    lead: Lead = "auto",
    horizon: int | None = None,
    min_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    link: Link | None = None,
    deadline_seconds: float = 600.0,
    rank: int = 0,
    num_sharers: int = 1,
) -> ActivationEngine:
    """Return an engine for a device.

    Args:
        lead: how many layers ahead loads are issued; "auto" learns the smallest number without a stall.
        horizon: over how many of this rank's next pipeline actions loads may reach; None: no bound.
        min_bytes: smaller tensors stay on the device; None: what is worth a copy there.
        host_budget_bytes: the most host memory; None: this process's part of three quarters of what is free.
        link: None: the device's own.
        deadline_seconds: of every wait for a copy.
        num_sharers: how many processes of this machine share its memory.
    """
    link = link or link_for(device, deadline_seconds)
    arena = arena_for(link, host_budget_bytes, num_sharers)
    return ActivationEngine(link, arena, BackwardOrder(horizon), lead=lead, min_bytes=min_bytes, rank=rank)
