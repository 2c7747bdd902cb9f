"""One storage that leaves the device: where its bytes are, and what must be complete before they are touched.

::

    LIVE ──send──► COPYING ──copied──► HOST ──load──► LOADING ──waited──► BACK
                      │                  ▲                │                 │
                      └─── handed out ───┤◄── evicted ────┘                 │
                                         └◄──────────── handed out ─────────┘

From each of them to DEAD, when no graph needs it. LIVE never leads to HOST, where its bytes are not: a storage whose
copy could not begin stays LIVE. BACK does, under `retain_graph`: the bytes on the host are still valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.offload.arena import Block, ContiguousSpec
from smpkit.torch.offload.link import Event

__all__ = ["BACK", "COPYING", "DEAD", "HOST", "LIVE", "LOADING", "Group", "SavedStorage", "check_version"]


# Where the bytes of a storage are. Plain integers, not an enum, whose members cost a slow lookup for every saved
# tensor; bits, so that sets of states are tested with one operation.
LIVE: Final = 1
"""On the device only."""
COPYING: Final = 2
"""On the device; a copy to the host is under way."""
HOST: Final = 4
"""On the host only."""
LOADING: Final = 8
"""On the host; a copy to the device is under way."""
BACK: Final = 16
"""On the device, and on the host still."""
DEAD: Final = 32
"""Nowhere: no graph needs them."""


class SavedStorage:
    """A storage (or a piece gathered from one) whose bytes come and go.

    Args:
        key: what the engine finds it by when the same storage is saved again.
        storage: the storage that was saved; held weakly, to tell it from a later one at the same address.
        version_alias: shares the saved tensor's version counter; has no memory, unless it is `data`.
        data: the bytes on the device; held until their copy is complete, even if the user frees the tensor.
        spec: of `data`, now and when it is loaded again.
        num_bytes: of `data`.
        stream: the stream whose allocator gets the memory back.
        group: the index of the group that it is saved in.
    """

    __slots__ = (
        "block",
        "d2h_event",
        "data",
        "h2d_event",
        "host",
        "key",
        "last_group",
        "num_bytes",
        "num_groups",
        "num_handles",
        "num_pending",
        "spec",
        "state",
        "storage",
        "stream",
        "version",
        "version_alias",
    )

    def __init__(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version_alias: Tensor,
        data: Tensor,
        spec: ContiguousSpec,
        num_bytes: int,
        stream: Hashable,
        group: int,
    ) -> None:
        self.key = key
        self.storage = weakref.ref(storage)
        self.version_alias = version_alias
        self.version = version_alias._version
        self.data: Tensor | None = data
        self.spec = spec
        self.num_bytes = num_bytes
        self.stream = stream
        self.state: int = LIVE
        """Who changes it has asked for it, in a branch or an assertion: only the diagram's changes are possible."""
        self.block: Block | None = None
        """Host memory, shared by what left together."""
        self.host: Tensor | None = None
        """This storage's piece of the block, a tensor like `data`."""
        self.d2h_event: Event | None = None
        self.h2d_event: Event | None = None
        self.num_handles = self.num_pending = 1
        """How often it was saved, and how many of these handles the current backward has not unpacked yet."""
        self.num_groups = 1
        """How many groups need it: it is retired with the last of them."""
        self.last_group = group
        """The index of the latest of them."""

    def detach_version_alias(self, empty: Tensor) -> None:
        """Give the version alias a tensor of its own: others now hold `data`, which must not be emptied with it."""
        if self.version_alias is self.data:
            self.version_alias = self.data.detach()
            self.version_alias.data = empty


class Group:
    """What is saved together and needed together: the inputs of one layer, for one microbatch.

    Args:
        index: counts groups in the order of forward.
        name: of the layer.
        microbatch: which one; None outside a step.
        on_release: called with the group when no graph needs it any more.
    """

    __slots__ = (
        "__weakref__",
        "index",
        "is_held",
        "label",
        "microbatch",
        "name",
        "on_release",
        "stays_on_device",
        "storages",
    )

    def __init__(self, index: int, name: str, microbatch: int | None, on_release: Callable[[Group], None]) -> None:
        self.index = index
        self.name = name
        self.microbatch = microbatch
        self.on_release = on_release
        self.storages: list[SavedStorage] = []
        self.is_held = False
        """Its backward is near or runs: do not release its device memory."""
        self.stays_on_device = False
        """Needed again so soon that it does not leave."""
        self.label = f"`{name}`" if microbatch is None else f"`{name}` (microbatch {microbatch})"

    def add(self, saved: SavedStorage) -> bool:
        """Note that the group needs a storage, once; return False if the storage is dead."""
        if saved.last_group == self.index:
            return True
        # Count first, then look: a destructor in any thread may have retired the storage since it was found, but none
        # will once it is counted.
        saved.num_groups += 1
        if saved.state == DEAD:
            return False
        saved.last_group = self.index
        if saved in self.storages:
            saved.num_groups -= 1
        else:
            self.storages.append(saved)
        return True

    @property
    def num_bytes(self) -> int:
        """The device memory that it needs."""
        return sum(saved.num_bytes for saved in self.storages)

    def __str__(self) -> str:
        return self.label

    def __del__(self) -> None:
        self.on_release(self)


def check_version(version_alias: Tensor, version: int, where: str) -> None:
    """Check that a saved tensor was not changed in place; autograd leaves this check to saved-tensor hooks.

    Raises:
        UsageError: it was.
    """
    if version_alias._version != version:
        raise UsageError(
            f"a tensor that {where} saved for backward was changed in place afterwards"
            f" (it is at version {version_alias._version}, and was saved at {version})",
            hint="write `x = x + y` instead of `x += y`, or clone the tensor first",
        )
