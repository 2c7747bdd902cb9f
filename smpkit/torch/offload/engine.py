"""Take saved tensors away from the device and bring them back in time.

::

    compute  F0     F1     F2     F3    │ B3   B2   B1   B0
    out        0 ────►1 ────►2 ────►3   │
    back                                │      1 ──► 0 ──►          (a lead of 2: 3 and 2 never left)

A *group* is what one layer needs back at once. Nothing waits for the device but compute for a load (`arrivals.py`) and
an allocator for a copy (`departures.py`); who may touch which bytes when is said by events alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.arena import Arena, aligned
from smpkit.torch.offload.arrivals import HostToDevice
from smpkit.torch.offload.forms import SpecCache
from smpkit.torch.offload.link import Link
from smpkit.torch.offload.pace import Lead
from smpkit.torch.offload.prefetch import BackwardOrder
from smpkit.torch.offload.record import Group
from smpkit.torch.offload.report import StepReport
from smpkit.torch.offload.scope import HookContext

__all__ = ["ActivationEngine"]

GROUP_BYTES: Final = 64 << 20
_CASTABLE_DTYPES: Final = frozenset({torch.float32, torch.float64})
"""Types that autocast makes narrower ones of."""


class ActivationEngine(HostToDevice):
    """Offloads what is saved inside its scopes.

    Args:
        link: the device's.
        arena: where the bytes go.
        order: predicts what backward needs next.
        lead: how many layers ahead loads are issued; "auto" learns the smallest number without a stall.
        min_bytes: smaller tensors stay; None: what the link thinks worth it.
        rank: for reports.
    """

    context_type: type[HookContext] = HookContext

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
        super().__init__(link, arena, order or BackwardOrder(), lead, rank)
        self.min_bytes = link.min_bytes if min_bytes is None else min_bytes
        self.parameters: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that never leave. Known weakly: what is freed leaves its address to others, which may leave."""
        self.specs = SpecCache()
        self.on_step: Callable[[StepReport], object] | None = None
        self.num_checkpointed_calls = 0
        """How many checkpointed calls there have been."""
        self.num_inputs_of: dict[str, int] = {}
        """How many storages left with the latest call of each name; the next is sent when it has as many."""
        self._microbatch: int | None = None

    # --- what is offloaded -------------------------------------------------------------------------------------------

    def offload_inputs(self, name: str) -> AbstractContextManager[object]:
        """Offload what autograd saves inside, as one group: the inputs of a checkpointed call.

        Does nothing inside another checkpointed call, whose recomputation makes these tensors again.
        """
        self.num_checkpointed_calls += 1
        # What leaves the first time leaves together as later, in one block: that is what `footprint` predicts from.
        return self.context_type(self, name, None, self.num_inputs_of.get(name, sys.maxsize))

    def offload_saved_tensors(self, name: str, group_bytes: int = GROUP_BYTES) -> HookContext:
        """Offload all that autograd saves inside, in groups that end at `next_layer` or when they are large."""
        return self.context_type(self, name, group_bytes)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never offload these tensors (parameters, buffers) or views of them; replaces what was said before."""
        self.parameters, are_wide = {}, False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.parameters[storage._cdata] = weakref.ref(storage)
            are_wide = are_wide or tensor.dtype in _CASTABLE_DTYPES
        self.specs.check_half_precision(may_be_casts=are_wide)

    # --- the life of a step ------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the order in which this step's backwards come from the actions of this rank."""
        self.order.follow(actions)

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that a pipeline's action begins, and load what comes soon."""
        self._microbatch = microbatch
        self.order.begin(kind, segment, microbatch)
        self._current_group = -1
        self._prefetch(())

    def footprint(self) -> list[int]:
        """Return the sizes of the blocks that the graphs take which are alive now, were everything on the host."""
        seen, sizes = set[int](), list[int]()
        for index in sorted(self._groups):
            group = self._live_group(index)
            own = [] if group is None else [saved for saved in group.storages if id(saved) not in seen]
            seen.update(map(id, own))
            sizes.append(sum(aligned(saved.num_bytes) for saved in own))
        return [size for size in sizes if size]

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have host memory for blocks of these sizes, so that none is taken from the system while a step runs."""
        self.arena.reserve(sizes)

    def begin_microbatch(self, microbatch: int) -> None:
        """Note which microbatch runs, where there is no pipeline."""
        self._microbatch = microbatch

    def end_step(self) -> StepReport:
        """Close the accounts of a step; graphs may outlive it."""
        self._microbatch, self._current_group = None, -1
        self.order.end()
        self._count_consumed()
        self._release_copied()
        self._evict_unused()
        self.tuner.end_step()
        report = self.stats.end_step(self.tuner.lead, self.arena.peak_bytes)
        self.arena.reset_peak()
        if self.on_step is not None:
            self.on_step(report)
        return report

    def abandon_step(self) -> None:
        """Forget a step that an exception ended; its graphs give back what they hold when they go."""
        self._microbatch, self._current_group = None, -1
        self.order.end()
        self._count_consumed()
        for index in list(self._prefetched):
            self._evict(index)

    def close(self) -> None:
        """End copies and give host memory back; no graph may need it any more."""
        self.link.close()
        self.arena.close()

    # --- groups, for scopes ------------------------------------------------------------------------------------------

    def new_group(self, name: str) -> Group:
        """Start what the next layer saves."""
        group = Group(self.order.add(), name, self._microbatch, self._drop_group)
        self._groups[group.index] = weakref.ref(group)
        group.stays_on_device = self.order.is_needed_within(self.tuner.lead)
        self._release_copied()
        self.tuner.begin_layer(0)
        self._prefetch(())
        return group
