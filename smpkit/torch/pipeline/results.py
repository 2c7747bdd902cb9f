"""Give every rank what a step has returned, and compare the calls that ranks have made in it.

Once a rank's backward is over, it exchanges a checksum of its call traces with its neighbours. Then an output travels
from its owner to both sides, each rank relaying it to the next, in one block with those of other microbatches::

    rank 0  <--  rank 1  <--  rank 2 (owner)  -->  rank 3
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import TensorSpec, as_bytes, map_tensors, tensors_in, to_layout
from smpkit.torch.pipeline.divergence import call_traces_of, trace_mismatch
from smpkit.torch.pipeline.messages import Tag, to_host
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import StageTensor

_WHAT: Final = "the end of the step"


class Results:
    """What a step returns on this rank; made when all its forwards have run here."""

    def __init__(self, stage: StageContext, microbatches: Sequence[Microbatch], outputs: list[Any]) -> None:
        self._stage = stage
        self._microbatches = microbatches
        self._outputs = outputs
        self._values = _stage_tensors_in(outputs)
        self._groups = _by_owner_and_spec(self._values)
        self._own = {
            (owner, spec): [value.value.detach() for value in values if value.value is not None]
            for (owner, spec), values in self._groups.items()
            if owner == stage.rank
        }
        # Queue the copies now: later they would wait on the device for the backwards, which they do not need.
        self._packed = {
            group: to_host(as_bytes(torch.stack([tensor.to(stage.device) for tensor in tensors])))
            for group, tensors in self._own.items()
        }
        self._is_packed = devices.record_event(stage.device)

    def share(self) -> list[Any]:
        """Return the outputs with the data of their owners, if the neighbours have made the same calls in the step."""
        stage, hosts = self._stage, self._stage.transport.hosts
        neighbours = [rank for rank in (stage.rank - 1, stage.rank + 1) if 0 <= rank < stage.size]
        checksum = self._checksum()
        for rank in neighbours:
            hosts.send_bytes(checksum, rank, Tag.CHECKSUMS, _WHAT)
        for rank in neighbours:
            if not torch.equal(checksum, hosts.receive_bytes(len(checksum), rank, Tag.CHECKSUMS, _WHAT)):
                self._raise_mismatch(rank)
        data: dict[int, torch.Tensor] = {}
        for (owner, spec), values in self._groups.items():
            data.update(zip(map(id, values), self._shared(owner, spec, values, neighbours), strict=True))
        outputs: list[Any] = map_tensors(lambda tensor: data.get(id(tensor), tensor), self._outputs)
        return outputs

    def _checksum(self) -> torch.Tensor:
        """Return the bytes of a checksum of all call traces and of what the step returns."""
        returned = [(value.owner, value.spec.text) for value in self._values]
        traces = [microbatch.call_trace for microbatch in self._microbatches]
        checksum = zlib.crc32(str((traces, returned)).encode())
        return torch.tensor([checksum], dtype=torch.int64, device="cpu").view(torch.uint8)

    def _shared(
        self, owner: int, spec: TensorSpec, values: list[StageTensor], neighbours: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the data of outputs of one owner and spec; relay them to the neighbour that is farther from it."""
        stage = self._stage
        if owner == stage.rank:
            devices.wait_for_event(self._is_packed)
            packed = self._packed[owner, spec]
        else:
            source = stage.rank + 1 if stage.rank < owner else stage.rank - 1
            packed = stage.transport.hosts.receive_bytes(spec.num_bytes * len(values), source, Tag.OUTPUTS, _WHAT)
        for target in neighbours:
            if abs(target - owner) > abs(stage.rank - owner):
                stage.transport.hosts.send_bytes(packed, target, Tag.OUTPUTS, _WHAT)
        if owner == stage.rank:
            tensors = self._own[owner, spec]
        else:
            whole = devices.to_device(packed, stage.device).view(spec.dtype).view(len(values), *spec.shape)
            # Copies, since the block is being sent to the next rank, and small outputs would keep all of it alive.
            tensors = [part.clone() for part in whole]
        if spec.stride == spec.dense_stride:
            return tensors
        # With the same strides on all ranks: an output may be an argument of the next step.
        return [to_layout(tensor, spec.as_sent.order) for tensor in tensors]

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
        groups = _by_owner_and_spec(_stage_tensors_in(output))
        sizes = [spec.num_bytes * len(values) for (owner, spec), values in groups.items() if owner == stage.rank]
        _ = [devices.host_memory(size * count, stage.device) for size in sizes]  # blocks that live at the same time


def drop_graph(output: Any) -> None:
    """Let go of the graph behind a microbatch's output, whose backward ran in halves.

    The first half leaves what its nodes have saved, and nothing but the end of the graph frees that: activations of all
    microbatches would stay until the step ends.
    """
    for tensor in _stage_tensors_in(output):
        if tensor.value is not None:
            tensor.value = tensor.value.detach()


def _stage_tensors_in(outputs: Any) -> list[StageTensor]:
    """Return the stage tensors in outputs, each once, in the order in which they are returned."""
    return list({id(tensor): tensor for tensor in tensors_in(outputs) if type(tensor) is StageTensor}.values())


def _by_owner_and_spec(values: Sequence[StageTensor]) -> dict[tuple[int, TensorSpec], list[StageTensor]]:
    """Group outputs: those of one group travel as one block."""
    groups: dict[tuple[int, TensorSpec], list[StageTensor]] = {}
    for value in values:
        groups.setdefault((value.owner, value.spec), []).append(value)
    return groups
