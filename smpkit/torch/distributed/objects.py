"""Send any object between ranks: `smp.send`, `recv_from`, `broadcast`, `allgather` and the barriers of SMP v1.

Everything is point to point, so each ordered pair of ranks has one stream of messages, in the order of the calls::

    header (what call, how many bytes) | pickle without the tensors | tensor 0 | tensor 1 | ...

The header names the sender's call, so `barrier` against `allgather` is an error and not a hang. Tensors travel as raw
bytes, directly from and into their memory. Objects are unpickled: that is safe only because both ends are ranks of the
same job, which run the same script.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import as_bytes
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.rendezvous import name_ranks

_T = TypeVar("_T")


class RankType(Enum):
    """What a rank number counts in a call: all ranks, or the ranks of this rank's group of a kind (`smp.RankType`)."""

    WORLD_RANK = CommGroup.WORLD
    MP_RANK = CommGroup.MP_GROUP
    DP_RANK = CommGroup.DP_GROUP
    TP_RANK = CommGroup.TP_GROUP
    PP_RANK = CommGroup.PP_GROUP
    RDP_RANK = CommGroup.RDP_GROUP


# --- the calls --------------------------------------------------------------------------------------------------------


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send any picklable object to one rank, which calls `recv_from`; return when it has been received.

    Raises:
        UsageError: there is no such rank, or it is this one.
        DeadlineError: the receiver did not come in time.
        RemoteError: the receiver, or another rank, failed.
    """
    _send_to([_peer(dest_rank, rank_type, "smp.send")], _CallKind(_SEND, CommGroup.WORLD), obj)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Return the next object that `src_rank` sent to this rank, by `send` or `broadcast`, in the order of its calls.

    Tensors that were on a GPU arrive on this rank's GPU. The errors are those of `send`.
    """
    source = _peer(src_rank, rank_type, "smp.recv_from")
    call = _CallKind(_SEND, CommGroup.WORLD)
    with waiting(f"recv_from(rank {source})", [source]):
        return _receive_object(source, _receive_header(source, call))


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send an object to every other member of this rank's `group`; return when all have received it.

    Called by the sender only: every other member calls `recv_from(sender, rank_type)`. The errors are those of `send`.
    """
    _send_to(_others(group), _CallKind(_SEND, group), obj, f"broadcast to {group.value}")


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Return the objects that the members of this rank's `group` passed, ordered by their rank in it.

    The own object is returned as it is, not copied. The errors are those of `send`, and a UsageError on ranks that meet
    a member that is in another call.
    """
    others, call = _others(group), _CallKind(_ALLGATHER, group)
    with waiting(str(call), others):
        frames, works = _post(others, call, obj)
        sizes = [_receive_header(rank, call) for rank in others]
        received = dict(zip(others, map(_receive_object, others, sizes), strict=True))
        _finish(works)
    del frames
    return [obj if rank == state.rank else received[rank] for rank in state.group(group)]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Return when every member of this rank's `group` has come here. The errors are those of `allgather`."""
    others, call = _others(group), _CallKind(_BARRIER, group)
    with waiting(str(call), others):
        header = call.header(0)
        works = [_isend(header, rank) for rank in others]
        for rank in others:
            _receive_header(rank, call)
        _finish(works)


def dp_barrier() -> None:
    """Return when every rank of this rank's `DP_GROUP` has come here."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Return when every rank of this rank's `MP_GROUP` has come here."""
    barrier(CommGroup.MP_GROUP)


# --- within a process group ------------------------------------------------------------------------------------------


def gather_objects(value: _T, group: dist.ProcessGroup, what: str) -> list[_T]:
    """Return what each rank of a group gives, in their order; all of them call this, and wait in `what`."""
    values: list[Any] = [None] * group.size()
    with waiting(what, group):
        dist.all_gather_object(values, value, group=group)
    return values


def object_from(source: int, value: _T, group: dist.ProcessGroup, what: str) -> _T:
    """Return what the rank at an index of a group gives; all of them call this, and wait in `what`."""
    values = [value]
    with waiting(what, group):
        dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


# --- peers ------------------------------------------------------------------------------------------------------------


def _others(group: CommGroup) -> list[int]:
    _check_kind(group, CommGroup, "group")
    return [rank for rank in state.group(group) if rank != state.rank]


def _check_kind(value: object, kinds: type[Enum], noun: str) -> None:
    if not isinstance(value, kinds):
        names = ", ".join(f"smp.{kinds.__name__}.{kind.name}" for kind in kinds)
        raise UsageError(f"{value!r} is not a {noun}", hint=f"use one of {names}")


def _peer(index: int, rank_type: RankType, call: str) -> int:
    """Return the global rank of a peer."""
    _check_kind(rank_type, RankType, "rank type")
    ranks = state.group(rank_type.value)
    if not 0 <= index < len(ranks):
        raise UsageError(f"{call}: there is no {rank_type.name} {index}", hint=f"valid are 0 to {len(ranks) - 1}")
    if ranks[index] == state.rank:
        # A blocking send to oneself could never return: the receive comes after it in the same thread.
        raise UsageError(f"{call}: rank {state.rank} names itself", hint="use the object directly on this rank")
    return ranks[index]


# --- messages ---------------------------------------------------------------------------------------------------------

_TAG: Final = 0x5A9
"""Separates these messages from a script's own torch.distributed.send on the same group."""
_SEND: Final = 1
_ALLGATHER: Final = 2
_BARRIER: Final = 3
_NAMES: Final = {_SEND: "send or broadcast", _ALLGATHER: "allgather", _BARRIER: "barrier"}
_GROUPS: Final = tuple(CommGroup)


@dataclass(frozen=True)
class _CallKind:
    """Which call a message belongs to."""

    code: int
    group: CommGroup

    def __str__(self) -> str:
        return _NAMES[self.code] if self.code == _SEND else f"{_NAMES[self.code]} of {self.group.value}"

    def header(self, size: int) -> torch.Tensor:
        return torch.tensor([self.code, _GROUPS.index(self.group), size], dtype=torch.int64, device="cpu")


def _isend(tensor: torch.Tensor, rank: int) -> dist.Work:
    return state.object_group.send([tensor], rank, _TAG)


def _receive(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    state.object_group.recv([tensor], rank, _TAG).wait(state.timeout)
    return tensor


def _finish(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait(state.timeout)


def _post(ranks: Sequence[int], call: _CallKind, obj: Any) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start sending `obj`; return the memory that must live until the works are done, and the works."""
    if not ranks:
        return [], []
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    packed = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    frames = [call.header(packed.numel()), packed, *(payload for payload in pickler.payloads if payload.numel())]
    return frames, [_isend(frame, rank) for rank in ranks for frame in frames]


def _send_to(ranks: Sequence[int], call: _CallKind, obj: Any, what: str | None = None) -> None:
    with waiting(what or f"send to {name_ranks(ranks)}", ranks):
        frames, works = _post(ranks, call, obj)
        _finish(works)
    del frames


def _receive_header(rank: int, call: _CallKind) -> int:
    """Return the size of the pickle that follows; raise UsageError if the sender is in another call."""
    code, group, size = _receive(torch.empty(3, dtype=torch.int64, device="cpu"), rank).tolist()
    theirs = _CallKind(code, _GROUPS[group])
    # `recv_from` takes the next object, whatever group it was broadcast to.
    if code != call.code or (code != _SEND and theirs.group is not call.group):
        mine = f"recv_from(rank {rank})" if call.code == _SEND else str(call)
        raise UsageError(
            f"rank {state.rank} is in {mine}, but rank {rank} is in {theirs}",
            hint="all ranks of a group make the same calls in the same order; only the sender calls broadcast",
        )
    return int(size)


def _receive_object(rank: int, size: int) -> Any:
    packed = _receive(torch.empty(size, dtype=torch.uint8, device="cpu"), rank)
    return _Unpickler(packed, rank).load()


# --- objects ----------------------------------------------------------------------------------------------------------


_TensorSpec: TypeAlias = tuple[int, int, torch.dtype, tuple[int, ...], bool, bool, bool]
"""Of a tensor whose bytes follow the pickle: which object and which memory it is, dtype, shape, whether it is on a GPU,
a parameter, and requires a gradient."""


class _Pickler(pickle.Pickler):
    """Takes plain tensors and parameters out of the pickle; subclasses, sparse and quantized tensors are pickled.

    Two tensors with the same memory and shape travel once, and share memory again on the receiver, as tied weights in a
    state dict do.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.payloads: list[torch.Tensor] = []
        """The bytes of each tensor, in row-major order."""
        self._kinds = ("cpu", state.device.type)
        self._indices: dict[object, int] = {}
        self._specs: dict[int, tuple[torch.Tensor, _TensorSpec]] = {}
        """By id; with the tensor, which must stay alive during the dump, or another one may get its id."""

    def persistent_id(self, obj: object) -> _TensorSpec | None:
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, nn.Parameter):
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type not in self._kinds:
            return None
        if id(obj) not in self._specs:
            memory = (obj.device, obj.data_ptr(), obj.dtype, obj.shape, obj.stride(), obj.is_conj(), obj.is_neg())
            index = self._indices.setdefault(memory, len(self.payloads))
            if index == len(self.payloads):
                plain = obj.detach().resolve_conj().resolve_neg()
                self.payloads.append(as_bytes(plain.cpu().contiguous()))  # of a contiguous CPU tensor no copy
            place = (obj.dtype, tuple(obj.shape), obj.device.type != "cpu")
            spec = (id(obj), index, *place, isinstance(obj, nn.Parameter), obj.requires_grad)
            self._specs[id(obj)] = obj, spec
        return self._specs[id(obj)][1]


class _Unpickler(pickle.Unpickler):
    """Receives each tensor where the pickle refers to it, which is the order in which they were sent."""

    def __init__(self, packed: torch.Tensor, source: int) -> None:
        super().__init__(io.BytesIO(packed.numpy().tobytes()))
        self._source = source
        self._memory: dict[int, torch.Tensor] = {}
        self._objects: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _TensorSpec) -> torch.Tensor:
        key, index, dtype, shape, on_gpu, is_parameter, requires_grad = pid
        if key not in self._objects:
            if index not in self._memory:
                memory = torch.empty(shape, dtype=dtype, device="cpu")
                if memory.nbytes:
                    _receive(memory.reshape(-1).view(torch.uint8), self._source)
                self._memory[index] = memory.to(state.device) if on_gpu else memory
            tensor = self._memory[index].detach()
            if is_parameter:
                self._objects[key] = nn.Parameter(tensor, requires_grad=requires_grad)
            else:
                self._objects[key] = tensor.requires_grad_(requires_grad)
        return self._objects[key]
