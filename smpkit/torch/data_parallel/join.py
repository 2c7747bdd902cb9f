"""`model.join()`: replicas with more steps go on while those without inputs take part with zeros.

Built on torch's generic join: before each training step every rank that has inputs says so in one small all-reduce;
ranks that have none answer in a loop, shadowing the collectives of the step, until nobody has inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from smpkit.errors import UnsupportedError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import object_from

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from smpkit.torch.data_parallel.data_parallel import DataParallel

__all__ = ["JoinContext"]


class JoinContext:
    """What `with model.join():` enters."""

    def __init__(self, replica: DataParallel) -> None:
        sharded = state.cfg.sharded_data_parallel_degree > 1
        if replica.zero1 is not None or sharded:
            key = "sharded_data_parallel_degree" if sharded else "shard_optimizer_state"
            raise UnsupportedError(
                f"join lets a rank stop before the others, but with {key} these need it for its part of the parameters",
                hint=f"give every rank as many batches, or remove {key}",
            )
        self._replica = replica
        self._joinable = _JoinableReplica(replica)
        self._join = Join([self._joinable])

    def __enter__(self) -> Self:
        self._join.__enter__()  # type: ignore[no-untyped-call]
        # From now on every training pass begins with `notify`: see DataParallel._begin_pass.
        self._replica.join_context = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replica.join_context = None
        self._join.__exit__(kind, error, trace)

    def notify(self) -> None:
        """Tell the ranks that are out of inputs that one more step begins."""
        work = Join.notify_join_context(self._joinable)
        if work is not None:
            work.wait()


class _JoinableReplica(Joinable):
    """The model as torch's join sees it."""

    def __init__(self, replica: DataParallel) -> None:
        super().__init__()
        self._replica = replica

    def join_hook(self, **_: Any) -> JoinHook:
        return _JoinHook(self._replica)

    @property
    def join_device(self) -> torch.device:
        return state.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._replica.group


class _JoinHook(JoinHook):
    """Shadows the collectives of the ranks that still train, as torch's join asks of a rank without inputs."""

    def __init__(self, replica: DataParallel) -> None:
        self._replica = replica

    def main_hook(self) -> None:
        self._replica.join_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that took every step to those that stopped earlier."""
        group = self._replica.group
        # Several ranks may have taken every step: the one with the highest rank is copied from.
        candidate = torch.tensor([dist.get_rank(group) if is_last_joiner else -1], device=state.device)
        dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=group)
        source = int(candidate.item())
        self._replica.broadcast_state(source)
        masters = None if state.optimizer is None else state.optimizer.masters
        if masters is not None:
            self._replica.broadcast_masters(masters.masters(), source)
            # Else the next step would average gradients of different scales.
            what = "the loss scale of the replica that took every step"
            masters.scaler.load_state_dict(object_from(source, masters.scaler.state_dict(), group, what))
