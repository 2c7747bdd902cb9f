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
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from smpkit.errors import DeadlineError, RemoteError, SmpkitError
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed.failure_store import FailureStore, RankStatus
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.distributed.tracebacks import place_in_script, shorten

__all__ = [
    "abort",
    "add_error_context",
    "attach",
    "close_connections",
    "detach",
    "diagnose",
    "error_of",
    "explain_error",
    "fail_all_ranks",
    "fail_this_process",
    "failed",
    "failure_store",
    "report_end",
    "report_failure",
    "waiting",
]

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


_failure_store: FailureStore | None = None
_failed = False
_failure: SmpkitError | None = None
"""Why the job fails, where a thread found it out before the one that waits; see `fail_this_process`."""
# While one thread diagnoses a failure, it wakes waits of others: these must take its verdict, not make their own.
_diagnosis_lock = threading.RLock()
_previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def attach(failure_store: FailureStore) -> None:
    """Use `failure_store` from now on, and write uncaught exceptions of this process to it."""
    global _failure_store, _failed, _failure, _previous_hook  # noqa: PLW0603 - one per process, like the default group
    _failure_store, _failed, _failure = failure_store, False, None
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught


def failure_store() -> FailureStore | None:
    """Return the failure store that is in use."""
    return _failure_store


def detach() -> None:
    """Forget the failure store, for example because the process groups are gone."""
    global _failure_store, _failure, _previous_hook  # noqa: PLW0603
    _failure_store = _failure = None
    if _previous_hook is not None and sys.excepthook is _on_uncaught:
        sys.excepthook = _previous_hook
        _previous_hook = None


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print the exception without the frames of smpkit, and report it to the other ranks."""
    assert _previous_hook is not None
    if isinstance(error, RuntimeError) and (known := _known_reason(error) or _recorded_reason(error)) is not None:
        error, kind = known, type(known)
    error.__traceback__ = traceback
    shorten(error)
    _previous_hook(kind, error, error.__traceback__)
    sys.stderr.flush()
    if not issubclass(kind, KeyboardInterrupt):
        report_failure(error)
    elif _failure_store is not None:
        # Ctrl-C reaches every rank: none needs a report, but each must end its own kernels.
        abort(_failure_store.groups())


def failed() -> bool:
    """Return whether this process has reported its failure, or has learnt that another one failed."""
    return _failed


def add_error_context(error: Exception, **context: str) -> None:
    """Add to an error where it was raised, such as `module="layers.1"`, while it propagates.

    Of two contexts of a kind the inner one stays. The traceback shows it, and so do the errors of the other ranks.
    Communication errors have a context of their own.
    """
    if isinstance(error, DeadlineError | RemoteError):
        return
    contexts: dict[str, str] = getattr(error, _CONTEXT_ATTRIBUTE, {})
    for note in [f"raised in {_context_text(contexts)}"] if contexts else []:
        error.__notes__.remove(note)
    contexts = {**context, **contexts}
    setattr(error, _CONTEXT_ATTRIBUTE, contexts)
    error.add_note(f"raised in {_context_text(contexts)}")


def _context_text(contexts: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in contexts.items())


def report_failure(error: BaseException) -> None:
    """Report to the other ranks that this one ends with `error`, and wake those that wait for it. Never raises."""
    global _failed  # noqa: PLW0603
    failure_store = _failure_store
    if failure_store is None or failure_store.size == 1:
        return
    _failed = True
    text = f"{type(error).__name__}: {error.message if isinstance(error, SmpkitError) else error}"[:_TEXT_LIMIT]
    if contexts := getattr(error, _CONTEXT_ATTRIBUTE, None):
        text = f"{text} ({_context_text(contexts)})"
    try:
        failure_store.shorten_timeout()
        failure_store.record_failure(
            RankStatus(failure_store.rank, "timed out" if isinstance(error, DeadlineError) else "failed", text)
        )
        if failure_store.serves_store:
            close_connections(failure_store.groups())
    except (dist.DistError, RuntimeError):
        pass  # the rank that served the store is gone
    abort(failure_store.groups())
    # The store ends with this process: keep it until the others have read the failure.
    if failure_store.serves_store:
        with contextlib.suppress(dist.DistError, RuntimeError):
            failure_store.serve_until_read()


def report_end() -> None:
    """Report that the script has ended, for a rank that still waits for this one. Never raises."""
    failure_store = _failure_store
    if failure_store is None or failure_store.size == 1 or _failed:
        return
    with contextlib.suppress(dist.DistError, RuntimeError):
        failure_store.shorten_timeout()
        failure_store.publish(RankStatus(failure_store.rank, "ended", _ENDED))
        if not failure_store.serves_store:
            failure_store.ack()
        elif not failure_store.serve_until_read(_END_GRACE_SECONDS):
            # Wake the ranks that wait for this one while they can still read why.
            close_connections(failure_store.groups())
            failure_store.serve_until_read()


def fail_all_ranks(error: SmpkitError) -> None:
    """Fail the job on all ranks, and wake every wait of this process and of those that it is connected to.

    For a thread that knows why the waiting one waits. Never raises.
    """
    global _failure  # noqa: PLW0603
    if _failure_store is not None:
        _failure = _failure or error
        with contextlib.suppress(dist.DistError, RuntimeError):
            _failure_store.record_failure(
                RankStatus(_failure_store.rank, "failed", f"{type(error).__name__}: {error.message}"[:_TEXT_LIMIT])
            )
            close_connections(_failure_store.groups())
        abort(_failure_store.groups())


def fail_this_process(failure: SmpkitError) -> None:
    """Wake every wait of this process, on the host and on the GPU, to raise `failure`; of several, the first.

    For a thread that has learnt that the job fails.
    """
    global _failed, _failure
    failure_store = _failure_store
    if failure_store is None:
        return
    _failed, _failure = True, _failure or failure
    abort(failure_store.groups())
    close_connections(failure_store.groups())


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """End the kernels of this rank that wait for others, and so the host's waits for them. Never raises."""
    # All groups at once: an abort waits for the kernels of its group, which may be queued behind those of another one.
    threads = [
        threading.Thread(target=_abort, args=(backend,), name="smpkit-abort", daemon=True)
        for group in groups
        for backend in backends.device_backends(group)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _abort(backend: Backend) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


def close_connections(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close this rank's gloo connections, so that ranks that wait for it wake now and not at their deadline.

    Groups that carry no CPU tensors (nccl) are left alone: see `abort`.
    """
    # gloo has no call for it (its `abort` wakes nobody), but a receive that times out closes a group's connections.
    for group in groups:
        if group.size() == 1 or "cpu" not in backends.backends_of(group):
            continue
        peer = (group.rank() + 1) % group.size()
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, device="cpu")], peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))


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
    if _failure is not None:
        # An aborted operation between GPUs raises nothing, and its result is garbage: do not compute with it.
        raise _failure
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
    failure_store, seconds = _failure_store, time.monotonic() - started
    if failure_store is None or isinstance(error, SmpkitError):
        return error
    ranks = dist.get_process_group_ranks(peers) if isinstance(peers, dist.ProcessGroup) else peers
    waited = _Wait(what, [rank for rank in ranks if rank != failure_store.rank], seconds, str(error))
    with _diagnosis_lock:
        if (known := _known_reason(error)) is not None:
            return known
        return _diagnose(failure_store, waited) if _is_connection_error(error) else error


def _known_reason(error: RuntimeError) -> SmpkitError | None:
    """Return the diagnosed failure, if there is one and `error` may come from a closed connection or an abort."""
    if isinstance(error, SmpkitError):
        return None
    if not (_is_connection_error(error) or _mentions(error, backends.device_names())):
        return None
    with _diagnosis_lock:
        return _failure


def _recorded_reason(error: RuntimeError) -> SmpkitError | None:
    """Return the failure that another rank has recorded, if `error` may come from it; the watcher looks seldom."""
    failure_store = _failure_store
    if failure_store is None or isinstance(error, SmpkitError) or not _is_connection_error(error):
        return None
    with contextlib.suppress(dist.DistError, RuntimeError):
        failure_store.shorten_timeout()
        first = failure_store.failure()
        if first is not None and first.rank != failure_store.rank:
            return error_of(first)
    return None


def _is_connection_error(error: RuntimeError) -> bool:
    return bool(_CONNECTION_ERROR.search(str(error))) or _mentions(error, backends.backend_names())


def _mentions(error: RuntimeError, names: list[str]) -> bool:
    text = str(error).lower()
    return any(name in text for name in names)


def diagnose(what: str, peers: Sequence[int], error: str, seconds: float) -> SmpkitError | None:
    """Find out why an operation failed that no host waits for; return None after `detach`.

    Args:
        what: the operation, in the user's words.
        peers: the global ranks that take part, without this one.
        error: the library's message.
        seconds: how long it was waited for, as far as is known.
    """
    global _failure  # noqa: PLW0603
    failure_store = _failure_store
    if failure_store is None:
        return None
    with _diagnosis_lock:
        _failure = _failure or _diagnose(failure_store, _Wait(what, list(peers), seconds, error))
        return _failure


@dataclass(frozen=True)
class _Wait:
    """A wait that failed: in which call, for which ranks, after how long, with which message of the library."""

    what: str
    peers: list[int]
    seconds: float
    error: str


def _diagnose(failure_store: FailureStore, wait: _Wait) -> SmpkitError:
    """Publish a failed wait, collect the statuses of others, and return the reason; takes at most some seconds."""
    global _failed  # noqa: PLW0603
    _failed = True
    late = wait.seconds >= 0.95 * failure_store.timeout.total_seconds() or bool(_TIMED_OUT.search(wait.error))
    kind: Literal["timed out", "waited", "failed"] = "timed out" if late else "waited"
    now = time.time()
    status = RankStatus(
        failure_store.rank, kind, wait.what, wait.peers, place_in_script(), began=now - wait.seconds, ended=now
    )
    try:
        failure_store.shorten_timeout()
        failure_store.publish(status)
        close_connections(failure_store.groups())
        abort(failure_store.groups())
        statuses = _collect_statuses(failure_store, wait.peers)
        own = _own_diagnosis(status, wait, statuses)
        kind = "timed out" if isinstance(own, DeadlineError) else "failed"
        first = failure_store.failure() or failure_store.record_failure(
            RankStatus(failure_store.rank, kind, own.message)
        )
        failure_store.ack()
    except (dist.DistError, RuntimeError) as gone:
        abort(failure_store.groups())
        return _without_store(failure_store, wait, gone)
    return own if first.rank == failure_store.rank else error_of(first)


def _collect_statuses(failure_store: FailureStore, peers: Sequence[int]) -> dict[int, RankStatus]:
    """Return the statuses of the peers and of the ranks that they wait for; give these a short time to publish."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        statuses, missing = _follow_waits(failure_store, peers)
        if not missing or failure_store.failure() is not None or time.monotonic() > deadline:
            return statuses
        time.sleep(0.05)


def _follow_waits(failure_store: FailureStore, peers: Sequence[int]) -> tuple[dict[int, RankStatus], set[int]]:
    """Follow the waits from the peers on; return the statuses found, and the ranks that have published none."""
    statuses: dict[int, RankStatus] = {}
    asked, wanted = {failure_store.rank}, set(peers)
    while new := wanted - asked:
        found = failure_store.statuses(sorted(new))
        asked |= new
        statuses |= found
        wanted = {peer for status in found.values() for peer in status.peers}
    return statuses, asked - statuses.keys() - {failure_store.rank}


def _own_diagnosis(own: RankStatus, wait: _Wait, statuses: dict[int, RankStatus]) -> SmpkitError:
    """Return what happened as this rank sees it: ranks that have published nothing are those waited for."""
    silent = [rank for rank in wait.peers if rank not in statuses]
    if not silent:  # the peers wait as well, directly or not for a rank that has published nothing
        awaited = {rank for status in statuses.values() for rank in status.peers}
        silent = sorted(awaited - statuses.keys() - {own.rank})
    ended = [rank for rank, status in sorted(statuses.items()) if status.kind == "ended"]
    others = [status for _, status in sorted(statuses.items()) if status.kind != "ended" and status.text != wait.what]
    elsewhere = [f"rank {status.rank} waited in {status.text} for {name_ranks([*status.peers])}" for status in others]
    aside = f"; meanwhile {', '.join(elsewhere)}" if elsewhere else ""
    if ended:
        call = f" without the call of rank {own.rank} in {own.place}" if own.place else ""
        return RemoteError(
            f"rank {own.rank} lost {name_ranks(ended)} in {wait.what}: {_ENDED}{call}{aside}",
            hint=_hint_of_loss(_ENDED),
        )
    if own.kind == "timed out" or any(status.kind == "timed out" for status in statuses.values()):
        missing = silent or [rank for rank, status in statuses.items() if status.text != wait.what] or wait.peers
        text = f"rank {own.rank} waited {_seconds(wait.seconds)} in {wait.what} for {name_ranks(missing)}{aside}"
        if circle := _circle_of_waits({own.rank: own, **statuses}):
            places = [f"rank {each.rank}" + (f" in {each.place}" if each.place else "") for each in circle]
            text += f"; {_DEADLOCK}{' and '.join(places)}"
        return DeadlineError(text, hint=_hint_of_deadline(text))
    return RemoteError(
        f"rank {own.rank} lost {name_ranks(silent or wait.peers)} in {wait.what}{aside}",
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
    """Return the hint for the error `text` about a wait that passed its deadline."""
    if _DEADLOCK in text:
        return "every rank makes the same calls in the same order: is one of these under `if smp.rank() == ...`?"
    return "if they are only slow, raise `timeout_seconds` in the configuration"


def _hint_of_loss(text: str) -> str:
    """Return the hint for the error `text` about a lost rank."""
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


def _without_store(failure_store: FailureStore, wait: _Wait, gone: Exception) -> SmpkitError:
    """Return the error where the store does not answer either, most often because rank 0 served it and is gone."""
    why = (str(gone).splitlines() or [type(gone).__name__])[0]
    return RemoteError(
        f"rank {failure_store.rank} lost {name_ranks(wait.peers)} in {wait.what} after {_seconds(wait.seconds)};"
        f" the store in {failure_store.server} could tell why, but {why}",
        hint=f"see the output of {failure_store.server}",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
