"""One-way connections between GPUs: values and gradients travel without a detour through the hosts.

nccl has no tags. Between two ranks it pairs the sends of one with the receives of the other in the order in which they
were begun, and whoever gets the order wrong reads another tensor or waits for ever. Which order that is hangs on the
schedule, on branches, and on how far a rank got. So every message is announced: a header travels between the hosts,
over gloo, in the order of the sends, and says which message follows in the lane and how long it is. Who waits for a
value reads headers, and begins to receive what each of them says, until that of the value has come.

So a receive is begun when its send has been: no kernel spins for a rank that is late or dead. All waiting for other
ranks is waiting for headers, which has a deadline and knows whom for. And what a header can say needs no message, such
as that there is no gradient. It costs no time on the GPU as long as the hosts are ahead of it.

Each direction has a process group of its own: in a common one, two ranks that send to each other would both wait for
the other to receive. For each pair of ranks in it nccl makes a communicator, and both wait until it is made. So that is
done at once, pair by pair in an order that is the same on all ranks: at the first messages, a rank could wait for one
peer, which waits for another, which waits for the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from smpkit.torch.deadline import waiting

__all__ = ["Lanes", "has_lanes"]


def has_lanes(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether nccl connects the ranks of a pipeline.

    It does not where several ranks share a GPU, and not where a script has bound the default group to its GPU: every
    new group would be split off that one, in which all ranks of the job would have to take part.
    """
    world = dist.group.WORLD
    bound = world is not None and world.bound_device_id is not None
    return device.type == "cuda" and not bound and "cuda:nccl" in str(dist.get_backend_config(group))


class Lanes:
    """The lanes of one rank's GPU.

    Args:
        groups: the groups of the pipeline's ranks in which each sends to higher ones and to lower ones.
        ranks: the pipeline's ranks, as global ones.
        rank: which of them this is.
        device: this rank's.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], ranks: Sequence[int], rank: int, device: torch.device
    ) -> None:
        self._upward, self._downward = groups
        self._ranks = ranks
        self._rank = rank
        self._device = device
        self._reached: set[int] = set()
        # Receives have a stream, so that they wait for their message only, not for what is computed now.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the lanes, to and fro, between pairs of the pipeline's ranks; all its ranks call this alike.

        Raises:
            DeadlineError: another rank did not come.
            RemoteError: another rank failed.
        """
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
            if self._rank not in (low, high) or self.reaches(low + high - self._rank):
                continue
            peer = low + high - self._rank
            with waiting("the connection of the GPUs", [self._ranks[peer]]):
                for receives in (self._rank == high, self._rank == low):
                    block = torch.zeros(1, dtype=torch.uint8, device=self._device)
                    work, _ = self.receive(1, peer) if receives else self.send(block, peer)
                    work.wait()
            self._reached.add(peer)

    def reaches(self, peer: int) -> bool:
        """Return whether there are lanes to and from a rank."""
        return peer in self._reached

    def send(self, tensor: torch.Tensor, target: int) -> tuple[dist.Work, torch.Tensor]:
        """Begin to send a tensor without gaps; return the work, and what must stay as it is until that is done."""
        # As bytes: who receives them may not know yet what they are. Those of a conjugate are not what they look like.
        block = tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8)
        group = self._upward if target > self._rank else self._downward
        return group.send([block], target, 0), block

    def receive(self, num_bytes: int, source: int) -> tuple[dist.Work, torch.Tensor]:
        """Begin to receive what `source` has begun to send; return the work and where the bytes come to be."""
        group = self._upward if source < self._rank else self._downward
        with self._receiving():
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return group.recv([block], source, 0), block

    def arrived(self, work: dist.Work, block: torch.Tensor) -> None:
        """Let what is computed from now on wait until a block has arrived. On a GPU this does not wait itself."""
        work.wait()  # with a deadline, nccl would hold up the host until then
        if self._stream is not None:
            # Its memory belongs to the stream of the receives, which may have it back when this one is done with it.
            block.record_stream(torch.cuda.current_stream(self._device))

    def _receiving(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
