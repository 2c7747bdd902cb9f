"""The end of a step: every rank gets what the step returned, and learns whether all ranks went the same way.

Both travel as soon as a rank's last forward is over, while backwards still run, so at the end there is little left to
wait for; and from neighbour to neighbour, so nobody sends more than two messages. What is compared with the rank before
is a checksum of the calls that each microbatch made.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch import devices
from smpkit.torch.pipeline.divergence import disagreement, ways_of
from smpkit.torch.pipeline.located import Located
from smpkit.torch.pipeline.messages import Tag
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.packing import pack, packed_bytes, unpack_copies
from smpkit.torch.pipeline.specs import TensorSpec, laid, map_tensors
from smpkit.torch.pipeline.stage import Stage

__all__ = ["Ending", "reserve"]

_CHECKSUM_BITS: Final = (1 << 24) - 1
_HOME_BITS: Final = 10
_TAG_CHECKSUM: Final = (1 << 24 - _HOME_BITS) - 1
_WHAT: Final = "the end of the step"


class Ending:
    """Begun when all forwards of a step have run on this rank.

    Args:
        outputs: what the microbatches returned, in order; located values anywhere in it.
    """

    def __init__(self, stage: Stage, microbatches: Sequence[Microbatch], outputs: list[Any]) -> None:
        self._stage = stage
        self._outputs = outputs
        self._located = _located_by_home(outputs)
        self._paths = _checksums(microbatches, self._located)
        self._waits: dict[int, Callable[[], torch.Tensor]] = {}
        neighbours = (stage.rank - 1, stage.rank + 1)
        self._neighbours = [rank for rank in neighbours if 0 <= rank < stage.size]
        self._paths_of: dict[int, Callable[[], torch.Tensor]] = {}
        self._begin_paths()
        for home, values in self._located.items():
            self._begin_outputs(home, values)

    def _begin_paths(self) -> None:
        transport = self._stage.transport
        for rank in self._neighbours:
            transport.send_bytes(self._paths.view(torch.uint8), rank, Tag.PATHS)
            self._paths_of[rank] = transport.expect_bytes(self._paths.nbytes, rank, Tag.PATHS, _WHAT)

    def _begin_outputs(self, home: int, values: list[Located]) -> None:
        rank = self._stage.rank
        if home == rank:
            packed = pack([value.value for value in values if value.value is not None])
            # Sent once the device has come so far: its last forward may have only been queued, and backwards wait.
            self._hand_on(home, packed, values, devices.record_event(self._stage.device))
            return
        source = rank + 1 if rank < home else rank - 1
        num_bytes = packed_bytes([value.spec for value in values])
        self._waits[home] = self._stage.transport.expect_bytes(num_bytes, source, _tag(home, values), _WHAT)

    def _hand_on(
        self, home: int, packed: torch.Tensor, values: list[Located], ready: torch.Event | None = None
    ) -> None:
        """Send the outputs of `home` to the neighbours that are further away from it."""
        rank = self._stage.rank
        targets = [rank - 1] * (rank <= home) + [rank + 1] * (rank >= home)
        for target in targets:
            if 0 <= target < self._stage.size:
                self._stage.transport.outbox.send(packed, target, _tag(home, values), ready)

    def finish(self) -> list[Any]:
        """Return the outputs with the data of their homes.

        Raises:
            UsageError: this rank went another way through the step than a neighbour.
        """
        for rank in self._neighbours:
            if not torch.equal(self._paths, self._paths_of[rank]().view(torch.int64)):
                self._explain(rank)
        data: dict[int, torch.Tensor] = {}
        for home, values in self._located.items():
            data.update((id(value), tensor) for value, tensor in zip(values, self._data(home, values), strict=True))
        return [map_tensors(lambda tensor: data.get(id(tensor), tensor), output) for output in self._outputs]

    def _data(self, home: int, values: list[Located]) -> list[torch.Tensor]:
        if home == self._stage.rank:
            # As they lie elsewhere: they may be what the next step is called with, or what plain code computes with.
            return [laid(value.value.detach(), value.spec.as_sent.order) for value in values if value.value is not None]
        packed = self._waits[home]()
        self._hand_on(home, packed, values)
        # Copies, because the block is still on its way to the next rank, and small outputs would keep it alive.
        copies = unpack_copies(devices.to_device(packed, self._stage.device), [value.spec for value in values])
        return [laid(tensor, value.spec.as_sent.order) for tensor, value in zip(copies, values, strict=True)]

    def _explain(self, rank: int) -> None:
        """Raise what this rank and a neighbour, which has noticed as well, find to be the difference."""
        transport, mine = self._stage.transport, ways_of(self._stage)
        transport.broadcast_object(mine, [rank], Tag.WAYS, _WHAT)
        theirs = transport.receive_object(rank, _WHAT, Tag.WAYS)
        error = disagreement({self._stage.rank: mine, rank: theirs}, ended=True)
        if error is not None:
            raise error
        raise UsageError(
            f"pipeline ranks {self._stage.rank} and {rank} returned other things from the step",
            hint="a step runs on every pipeline rank and must not branch on the rank or on data of its own",
        )


def reserve(stage: Stage, output: Any, count: int) -> None:
    """Have the memory at hand that the results of `count` microbatches are copied into; the first returned `output`.

    To pin memory may make the host wait for the whole device. That is harmless only as long as no rank waits for what
    another has queued.
    """
    if devices.is_asynchronous(stage.device):
        own = _located_by_home([output]).get(stage.rank, [])
        devices.host_memory(packed_bytes([value.spec for value in own] * count), stage.device)


def _located_by_home(outputs: list[Any]) -> dict[int, list[Located]]:
    """Return the located values of all outputs, each once, in the order in which they are returned."""
    found: dict[int, dict[int, Located]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Located):
            found.setdefault(tensor.home, {})[id(tensor)] = tensor
        return tensor

    map_tensors(note, outputs)
    return {home: list(found[home].values()) for home in sorted(found)}


def _checksums(microbatches: Sequence[Microbatch], located: dict[int, list[Located]]) -> torch.Tensor:
    """Return a checksum per microbatch of the way it took, and one of what the step returns."""
    paths = [zlib.crc32("\n".join(microbatch.path).encode()) for microbatch in microbatches]
    returned = zlib.crc32(str([(home, _checksum(values)) for home, values in located.items()]).encode())
    return torch.tensor([*paths, returned], dtype=torch.int64, device="cpu")


def _tag(home: int, values: Sequence[Located]) -> int:
    """Return the tag of the outputs of one home; two homes may return values of the same shapes."""
    return Tag.OUTPUTS + ((_checksum(values) & _TAG_CHECKSUM) << _HOME_BITS) + home % (1 << _HOME_BITS)


def _checksum(values: Sequence[Located]) -> int:
    return zlib.crc32(" ".join([_text(value.spec) for value in values]).encode()) & _CHECKSUM_BITS


@functools.lru_cache(maxsize=256)
def _text(spec: TensorSpec) -> str:
    """Return shape and dtype as text, made once: microbatches return the same kinds of tensors."""
    return str(spec)
