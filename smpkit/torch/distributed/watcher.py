"""Wake a rank that waits inside a CUDA call when another rank fails.

A host in `.item()` or `synchronize()` waits for its GPU. If a kernel there waits for a rank that is gone, nothing ends
it: the driver knows no ranks, and between GPUs of one machine nccl does not notice either before its own deadline,
after which torch kills the process without saying who waited for whom. So where nccl connects ranks, each of them has
one thread that checks, about once a second::

    the failure store            another rank, or a thread of this one, has published a failure
    nccl's own errors            another machine closed its connection, or an operation passed its deadline

The thread publishes the failure, and ends the kernels of this rank. The CUDA call returns, and the next wait for
another rank, or the error that torch raises, becomes the diagnosed failure (`deadline.waiting`).

A rank that is killed publishes nothing: what started it (smpkit's launcher, torchrun, mpirun) sees that, names it and
ends the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

import torch.distributed as dist

from smpkit.errors import RemoteError, SmpkitError
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed.deadline import Failures, error_of
from smpkit.torch.distributed.failure_store import RankStatus
from smpkit.torch.distributed.rendezvous import first_line

_POLL_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 5.0
"""For the thread to return from its present call."""

_watcher: _Watcher | None = None


def watch(failures: Failures) -> None:
    """Watch until `stop`, if the ranks' devices are connected; else every wait is one of the host, with a deadline."""
    global _watcher  # noqa: PLW0603 - one per process, like the default process group
    if failures.store.size > 1 and any(backends.device_backends(group) for group in failures.store.groups()):
        if _watcher is not None:
            _watcher.failures = failures
            return
        _watcher = _Watcher(failures)
        _watcher.start()


def stop() -> None:
    """Stop watching. Never raises."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.stop()


class _Watcher(threading.Thread):
    def __init__(self, failures: Failures) -> None:
        super().__init__(name="smpkit-watcher", daemon=True)
        self.failures = failures
        self._reads_store = True
        self._server_ended = False
        self._stopped = threading.Event()

    def run(self) -> None:
        """Check until something fails, or until `stop`."""
        while not self._stopped.wait(_POLL_SECONDS):
            failures = self.failures
            try:
                failure = self._stored_failure(failures) or _device_error(failures)
            except Exception as error:  # torch leaves the last word to this thread: without it nobody would have it
                if self._stopped.is_set():
                    return
                text = f"rank {failures.store.rank} cannot watch its GPU any more: {type(error).__name__}: {error}"
                failures.fail_all_ranks(RemoteError(text, hint="this is a defect of smpkit: report it"))
                return
            if failure is not None and not self._stopped.is_set():
                failures.fail_this_process(failure)
                return

    def stop(self) -> None:
        """Stop, and publish that this process may end now."""
        store = self.failures.store
        self._stopped.set()
        # Python may abort a process that ends while another thread is inside C++.
        self.join(_JOIN_SECONDS)
        if self.failures.has_failed:
            return
        with contextlib.suppress(dist.DistError, RuntimeError):
            if not store.statuses([store.rank]):
                store.publish(RankStatus(store.rank, "ended", "it called smp.shutdown()"))

    def _stored_failure(self, failures: Failures) -> SmpkitError | None:
        """Return the failure in the store, or the loss of the store itself."""
        store = failures.store
        if not self._reads_store:
            return None
        try:
            first, server = store.poll()
        except (dist.DistError, RuntimeError) as gone:
            self._reads_store = False
            # A launcher that serves the store may end before its ranks, and so may rank 0 when it is done.
            if self._server_ended or store.server != "rank 0":
                return None
            text = f"rank {store.rank} lost rank 0, which served the store: {first_line(gone)}"
            return RemoteError(text, hint="see the output of rank 0")
        self._server_ended = server is not None and server.kind == "ended"
        return None if first is None else error_of(first)


def _device_error(failures: Failures) -> SmpkitError | None:
    """Return an error if an operation between GPUs has failed, or passed its deadline."""
    for group in failures.store.groups():
        for backend in backends.device_backends(group):
            error = backends.error_of(backend)
            if error is None:
                continue
            is_late = error == "TIMEOUT"
            seconds = failures.store.timeout.total_seconds() if is_late else 0.0
            message = "timeout" if is_late else f"{backend.name()}: {error}"
            what = f"an operation between GPUs ({group.group_desc})"
            with failures.lock:
                judged = failures.judge(what, dist.get_process_group_ranks(group), message, seconds)
                if is_late and (record := os.environ.get(backends.FLIGHT_RECORD)):
                    judged.hint = f"{judged.hint}; what each GPU did, torch's `torchfrtrace` tells from {record}*"
                failures.verdict = failures.verdict or judged
                return failures.verdict
    return None
