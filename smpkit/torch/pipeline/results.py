"""Give every rank what a step has returned, and compare the calls that ranks have made in it.

Once a rank's backward is over, it exchanges a checksum of each microbatch's call trace with its neighbours. Then an
output travels from its owner to both sides, each rank relaying it to the next::

    rank 0  <--  rank 1  <--  rank 2 (owner)  -->  rank 3
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in, to_layout
from smpkit.torch.pipeline.divergence import call_traces_of, trace_mismatch
from smpkit.torch.pipeline.messages import Tag, pack, packed_bytes, unpack
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
        self._by_owner = _stage_tensors_by_owner(outputs)
        self._packed: torch.Tensor | None = None
        if own := self._by_owner.get(stage.rank):
            # Queue the copy now: later it would wait on the device for the backwards, which it does not need.
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
        """Return the data of one owner's outputs, and relay them to the neighbour that is farther from the owner."""
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
