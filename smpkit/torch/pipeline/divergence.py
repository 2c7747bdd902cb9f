"""Report ranks that run different programs long before the deadline, and name the first call in which they differ.

A rank that has waited for two seconds, or a quarter of its deadline if that is sooner, writes the calls of its
microbatches to the store of the rendezvous, and reads what other waiting ranks have written. Two ranks whose calls
differ will never finish: a branch on the rank, on a random number of Python's or on data of its own led them apart. The
watch runs in a thread, which only sleeps while nobody waits that long.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Final

import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import current_failures
from smpkit.torch.distributed.failure_store import FailureStore
from smpkit.torch.pipeline.stage_context import StageContext

_COMPARE_AFTER_SECONDS: Final = 2.0
_NOTHING: Final = "nothing more"

CallTraces = Mapping[int, Sequence[str]]
"""The calls that each microbatch has made so far, in order."""


def trace_mismatch(traces: Mapping[int, CallTraces], *, ended: bool = False) -> UsageError | None:
    """Return the error that names the first call in which ranks differ; None if, so far, they agree.

    Args:
        traces: by pp_rank.
        ended: whether all calls have been made: then a rank that has made more than another differs, too.
    """
    for first, second in combinations(sorted(traces), 2):
        for microbatch in sorted(traces[first].keys() & traces[second].keys()):
            both = traces[first][microbatch], traces[second][microbatch]
            calls = zip_longest(*both, fillvalue=_NOTHING) if ended else zip(*both, strict=False)
            for number, (theirs, ours) in enumerate(calls, 1):
                if theirs != ours:
                    return UsageError(
                        f"pipeline rank {second} took another way through microbatch {microbatch} than pipeline rank"
                        f" {first}: its call {number} was `{ours}`, not `{theirs}`",
                        hint="a step runs on every pipeline rank and must not branch on the rank, on data of its own or"
                        " on random numbers of its own: draw them with torch, or seed Python's and numpy's alike",
                    )
    return None


def call_traces_of(stage: StageContext) -> CallTraces:
    """Return the calls of this rank's microbatches in the step that runs."""
    return {microbatch.index: microbatch.call_trace for microbatch in stage.microbatches}


def watch_for_divergence(stage: StageContext, ranks: Sequence[int]) -> None:
    """Start a thread that watches the waits of `stage`, until `stage` is deleted or `smp.shutdown()` is called.

    Args:
        ranks: the global ranks of the pipeline.
    """
    over = threading.Event()
    state.reset_hooks.append(over.set)
    # A weak reference: the thread must not keep the model alive.
    arguments = weakref.ref(stage), list(ranks), over
    threading.Thread(target=_watch, args=arguments, name="smpkit-watch", daemon=True).start()


def _watch(reference: weakref.ref[StageContext], ranks: list[int], over: threading.Event) -> None:
    while _check_wait(reference(), ranks) and not over.wait(_compare_after_seconds() / 2):
        pass


def _compare_after_seconds() -> float:
    """Return after how many seconds of waiting this rank publishes its call traces."""
    failures = current_failures()
    if failures is None:
        return _COMPARE_AFTER_SECONDS
    # Other ranks must have the time to publish theirs, and to read these, before the deadline.
    return min(_COMPARE_AFTER_SECONDS, failures.store.timeout.total_seconds() / 4)


def _check_wait(stage: StageContext | None, ranks: list[int]) -> bool:
    """Check the present wait; return whether to go on watching."""
    if stage is None:
        return False
    since, failures = stage.transport.hosts.waiting_since, current_failures()
    if since is None or failures is None or time.monotonic() - since < _compare_after_seconds():
        return True
    try:
        error = _compare(stage, ranks, failures.store)
    except (dist.DistError, RuntimeError):  # the store is shutting down: the wait itself will fail
        return True
    if error is None or stage.transport.hosts.waiting_since != since:  # the wait has ended in the meantime
        return True
    stage.transport.hosts.failure = error
    failures.fail_all_ranks(error)
    return False


def _compare(stage: StageContext, ranks: list[int], failure_store: FailureStore) -> UsageError | None:
    """Publish this rank's call traces, and compare them with those that other waiting ranks have published."""
    text = json.dumps([stage.num_steps, list(call_traces_of(stage).items())])
    failure_store.write(f"call_traces/{failure_store.rank}", base64.b85encode(zlib.compress(text.encode())).decode())
    traces = {}
    for pp_rank, rank in enumerate(ranks):
        encoded = failure_store.read(f"call_traces/{rank}")
        if encoded is not None:
            num_steps, items = json.loads(zlib.decompress(base64.b85decode(encoded)))
            if num_steps == stage.num_steps:
                traces[pp_rank] = dict(items)
    return trace_mismatch(traces)
