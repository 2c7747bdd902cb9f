"""Broadcast the outputs of a step to every rank, and compare the calls that ranks have made.

An output travels from its owner to both sides, each rank relaying it to the next, so no rank sends more than two
messages for it::

    rank 0  <--  rank 1  <--  rank 2 (owner)  -->  rank 3

Neighbours also exchange a checksum of each microbatch's call trace. Both begin as soon as a rank's last forward has
run, while backwards still run, so at the end there is little left to wait for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import map_tensors, tensors_in, to_layout
from smpkit.torch.pipeline.divergence import call_traces_of, trace_mismatch
from smpkit.torch.pipeline.messages import Tag, pack, packed_bytes, unpack_copies
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import StageTensor

__all__ = ["OutputBroadcast", "reserve"]

_CHECKSUM_BITS: Final = (1 << 24) - 1
_OWNER_BITS: Final = 10
_TAG_CHECKSUM: Final = (1 << 24 - _OWNER_BITS) - 1
_WHAT: Final = "the end of the step"


class OutputBroadcast:
    """Begun when all forwards of a step have run on this rank.

    Args:
        outputs: what the microbatches returned, in order; stage tensors anywhere in it.
    """

    def __init__(self, stage: StageContext, microbatches: Sequence[Microbatch], outputs: list[Any]) -> None:
        self._stage = stage
        self._outputs = outputs
        self._by_owner = _stage_tensors_by_owner(outputs)
        checksums = {owner: _checksum(values) for owner, values in self._by_owner.items()}
        self._tags = {owner: _tag(owner, checksum) for owner, checksum in checksums.items()}
        self._own_checksums = _checksums(microbatches, checksums)
        self._output_waits: dict[int, Callable[[], torch.Tensor]] = {}
        neighbours = (stage.rank - 1, stage.rank + 1)
        self._neighbours = [rank for rank in neighbours if 0 <= rank < stage.size]
        self._checksum_waits: dict[int, Callable[[], torch.Tensor]] = {}
        self._exchange_checksums()
        for owner, values in self._by_owner.items():
            self._begin_broadcast(owner, values)

    def _exchange_checksums(self) -> None:
        transport = self._stage.transport
        for rank in self._neighbours:
            transport.send_bytes(self._own_checksums.view(torch.uint8), rank, Tag.TRACE_CHECKSUMS)
            self._checksum_waits[rank] = transport.expect_bytes(
                self._own_checksums.nbytes, rank, Tag.TRACE_CHECKSUMS, _WHAT
            )

    def _begin_broadcast(self, owner: int, values: list[StageTensor]) -> None:
        rank = self._stage.rank
        if owner == rank:
            data = [value.value for value in values if value.value is not None]
            packed = pack(data, [value.spec for value in values])
            # The outbox sends it when the copy is done: the last forward may only be queued on the device, and
            # backwards must not wait for it.
            self._relay(owner, packed, devices.record_event(self._stage.device))
            return
        source = rank + 1 if rank < owner else rank - 1
        num_bytes = packed_bytes([value.spec for value in values])
        self._output_waits[owner] = self._stage.transport.expect_bytes(num_bytes, source, self._tags[owner], _WHAT)

    def _relay(self, owner: int, packed: torch.Tensor, ready: torch.Event | None = None) -> None:
        """Send the outputs of `owner` to the neighbours that are further away from it."""
        rank = self._stage.rank
        for target in self._neighbours:
            if abs(target - owner) > abs(rank - owner):
                self._stage.transport.outbox.send(packed, target, self._tags[owner], ready)

    def finish(self) -> list[Any]:
        """Return the outputs with the data of their owners.

        Raises:
            UsageError: this rank made other calls in the step than a neighbour.
        """
        for rank in self._neighbours:
            if not torch.equal(self._own_checksums, self._checksum_waits[rank]().view(torch.int64)):
                self._raise_mismatch(rank)
        data: dict[int, torch.Tensor] = {}
        for owner, values in self._by_owner.items():
            data.update(zip(map(id, values), self._data(owner, values), strict=True))
        return [
            data[id(output)]
            if type(output) is StageTensor
            else map_tensors(lambda tensor: data.get(id(tensor), tensor), output)
            for output in self._outputs
        ]

    def _data(self, owner: int, values: list[StageTensor]) -> list[torch.Tensor]:
        if owner == self._stage.rank:
            # With the same strides as on other ranks: an output may be an argument of the next step.
            return [
                to_layout(value.value.detach(), value.spec.as_sent.order) for value in values if value.value is not None
            ]
        packed = self._output_waits[owner]()
        self._relay(owner, packed)
        # Copies, since the block is still being sent to the next rank, and small outputs would keep all of it alive.
        copies = unpack_copies(devices.to_device(packed, self._stage.device), [value.spec for value in values])
        orders = [value.spec.as_sent.order for value in values]
        return [
            tensor if order is None else to_layout(tensor, order) for tensor, order in zip(copies, orders, strict=True)
        ]

    def _raise_mismatch(self, rank: int) -> None:
        """Exchange call traces with a neighbour, which sees the mismatch as well, and raise the difference."""
        transport, mine = self._stage.transport, call_traces_of(self._stage)
        transport.broadcast_object(mine, [rank], Tag.CALL_TRACES, _WHAT)
        theirs = transport.receive_object(rank, _WHAT, Tag.CALL_TRACES)
        error = trace_mismatch({self._stage.rank: mine, rank: theirs}, ended=True)
        if error is not None:
            raise error
        raise UsageError(
            f"pipeline ranks {self._stage.rank} and {rank} returned other things from the step",
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
    found: dict[int, dict[int, StageTensor]] = {}
    for output in outputs:
        for tensor in (output,) if type(output) is StageTensor else tensors_in(output):
            if type(tensor) is StageTensor:
                found.setdefault(tensor.owner, {})[id(tensor)] = tensor
    return {owner: list(found[owner].values()) for owner in sorted(found)}


def _checksums(microbatches: Sequence[Microbatch], returned: Mapping[int, int]) -> torch.Tensor:
    """Return a checksum of each microbatch's call trace, and one of what the step returns, by owner."""
    traces = [zlib.crc32("\n".join(microbatch.call_trace).encode()) for microbatch in microbatches]
    return torch.tensor([*traces, zlib.crc32(str(returned).encode())], dtype=torch.int64, device="cpu")


def _tag(owner: int, checksum: int) -> int:
    """Return the tag of the outputs of one owner, from the owner and a checksum of the shapes.

    So ranks whose outputs have different shapes never meet in one message: gloo would end the process.
    """
    return Tag.OUTPUTS + ((checksum & _TAG_CHECKSUM) << _OWNER_BITS) + owner % (1 << _OWNER_BITS)


def _checksum(values: Sequence[StageTensor]) -> int:
    return zlib.crc32(" ".join([value.spec.text for value in values]).encode()) & _CHECKSUM_BITS
