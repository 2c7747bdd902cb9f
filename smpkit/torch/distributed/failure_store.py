"""The failure store: the statuses that ranks publish in the rendezvous store, to find out why a wait failed.

Its keys::

    status/<rank>    what a rank waited in, why it failed, or that its script ended
    first            why the job failed, by the rank that was first to write it
    read             how many ranks have read that, for the rank whose process serves the store
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_SERVE_SECONDS: Final = 3.0
"""How long the rank that serves the store stays, so that others can read why it ends."""
_CONNECT_SECONDS: Final = 5.0
_DYING_SECONDS: Final = 0.1  # for which a connection to a process that is being killed may stay open
_STILL_SERVED_SECONDS: Final = 0.25
"""How long a server that has answered counts as alive: many statuses are read at a time."""
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_SILENCE_SECONDS: Final = 10.0
"""After which a store that does not answer counts as gone."""

_T = TypeVar("_T")
Ending: TypeAlias = Literal["waited", "timed out", "failed", "ended"]


@dataclass(frozen=True)
class RankStatus:
    """What one rank publishes: what it waited in, why it failed, or that its script came to its end."""

    rank: int
    kind: Ending
    text: str
    peers: Sequence[int] = ()
    """The ranks that a wait was for."""

    place: str = ""
    """The line of the script that the rank was in."""

    began: float = 0.0
    """When the wait began and when it ended, of `time.time()`."""

    ended: float = 0.0


class FailureStore:
    """The statuses of all ranks, in the store.

    Args:
        timeout: the deadline of a wait, for messages.
        groups: returns the process groups whose connections to close.
        server: who serves the store, for messages.
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
        server: str,
        serves_store: bool,
    ) -> None:
        self._store = PrefixStore("smpkit/failures", store)
        self._address = None if serves_store else _address_of(store)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.groups = groups
        self.serves_store = serves_store
        self.server = server
        self._is_silent = False
        self._served_at = -_STILL_SERVED_SECONDS

    def publish(self, status: RankStatus) -> None:
        self.write(f"status/{status.rank}", json.dumps(asdict(status)))

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the statuses that these ranks have published."""
        texts = {rank: self.read(f"status/{rank}") for rank in ranks}
        return {rank: _parse_status(text) for rank, text in texts.items() if text is not None}

    def record_failure(self, status: RankStatus) -> RankStatus:
        """Publish why the job failed; return the reason of the rank that was first to do so."""
        return _parse_status(self._call_store(lambda: self._store.compare_set("first", "", json.dumps(asdict(status)))))

    def failure(self) -> RankStatus | None:
        """Return why the job failed, if a rank has published it."""
        first = self.read("first")
        return None if first is None else _parse_status(first)

    def poll(self) -> tuple[RankStatus | None, RankStatus | None]:
        """Return why the job failed, and the status of rank 0, for a thread that polls.

        Unlike the other calls, this one waits as long as the store's host is suspended, which alone is not a failure.
        If no process serves the store any more, it raises DistStoreError.
        """
        self._check_served()
        keys = ("first", "status/0")
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        first, server = (None if text is None else _parse_status(text) for text in texts)
        return first, server

    def ack(self) -> None:
        """Acknowledge, to the rank that serves the store, that this one has read the failure or has ended."""
        self._call_store(lambda: self._store.add("read", 1))

    def serve_until_read(self, seconds: float = _SERVE_SECONDS) -> bool:
        """Wait until all others have acknowledged, since the store ends with this process; return whether they have."""
        deadline = time.monotonic() + seconds
        while self._call_store(lambda: self._store.add("read", 0)) < self.size - 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def write(self, key: str, text: str) -> None:
        self._call_store(lambda: self._store.set(key, text))

    def read(self, key: str) -> str | None:
        """Return the text under a key; None if no rank has written it."""
        return self._call_store(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def shorten_timeout(self) -> None:
        """Shorten the store's own timeout: its server may be on the rank that is gone."""
        self._call_store(lambda: self._store.set_timeout(_STORE_TIMEOUT))

    def _call_store(self, call: Callable[[], _T]) -> _T:
        """Call the store, and give up on it for good, with DistStoreError, if it does not answer in time."""
        # In a thread, since the store's own timeout does not cover everything: `check` waits for ever for a host that
        # is suspended, unlike one that is gone.
        answers: list[_T] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                self._check_served()
                answers.append(call())
            except Exception as error:  # raised below, in the calling thread
                errors.append(error)
                self._served_at = -_STILL_SERVED_SECONDS
                try:
                    self._check_served()
                except dist.DistStoreError as gone:  # the server ended since it was last seen: this says it better
                    errors[:] = [gone]

        if not self._is_silent:
            thread = threading.Thread(target=ask, name="smpkit-failure-store", daemon=True)
            thread.start()
            thread.join(_SILENCE_SECONDS)
            self._is_silent = thread.is_alive()
        if self._is_silent:
            raise dist.DistStoreError(f"it has not answered for {_SILENCE_SECONDS:g} s")
        if errors:
            raise errors[0]
        return answers[0]

    def _check_served(self) -> None:
        """Raise DistStoreError if the store's port is closed: its own client would log that in a hundred lines."""
        if self._address is None or time.monotonic() - self._served_at < _STILL_SERVED_SECONDS:
            return
        is_gone, where = False, "{}:{}".format(*self._address)
        try:
            with socket.create_connection(self._address, _CONNECT_SECONDS) as probe:
                # The kernel still accepts connections for a process that is being killed, and closes them when it is
                # dead. A server that lives waits for a request in silence.
                probe.settimeout(_DYING_SECONDS)
                with contextlib.suppress(TimeoutError):
                    is_gone = not probe.recv(1)
        except (ConnectionRefusedError, ConnectionResetError):
            is_gone = True
        except OSError:
            return  # a busy host, or a name that does not resolve now: the store may get through
        if is_gone:
            raise dist.DistStoreError(f"nobody listens at {where} any more")
        self._served_at = time.monotonic()


def _address_of(store: Store) -> tuple[str, int] | None:
    """Return host and port of a store; None if it is not a TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _parse_status(text: str | bytes) -> RankStatus:
    return RankStatus(**json.loads(text))
