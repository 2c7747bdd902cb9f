"""Report ranks that run different programs long before the deadline, and name the first call in which they differ.

A rank that has waited for two seconds, or a quarter of its deadline if that is sooner, writes the calls of its
microbatches to the store of the rendezvous, and reads what other waiting ranks have written. Two ranks whose calls
differ will never finish: a branch on the rank, on a random number of Python's or on data of its own led them apart. The
watch runs in a thread, which only sleeps while nobody waits that long.

The end of a step compares as well, before ranks share what the step returns (`Results`). Once a rank's backward is
over, it exchanges a checksum of each microbatch's call trace with its neighbours. Then an output travels from its owner
to both sides, each rank relaying it to the next::

    rank 0  <--  rank 1  <--  rank 2 (owner)  -->  rank 3
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
from typing import Any, Final

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in, to_layout
from smpkit.torch.distributed.deadline import current_failures
from smpkit.torch.distributed.failure_store import FailureStore
from smpkit.torch.pipeline.messages import Tag, pack, packed_bytes, unpack
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import StageTensor

_COMPARE_AFTER_SECONDS: Final = 2.0
_NOTHING: Final = "nothing more"

CallTraces = Mapping[int, Sequence[str]]
"""The calls that each microbatch has made so far, in order."""


def trace_mismatch(traces: Mapping[int, CallTraces], *, ended: bool = False) -> UsageError | None:
    """Return the error that names the first call in which ranks differ; None if, so far, they agree.

    Args:
        traces: by pp_rank.
        ended: no rank will make further calls, so a rank that has made more than another differs.
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


# ---- the end of a step: compare the calls that ranks made in it, and give every rank what it returns -----------------

_WHAT: Final = "the end of the step"


class Results:
    """What a step returns on this rank; made when all its forwards have run here."""

    def __init__(self, stage: StageContext, microbatches: Sequence[Microbatch], outputs: list[Any]) -> None:
        self._stage = stage
        self._microbatches = microbatches
        self._outputs = outputs
        self._by_owner = _stage_tensors_by_owner(outputs)
        self._packed: torch.Tensor | None = None
        if own := self._by_owner.get(stage.rank):
            # Backwards follow on the device, and the end of the step need not wait for those.
            self._packed = pack([value.value for value in own if value.value is not None])
        self._is_packed = devices.record_event(stage.device)

    def share(self) -> list[Any]:
        """Return the outputs with the data of their owners, if the neighbours have made the same calls in the step."""
        stage, hosts = self._stage, self._stage.transport.hosts
        neighbours = [rank for rank in (stage.rank - 1, stage.rank + 1) if 0 <= rank < stage.size]
        checksums = self._checksums()
        for rank in neighbours:
            hosts.send_bytes(checksums, rank, Tag.CHECKSUMS, _WHAT)
        for rank in neighbours:
            if not torch.equal(checksums, hosts.receive_bytes(len(checksums), rank, Tag.CHECKSUMS, _WHAT)):
                self._raise_mismatch(rank)
        data: dict[int, torch.Tensor] = {}
        for owner, values in self._by_owner.items():
            data.update(zip(map(id, values), self._data(owner, values, neighbours), strict=True))
        return [map_tensors(lambda tensor: data.get(id(tensor), tensor), output) for output in self._outputs]

    def _checksums(self) -> torch.Tensor:
        """Return the bytes of a checksum of each microbatch's call trace, and of one of what the step returns."""
        returned = {owner: [value.spec.text for value in values] for owner, values in self._by_owner.items()}
        texts = ["\n".join(microbatch.call_trace) for microbatch in self._microbatches]
        checksums = [zlib.crc32(text.encode()) for text in (*texts, str(returned))]
        return torch.tensor(checksums, dtype=torch.int64, device="cpu").view(torch.uint8)

    def _data(self, owner: int, values: list[StageTensor], neighbours: Sequence[int]) -> list[torch.Tensor]:
        stage, specs = self._stage, [value.spec for value in values]
        if owner == stage.rank:
            assert self._packed is not None, "this rank owns outputs"
            devices.wait_for_event(self._is_packed)
            packed = self._packed
        else:
            source = stage.rank + 1 if stage.rank < owner else stage.rank - 1
            packed = stage.transport.hosts.receive_bytes(packed_bytes(specs), source, Tag.OUTPUTS, _WHAT)
        for target in neighbours:
            if abs(target - owner) > abs(stage.rank - owner):
                stage.transport.hosts.send_bytes(packed, target, Tag.OUTPUTS, _WHAT)
        if owner == stage.rank:
            tensors = [value.value.detach() for value in values if value.value is not None]
        else:
            # Copies, since the block is being sent to the next rank, and small outputs would keep all of it alive.
            tensors = unpack(devices.to_device(packed, stage.device), specs)
        # With the same strides on all ranks: an output may be an argument of the next step.
        return [to_layout(tensor, spec.as_sent.order) for tensor, spec in zip(tensors, specs, strict=True)]

    def _raise_mismatch(self, rank: int) -> None:
        """Exchange call traces with a neighbour, which sees the mismatch as well, and raise the difference."""
        stage, mine = self._stage, call_traces_of(self._stage)
        stage.transport.hosts.send_object(mine, [rank], Tag.CALL_TRACES, _WHAT)
        theirs = stage.transport.hosts.receive_object(rank, _WHAT, Tag.CALL_TRACES)
        error = trace_mismatch({stage.rank: mine, rank: theirs}, ended=True)
        if error is not None:
            raise error
        raise UsageError(
            f"pipeline ranks {stage.rank} and {rank} returned other things from the step",
            hint="a step runs on every pipeline rank and must not branch on the rank or on data of its own",
        )


def reserve(stage: StageContext, output: Any, count: int) -> None:
    """Pin the host memory for the outputs of `count` microbatches like the first one's, `output`.

    Pinning may make the host wait for the whole device. Call this only while no rank waits for what another one has
    queued on its device, or they deadlock.
    """
    if devices.is_asynchronous(stage.device):
        own = _stage_tensors_by_owner([output]).get(stage.rank, [])
        devices.host_memory(packed_bytes([value.spec for value in own] * count), stage.device)


def drop_graph(stage: StageContext, output: Any) -> None:
    """Let go of the graph behind a microbatch's output, whose backward ran in halves.

    The first half leaves what its nodes have saved, and nothing but the end of the graph frees that: activations of all
    microbatches would stay until the step ends.
    """
    for tensor in _stage_tensors_by_owner([output]).get(stage.rank, []):
        if tensor.value is not None:
            tensor.value = tensor.value.detach()


def _stage_tensors_by_owner(outputs: list[Any]) -> dict[int, list[StageTensor]]:
    """Return the stage tensors of all outputs, each once, in the order in which they are returned."""
    by_owner: dict[int, dict[int, StageTensor]] = {}
    for tensor in tensors_in(outputs):
        if type(tensor) is StageTensor:
            by_owner.setdefault(tensor.owner, {})[id(tensor)] = tensor
    return {owner: list(by_owner[owner].values()) for owner in sorted(by_owner)}
