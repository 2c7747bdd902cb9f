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
from smpkit.torch.offload.arena import Block, Form
from smpkit.torch.offload.link import Event

__all__ = ["Group", "Record", "State", "check_version"]


class State:
    """Where the bytes of a record are. Bits, not an enumeration: these are looked at for every saved tensor."""

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
    State.LIVE: State.COPYING | State.HOST | State.DEAD,
    State.COPYING: State.HOST | State.DEAD,
    State.HOST: State.LOADING | State.DEAD,
    State.LOADING: State.LIVE | State.HOST | State.DEAD,
    State.DEAD: 0,
}
_NAMES: Final = {value: name for name, value in vars(State).items() if name.isupper()}


class Record:
    """A storage (or a piece gathered from one) whose bytes come and go.

    Args:
        key: what the engine finds it by when the same storage is saved again.
        storage: the storage that was saved; held weakly, so a later one at the same address is not taken for it.
        witness: an alias of the saved tensor, which shares its version counter; without data, unless it is `data`.
        data: what is on the device; held until its copy is complete, whatever the user lets go of.
        form: of `data`, here and whenever it is back.
        num_bytes: how many.
        stream: the stream whose allocator gets the memory back.
        group: the index of the group that it is saved in.
    """

    __slots__ = (
        "block",
        "data",
        "form",
        "handles",
        "host",
        "key",
        "last_group",
        "load",
        "num_bytes",
        "num_groups",
        "out",
        "pending",
        "state",
        "storage",
        "stream",
        "version",
        "witness",
    )

    def __init__(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        witness: Tensor,
        data: Tensor,
        form: Form,
        num_bytes: int,
        stream: Hashable,
        group: int,
    ) -> None:
        self.key = key
        self.storage = weakref.ref(storage)
        self.witness = witness
        self.version = witness._version
        self.data: Tensor | None = data
        self.form = form
        self.num_bytes = num_bytes
        self.stream = stream
        self.state: int = 1  # State.LIVE; two lookups less
        self.block: Block | None = None
        """Of what left together, a piece each."""
        self.host: Tensor | None = None
        """The piece of the block, a tensor like `data`."""
        self.out: Event | None = None
        self.load: Event | None = None
        self.handles = self.pending = 1
        """How often it was saved, and how many of those backward has not asked for yet in this pass."""
        self.num_groups = 1
        """How many groups need it: it is dead when the last of them is."""
        self.last_group = group
        """The latest of them."""

    def enter(self, state: int) -> None:
        """Go on to the next state."""
        assert _NEXT[self.state] & state, f"a saved storage cannot go from {_NAMES[self.state]} to {_NAMES[state]}"
        self.state = state

    def part(self, nothing: Tensor) -> None:
        """Make the witness one of its own: `data` goes to others, and must not be emptied when the record lets go."""
        if self.witness is self.data:
            self.witness = self.data.detach()
            self.witness.data = nothing


class Group:
    """What is saved together and needed together: the boundary of one layer, for one microbatch.

    Args:
        index: counts groups in the order of forward.
        name: of the layer.
        microbatch: which one; None outside a step.
        forget: called with the group when no graph needs it any more.
    """

    __slots__ = ("__weakref__", "forget", "index", "is_pinned", "microbatch", "name", "needs", "stays", "what")

    def __init__(self, index: int, name: str, microbatch: int | None, forget: Callable[[Group], None]) -> None:
        self.index = index
        self.name = name
        self.microbatch = microbatch
        self.forget = forget
        self.needs: list[Record] = []
        self.is_pinned = False
        """Its device copies are waited for, and are not released any more."""
        self.stays = False
        """Needed again so soon that it does not leave at all."""
        self.what = f"`{name}`" if microbatch is None else f"`{name}` (microbatch {microbatch})"

    def add(self, record: Record) -> bool:
        """Note that the group needs a record, once; return False if it is dead, and nobody can need it any more."""
        if record.last_group == self.index:
            return True
        # A destructor may have run since the record was found; now that it is counted, none will end it.
        record.num_groups += 1
        if record.state == State.DEAD:
            return False
        record.last_group = self.index
        if record in self.needs:
            record.num_groups -= 1
        else:
            self.needs.append(record)
        return True

    @property
    def num_bytes(self) -> int:
        """What it needs on the device."""
        return sum(record.num_bytes for record in self.needs)

    def __str__(self) -> str:
        return self.what

    def __del__(self) -> None:
        self.forget(self)


def check_version(witness: Tensor, version: int, where: str) -> None:
    """Raise if a saved tensor was changed in place since it was saved.

    Raises:
        UsageError: as plain autograd raises; it leaves the question to hooks where there are some.
    """
    if witness._version != version:
        raise UsageError(
            f"a tensor that {where} saved for backward was changed in place afterwards"
            f" (it is at version {witness._version}, and was saved at {version})",
            hint="write `x = x + y` instead of `x += y`, or clone the tensor first",
        )
