"""Give every wait a deadline, and an error that says who waited for whom, in what, and which rank failed first.

Nothing here runs while all goes well. When a wait fails, this rank writes what it waited in to the *failure store*
(keys in the rendezvous store), closes its connections so that other blocked ranks wake, and reads what they wrote::

    rank 0  barrier ──timeout───► writes "barrier", closes connections, reads ──► DeadlineError: ... for rank 2
    rank 1  barrier ──connection─► writes "barrier", reads                    ──► the same error
                      closed
    rank 2  computing                                                 wrote nothing: it is the one waited for

A rank whose script raises writes that too, so the connection errors of the others become `rank 2 failed: ...`.

Between GPUs (nccl) a wait is a kernel, which no host watches: there a rank that fails, or learns of a failure, ends its
own kernels by an *abort*. For a rank that waits in a CUDA call meanwhile, a thread polls the store (`watcher.py`).
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from smpkit.errors import DeadlineError, RemoteError, SmpkitError
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed.failure_store import Ending, FailureStore, RankStatus
from smpkit.torch.distributed.rendezvous import first_line, name_ranks
from smpkit.torch.distributed.tracebacks import collective_of_torch, explain_parts, place_in_script, shorten

_GRACE_SECONDS: Final = 2.0
"""How long to wait for the statuses of ranks whose connections were just closed."""
_END_GRACE_SECONDS: Final = 0.5
"""How far apart the ends of ranks may lie that end together."""
_ABORT_SECONDS: Final = 5.0
"""For the devices to end their kernels; it takes milliseconds unless the driver hangs."""
_TEXT_LIMIT: Final = 2000
"""Characters of an error that are published for the other ranks."""
_CONTEXT_ATTRIBUTE: Final = "_smpkit_places"
"""Attribute of an exception."""
_CLOSE_TAG: Final = 0x5AFE
_ENDED: Final = "its script ended"
_DEADLOCK: Final = "a deadlock of "
_SCHEDULED: Final = re.compile(r"(forward|backward) of microbatch")
_SENDING: Final = re.compile(r"(send|broadcast) to ")

_CONNECTION_ERROR: Final = re.compile(
    r"connection|timed out|timeout|socket|broken pipe|recvvalue|pair closure|remote process", re.IGNORECASE
)
_TIMED_OUT: Final = re.compile(r"timed out|timeout", re.IGNORECASE)
_STORE_IS_GONE: Final = (dist.DistError, RuntimeError)


# --- waiting ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting(what: str, peers: dist.ProcessGroup | Sequence[int]) -> Iterator[None]:
    """Turn a failed wait for `peers` (a group, or global ranks) into an error that says who waited for whom.

    Only communication errors are translated; every other exception passes.

    Args:
        what: the call that waits, in the user's words: `barrier of WORLD`.
        peers: the ranks that it waits for.

    Raises:
        DeadlineError: the wait passed its deadline.
        RemoteError: another rank failed or died.
    """
    if _failures is not None and _failures.verdict is not None:
        # An aborted operation between GPUs raises nothing, and its result is garbage: do not compute with it.
        raise _failures.verdict
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        failure = explain_error(error, what, peers, started)
        if failure is error:
            raise
        # The library's message (an address, "closed by peer") says less than this error, and doubles the traceback.
        raise failure from None


def explain_error(
    error: RuntimeError, what: str, peers: dist.ProcessGroup | Sequence[int], started: float
) -> Exception:
    """Return what `waiting` raises for `error`; that is `error` itself unless it is a communication error.

    Args:
        started: when the wait began, of `time.monotonic()`.
    """
    failures, seconds = _failures, time.monotonic() - started
    if failures is None or isinstance(error, SmpkitError):
        return error
    ranks = dist.get_process_group_ranks(peers) if isinstance(peers, dist.ProcessGroup) else peers
    # While one thread judges, it wakes waits of others: these take its verdict.
    with failures.lock:
        if (verdict := failures.verdict_on(error)) is not None:
            return verdict
        return failures.judge(what, ranks, str(error), seconds) if _is_connection_error(error) else error


def _is_connection_error(error: RuntimeError, other_names: Sequence[str] = ()) -> bool:
    text = str(error).lower()
    return bool(_CONNECTION_ERROR.search(text)) or any(
        name in text for name in (*backends.backend_names(), *other_names)
    )


def add_error_context(error: Exception, **context: str) -> None:
    """Add to an error where it was raised, such as `module="layers.1"`, while it propagates.

    Of two contexts of a kind the inner one stays. The traceback shows it, and so do the errors of the other ranks.
    Communication errors have a context of their own.
    """
    if isinstance(error, DeadlineError | RemoteError):
        return
    contexts: dict[str, str] = getattr(error, _CONTEXT_ATTRIBUTE, {})
    if contexts:
        error.__notes__.remove(f"raised in {_context_text(contexts)}")
    contexts = {**context, **contexts}
    setattr(error, _CONTEXT_ATTRIBUTE, contexts)
    error.add_note(f"raised in {_context_text(contexts)}")


def _context_text(contexts: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in contexts.items())


# --- failing ----------------------------------------------------------------------------------------------------------


class Failures:
    """What this process knows of failures of its job, and how it tells and wakes the other ranks."""

    def __init__(self, store: FailureStore) -> None:
        self.store = store
        self.has_failed = False
        """Whether this process has reported its failure, or has learnt that another one failed."""
        self.verdict: SmpkitError | None = None
        """Why the job fails, where a thread found it out before the one that waits."""
        self.lock = threading.RLock()

    def report(self, error: BaseException, *, goes_on: bool) -> None:
        """Report to the other ranks that this one ends with `error`, and wake those that wait for it. Never raises.

        Args:
            goes_on: whether the process may live on: its end does not close its connections then.
        """
        if self.store.size == 1:
            return
        self.has_failed = True
        self._tell(error, closes_connections=goes_on or self.store.serves_store)
        # The store ends with this process: keep it until the others have read the failure.
        if self.store.serves_store:
            with contextlib.suppress(*_STORE_IS_GONE):
                self.store.serve_until_read()

    def fail_all_ranks(self, error: SmpkitError) -> None:
        """Fail the job on all ranks, and wake every wait of this process and of those that it is connected to.

        For a thread that knows why the waiting one waits. Never raises.
        """
        self.verdict = self.verdict or error
        self._tell(error, closes_connections=True)

    def _tell(self, error: BaseException, *, closes_connections: bool) -> None:
        text = f"{type(error).__name__}: {error.message if isinstance(error, SmpkitError) else error}"[:_TEXT_LIMIT]
        if contexts := getattr(error, _CONTEXT_ATTRIBUTE, None):
            text = f"{text} ({_context_text(contexts)})"
        kind: Ending = "timed out" if isinstance(error, DeadlineError) else "failed"
        with contextlib.suppress(*_STORE_IS_GONE):
            self.store.shorten_timeout()
            self.store.record_failure(RankStatus(self.store.rank, kind, text))
            if closes_connections:
                close_connections(self.store.groups())
        abort(self.store.groups())

    def report_end(self) -> None:
        """Report that the script has ended, for a rank that still waits for this one. Never raises."""
        store = self.store
        if store.size == 1 or self.has_failed:
            return
        with contextlib.suppress(*_STORE_IS_GONE):
            store.shorten_timeout()
            store.publish(RankStatus(store.rank, "ended", _ENDED))
            if not store.serves_store:
                store.ack()
            elif not store.serve_until_read(_END_GRACE_SECONDS):
                # Wake the ranks that wait for this one while they can still read why.
                close_connections(store.groups())
                store.serve_until_read()

    def fail_this_process(self, failure: SmpkitError) -> None:
        """Wake every wait of this process, on the host and on the GPU, to raise `failure`; of several, the first.

        For a thread that has learnt that the job fails.
        """
        self.has_failed, self.verdict = True, self.verdict or failure
        abort(self.store.groups())
        close_connections(self.store.groups())

    # --- why a wait failed --------------------------------------------------------------------------------------------

    def verdict_on(self, error: RuntimeError) -> SmpkitError | None:
        """Return the verdict, if there is one and `error` may come from a closed connection or an abort."""
        if not _is_connection_error(error, backends.device_names()):
            return None
        with self.lock:
            return self.verdict

    def recorded_reason(self, error: RuntimeError) -> SmpkitError | None:
        """Return the failure that another rank has recorded, if `error` may come from it."""
        if _is_connection_error(error):
            with contextlib.suppress(*_STORE_IS_GONE):
                self.store.shorten_timeout()
                first = self.store.failure()
                if first is not None and first.rank != self.store.rank:
                    return error_of(first)
        return None

    def judge(
        self, what: str, peers: Sequence[int], error: str, seconds: float, place: str | None = None
    ) -> SmpkitError:
        """Publish a failed wait, collect the statuses of others, and return the reason; takes at most some seconds.

        Args:
            what: the call that waited, in the user's words.
            peers: the global ranks that take part.
            error: the library's message.
            seconds: how long it was waited for, as far as is known.
            place: where in the script; None is where it is now.
        """
        store, self.has_failed = self.store, True
        peers = [rank for rank in peers if rank != store.rank]
        is_late = seconds >= 0.95 * store.timeout.total_seconds() or bool(_TIMED_OUT.search(error))
        kind: Ending = "timed out" if is_late else "waited"
        now = time.time()
        place = place_in_script() if place is None else place
        own = RankStatus(store.rank, kind, what, peers, place, began=now - seconds, ended=now)
        try:
            store.shorten_timeout()
            store.publish(own)
            close_connections(store.groups())
            abort(store.groups())
            reason = _own_diagnosis(own, _collect_statuses(store, peers))
            kind = "timed out" if isinstance(reason, DeadlineError) else "failed"
            first = store.failure() or store.record_failure(RankStatus(store.rank, kind, reason.message))
            store.ack()
        except _STORE_IS_GONE as gone:  # most often because rank 0 served it and is gone
            abort(store.groups())
            return RemoteError(
                f"rank {store.rank} lost {name_ranks(peers)} in {what} after {_duration(own)};"
                f" the store in {store.server} could tell why, but {first_line(gone)}",
                hint=f"see the output of {store.server}",
            )
        return reason if first.rank == store.rank else error_of(first)


_failures: Failures | None = None
_previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def attach(store: FailureStore) -> Failures:
    """Use `store` from now on, and write uncaught exceptions of this process to it."""
    global _failures, _previous_hook  # noqa: PLW0603 - one per process, like the default group
    _failures = Failures(store)
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught
    return _failures


def detach() -> None:
    """Forget the failure store, for example because the process groups are gone."""
    global _failures, _previous_hook  # noqa: PLW0603
    _failures = None
    if _previous_hook is not None and sys.excepthook is _on_uncaught:
        sys.excepthook = _previous_hook
        _previous_hook = None


def current_failures() -> Failures | None:
    return _failures


def failed() -> bool:
    """Return whether this process has reported its failure, or has learnt that another one failed."""
    return _failures is not None and _failures.has_failed


def report_failure(error: BaseException, *, goes_on: bool = False) -> None:
    """Do what `Failures.report` does, in a job."""
    if _failures is not None:
        _failures.report(error, goes_on=goes_on)


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print the exception without the frames of smpkit, and report it to the other ranks."""
    assert _previous_hook is not None
    failures = _failures
    if failures is not None and isinstance(error, RuntimeError) and not isinstance(error, SmpkitError):
        # The watcher looks seldom: what it has not heard of yet may be recorded.
        reason = failures.verdict_on(error) or failures.recorded_reason(error)
        # Torch waits by itself, too: `fully_shard` does in a backward.
        if reason is None and _is_connection_error(error) and (collective := collective_of_torch(traceback)):
            seconds = failures.store.timeout.total_seconds() if _TIMED_OUT.search(str(error)) else 0.0
            reason = failures.judge(*collective, str(error), seconds, place_in_script(traceback))
        if reason is not None:
            error, kind = reason, type(reason)
    error.__traceback__ = traceback
    explain_parts(error)
    shorten(error)
    _previous_hook(kind, error, error.__traceback__)
    sys.stderr.flush()
    if not issubclass(kind, KeyboardInterrupt):
        report_failure(error)
    elif failures is not None:
        # Ctrl-C reaches every rank: none needs a report, but each must end its own kernels.
        abort(failures.store.groups())


# --- waking -----------------------------------------------------------------------------------------------------------


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """End the kernels of this rank that wait for others, and so the host's waits for them. Never raises."""

    # All groups at once: an abort waits for the kernels of its group, which may be queued behind those of another one.
    def end(backend: Backend) -> None:
        with contextlib.suppress(RuntimeError):
            backend.abort()

    threads = [
        threading.Thread(target=end, args=(backend,), name="smpkit-abort", daemon=True)
        for group in groups
        for backend in backends.device_backends(group)
    ]
    for thread in threads:
        thread.start()
    latest = time.monotonic() + _ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, latest - time.monotonic()))


def close_connections(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close this rank's gloo connections, so that ranks that wait for it wake now and not at their deadline.

    Groups that carry no CPU tensors (nccl) are left alone: see `abort`.
    """
    # gloo has no call for it (its `abort` wakes nobody), but a receive that times out closes the connection to its
    # sender. Each of them: in a ring, the rank that waits for this one is not the one that this one waits for.
    for group in groups:
        if "cpu" not in backends.backends_of(group):
            continue
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))


# --- the reason -------------------------------------------------------------------------------------------------------


def _collect_statuses(store: FailureStore, peers: Sequence[int]) -> dict[int, RankStatus]:
    """Return the statuses of the peers and of the ranks that they wait for; give these a short time to publish."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        statuses, missing = _follow_waits(store, peers)
        if not missing or store.failure() is not None or time.monotonic() > deadline:
            return statuses
        time.sleep(0.05)


def _follow_waits(store: FailureStore, peers: Sequence[int]) -> tuple[dict[int, RankStatus], set[int]]:
    """Follow the waits from the peers on; return the statuses found, and the ranks that have published none."""
    statuses: dict[int, RankStatus] = {}
    asked, wanted = {store.rank}, set(peers)
    while new := wanted - asked:
        published = store.statuses(sorted(new))
        asked |= new
        statuses |= published
        wanted = {peer for status in published.values() for peer in status.peers}
    return statuses, asked - statuses.keys() - {store.rank}


def _own_diagnosis(own: RankStatus, statuses: dict[int, RankStatus]) -> SmpkitError:
    """Return what happened as this rank sees it: ranks that have published nothing are those waited for."""
    silent = [rank for rank in own.peers if rank not in statuses]
    if not silent:  # the peers wait as well, directly or not for a rank that has published nothing
        awaited = {rank for status in statuses.values() for rank in status.peers}
        silent = sorted(awaited - statuses.keys() - {own.rank})
    ended = [rank for rank, status in sorted(statuses.items()) if status.kind == "ended"]
    others = [status for _, status in sorted(statuses.items()) if status.kind != "ended" and status.text != own.text]
    elsewhere = [f"rank {status.rank} waited in {status.text} for {name_ranks(status.peers)}" for status in others]
    aside = f"; meanwhile {', '.join(elsewhere)}" if elsewhere else ""
    if ended:
        call = f" without the call of rank {own.rank} in {own.place}" if own.place else ""
        return RemoteError(
            f"rank {own.rank} lost {name_ranks(ended)} in {own.text}: {_ENDED}{call}{aside}",
            hint=_hint_of_loss(_ENDED),
        )
    if own.kind == "timed out" or any(status.kind == "timed out" for status in statuses.values()):
        missing = silent or [rank for rank, status in statuses.items() if status.text != own.text] or own.peers
        text = f"rank {own.rank} waited {_duration(own)} in {own.text} for {name_ranks(missing)}{aside}"
        if circle := _circle_of_waits({own.rank: own, **statuses}):
            places = [f"rank {waiter.rank}" + (f" in {waiter.place}" if waiter.place else "") for waiter in circle]
            text += f"; {_DEADLOCK}{' and '.join(places)}"
        return DeadlineError(text, hint=_hint_of_deadline(text))
    return RemoteError(
        f"rank {own.rank} lost {name_ranks(silent or own.peers)} in {own.text}{aside}",
        hint=_hint_of_loss(""),
    )


def _circle_of_waits(statuses: Mapping[int, RankStatus]) -> list[RankStatus]:
    """Return ranks of which each waits for the next one, which is in another call, and the last for the first."""
    for start in statuses.values():
        chains, seen = [[start]], {start.rank}
        for chain in chains:  # grows, by longer ones
            for status in [statuses[rank] for rank in chain[-1].peers if rank in statuses]:
                if not _is_blocked(chain[-1], status):
                    continue
                if status is start:
                    return chain
                if status.rank not in seen:
                    seen.add(status.rank)
                    chains.append([*chain, status])
    return []


def _is_blocked(waiting: RankStatus, awaited: RankStatus) -> bool:
    """Return whether the awaited rank waits in a call that does not help the waiting one: then it is not just slow."""
    if not awaited.peers or min(waiting.ended, awaited.ended) <= max(waiting.began, awaited.began):
        return False  # it came to its wait after the other one had given up
    both = (waiting.text, awaited.text)
    is_on_its_way = all(map(_SCHEDULED.match, both)) or (  # what the one waits for may have been sent already
        any(map(_SENDING.match, both)) and any(text.startswith("recv_from") for text in both)
    )
    return waiting.text != awaited.text and not is_on_its_way


def _hint_of_deadline(text: str) -> str:
    if _DEADLOCK in text:
        return "every rank makes the same calls in the same order: is one of these under `if smp.rank() == ...`?"
    return "all ranks must make the same calls; if one is merely slow, raise `timeout_seconds`"


def _hint_of_loss(text: str) -> str:
    if _ENDED in text:
        return (
            "every rank makes the same calls: is this one under `if smp.rank() == ...`, or did the other rank have"
            " fewer batches, leave its loop early, or call sys.exit?"
        )
    return "it ended without saying why; see its own output (a signal, or too little memory?)"


def error_of(first: RankStatus) -> SmpkitError:
    """Return the error of the first rank that failed, as other ranks raise it."""
    if first.kind == "timed out":
        return DeadlineError(first.text.removeprefix("DeadlineError: "), hint=_hint_of_deadline(first.text))
    if first.text.startswith(f"rank {first.rank} lost "):
        return RemoteError(first.text, hint=_hint_of_loss(first.text))
    return RemoteError(f"rank {first.rank} failed: {first.text}", hint=f"see the traceback of rank {first.rank}")


def _duration(wait: RankStatus) -> str:
    seconds = wait.ended - wait.began
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
