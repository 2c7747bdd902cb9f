"""The failure store: what ranks write into the rendezvous store, to find out together why a wait failed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["FailureStore", "RankStatus"]

_SERVE_SECONDS: Final = 3.0  # how long the rank that serves the store stays, so that others can read why it left
_CONNECT_SECONDS: Final = 5.0
_STILL_SERVED_SECONDS: Final = 0.25  # how long a server that listened counts as alive: statuses are read by the dozen
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_SILENCE_SECONDS: Final = 10.0  # after which a store that does not answer counts as gone

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankStatus:
    """What one rank publishes: what it waited in, why it failed, or that its script came to its end."""

    rank: int
    kind: Literal["waited", "timed out", "failed", "ended"]
    text: str
    peers: Sequence[int] = ()  # whom a wait was for


class FailureStore:
    """The statuses of all ranks, in the store.

    Args:
        store: the store that all ranks share.
        rank: this rank.
        size: how many ranks there are.
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
        self._store = PrefixStore("smpkit/board", store)
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
        """Write this rank's status."""
        self.write(f"note/{status.rank}", json.dumps(asdict(status)))

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the statuses that these ranks have written."""
        texts = {rank: self.read(f"note/{rank}") for rank in ranks}
        return {rank: _parse_status(text) for rank, text in texts.items() if text is not None}

    def record_failure(self, status: RankStatus) -> RankStatus:
        """Write why the job failed, and return the reason of the rank that did so first."""
        return _parse_status(self._call_store(lambda: self._store.compare_set("first", "", json.dumps(asdict(status)))))

    def failure(self) -> RankStatus | None:
        """Return why the job failed, if a rank has said so."""
        first = self.read("first")
        return None if first is None else _parse_status(first)

    def poll(self) -> tuple[RankStatus | None, RankStatus | None]:
        """Return why the job failed, and what rank 0 has said, for a thread that asks again and again.

        Unlike the other calls this waits as long as the store stands still, which alone is no failure.

        Raises:
            DistStoreError: nobody serves the store any more.
        """
        self._check_served()
        keys = ("first", "note/0")
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        first, server = (None if text is None else _parse_status(text) for text in texts)
        return first, server

    def ack(self) -> None:
        """Tell the rank that serves the store that this one has read the failure, or has come to its end."""
        self._call_store(lambda: self._store.add("read", 1))

    def serve_until_read(self, seconds: float = _SERVE_SECONDS) -> bool:
        """Wait some seconds for all others to acknowledge, for the store ends with this process; return if they did."""
        deadline = time.monotonic() + seconds
        while self._call_store(lambda: self._store.add("read", 0)) < self.size - 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def write(self, key: str, text: str) -> None:
        """Leave a text for the other ranks, over what was there."""
        self._call_store(lambda: self._store.set(key, text))

    def read(self, key: str) -> str | None:
        """Return a text that a rank has left."""
        return self._call_store(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def shorten_timeout(self) -> None:
        """Shorten the store's own timeout: its host may be the rank that is gone."""
        self._call_store(lambda: self._store.set_timeout(_STORE_TIMEOUT))

    def _call_store(self, call: Callable[[], _T]) -> _T:
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
                self._check_served()
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

    def _check_served(self) -> None:
        """Raise DistStoreError if nobody listens where the store was: its client would say so in a hundred lines."""
        if self._address is None or time.monotonic() - self._served_at < _STILL_SERVED_SECONDS:
            return
        try:
            socket.create_connection(self._address, _CONNECT_SECONDS).close()
            self._served_at = time.monotonic()
        except ConnectionRefusedError:
            where = "{}:{}".format(*self._address)
            raise dist.DistStoreError(f"nobody listens at {where} any more") from None
        except OSError:
            pass  # a busy host, a name that does not resolve now: let the store try


def _address_of(store: Store) -> tuple[str, int] | None:
    """Return where a store is served; None if it is none of sockets."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _parse_status(text: str | bytes) -> RankStatus:
    return RankStatus(**json.loads(text))
