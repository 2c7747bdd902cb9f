"""The board: what the ranks write into the store that they met at, to find out together why a wait failed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's, which its types hide

__all__ = ["Board", "Note"]

_LINGER_SECONDS: Final = 3.0  # how long the rank that serves the store stays, so that others can read why it left
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_SILENCE_SECONDS: Final = 10.0  # after which a store that does not answer counts as gone

_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """What one rank says on the board: what it waited in, why it failed, or that its script came to its end."""

    rank: int
    kind: Literal["waited", "timed out", "failed", "ended"]
    text: str
    peers: Sequence[int] = ()  # whom a wait was for


class Board:
    """The notes of all ranks, in the store.

    Args:
        store: the store that all ranks share.
        rank: this rank.
        size: how many ranks there are.
        timeout: the deadline of a wait, for messages.
        groups: returns the process groups to hang up on.
        serves_store: the store dies with this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        groups: Callable[[], Iterable[dist.ProcessGroup]],
        *,
        serves_store: bool,
    ) -> None:
        self._store = PrefixStore("smpkit/board", store)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.groups = groups
        self.serves_store = serves_store
        self._is_silent = False

    def say(self, note: Note) -> None:
        """Write this rank's note."""
        self.write(f"note/{note.rank}", json.dumps(asdict(note)))

    def notes(self, ranks: Iterable[int]) -> dict[int, Note]:
        """Return the notes that these ranks have written."""
        texts = {rank: self.read(f"note/{rank}") for rank in ranks}
        return {rank: _note(text) for rank, text in texts.items() if text is not None}

    def fail(self, note: Note) -> Note:
        """Write why the job failed, and return the reason of the rank that did so first."""
        return _note(self._ask(lambda: self._store.compare_set("first", "", json.dumps(asdict(note)))))

    def failure(self) -> Note | None:
        """Return why the job failed, if a rank has said so."""
        first = self.read("first")
        return None if first is None else _note(first)

    def acknowledge(self) -> None:
        """Tell the rank that serves the store that this one has read the failure."""
        self._ask(lambda: self._store.add("read", 1))

    def linger(self) -> None:
        """Wait until all others have read the failure, at most three seconds: the store ends with this process."""
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline and self._ask(lambda: self._store.add("read", 0)) < self.size - 1:
            time.sleep(0.05)

    def write(self, key: str, text: str) -> None:
        """Leave a text for the other ranks, over what was there."""
        self._ask(lambda: self._store.set(key, text))

    def read(self, key: str) -> str | None:
        """Return a text that a rank has left."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def hurry(self) -> None:
        """Give up on the store itself soon: its host may be the rank that is gone."""
        self._ask(lambda: self._store.set_timeout(_STORE_TIMEOUT))

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Ask the store, and give up on it for good if it does not answer in time.

        Its own timeout does not cover all: `check` waits without end for a host that stands still, unlike one that is
        gone. So this thread does not wait for it.

        Raises:
            DistStoreError: it did not answer.
        """
        answers: list[_T] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(call())
            except Exception as error:  # raised again below, where somebody hears it
                errors.append(error)

        if not self._is_silent:
            thread = threading.Thread(target=ask, name="smpkit-board", daemon=True)
            thread.start()
            thread.join(_SILENCE_SECONDS)
            self._is_silent = thread.is_alive()
        if self._is_silent:
            raise dist.DistStoreError(f"it has not answered for {_SILENCE_SECONDS:g} s")
        if errors:
            raise errors[0]
        return answers[0]


def _note(text: str | bytes) -> Note:
    return Note(**json.loads(text))
