"""One storage that leaves the device: where its bytes are now, and what must be complete before they are touched.

::

    LIVE ──send──► COPYING ──copied──► HOST ──load──► LOADING ──waited──► LIVE ──► DEAD
                      └── needed before it was released: handed out as it is

Under `retain_graph` a storage that was brought back goes to HOST again: its copy there is as good as it was.
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

__all__ = ["Group", "SavedStorage", "StorageState", "check_version"]


class StorageState:
    """Where the bytes of a storage are. Bits, not an enumeration: these are looked at for every saved tensor."""

    LIVE: Final = 1
    """On the device."""
    COPYING: Final = 2
    """On the device, and on their way to the host."""
    HOST: Final = 4
    """On the host only."""
    LOADING: Final = 8
    """On the host, and on their way to the device."""
    DEAD: Final = 16


_NEXT: Final = {
    StorageState.LIVE: StorageState.COPYING | StorageState.HOST | StorageState.DEAD,
    StorageState.COPYING: StorageState.HOST | StorageState.DEAD,
    StorageState.HOST: StorageState.LOADING | StorageState.DEAD,
    StorageState.LOADING: StorageState.LIVE | StorageState.HOST | StorageState.DEAD,
    StorageState.DEAD: 0,
}
_NAMES: Final = {value: name for name, value in vars(StorageState).items() if name.isupper()}


class SavedStorage:
    """A storage (or a piece gathered from one) whose bytes come and go.

    Args:
        key: what the engine finds it by when the same storage is saved again.
        storage: the storage that was saved; held weakly, so a later one at the same address is not taken for it.
        version_alias: of the saved tensor, whose version counter it shares; without data, unless it is `data`.
        data: what is on the device; held until its copy is complete, whatever the user lets go of.
        spec: of `data`, here and whenever it is back.
        num_bytes: how many.
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
        self.state: int = 1  # State.LIVE; two lookups less
        self.block: Block | None = None
        """Of what left together, a piece each."""
        self.host: Tensor | None = None
        """The piece of the block, a tensor like `data`."""
        self.d2h_event: Event | None = None
        self.h2d_event: Event | None = None
        self.num_handles = self.num_pending = 1
        """How often it was saved, and how many of those backward has not asked for yet in this pass."""
        self.num_groups = 1
        """How many groups need it: it is dead when the last of them is."""
        self.last_group = group
        """The latest of them."""

    def enter(self, state: int) -> None:
        """Go on to the next state."""
        assert _NEXT[self.state] & state, f"a saved storage cannot go from {_NAMES[self.state]} to {_NAMES[state]}"
        self.state = state

    def detach_version_alias(self, empty: Tensor) -> None:
        """Make the version alias a tensor of its own: `data` goes to others, and must not be emptied with it."""
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
        """Its device copies are waited for, and are not released any more."""
        self.stays_on_device = False
        """Needed again so soon that it does not leave at all."""
        self.label = f"`{name}`" if microbatch is None else f"`{name}` (microbatch {microbatch})"

    def add(self, saved: SavedStorage) -> bool:
        """Note that the group needs a storage, once; return False if it is dead, and nobody can need it any more."""
        if saved.last_group == self.index:
            return True
        # A destructor may have run since the storage was found; now that it is counted, none will end it.
        saved.num_groups += 1
        if saved.state == StorageState.DEAD:
            return False
        saved.last_group = self.index
        if saved in self.storages:
            saved.num_groups -= 1
        else:
            self.storages.append(saved)
        return True

    @property
    def num_bytes(self) -> int:
        """What it needs on the device."""
        return sum(saved.num_bytes for saved in self.storages)

    def __str__(self) -> str:
        return self.label

    def __del__(self) -> None:
        self.on_release(self)


def check_version(version_alias: Tensor, version: int, where: str) -> None:
    """Raise if a saved tensor was changed in place since it was saved.

    Raises:
        UsageError: as plain autograd raises; it leaves the question to hooks where there are some.
    """
    if version_alias._version != version:
        raise UsageError(
            f"a tensor that {where} saved for backward was changed in place afterwards"
            f" (it is at version {version_alias._version}, and was saved at {version})",
            hint="write `x = x + y` instead of `x += y`, or clone the tensor first",
        )
