"""The process groups of torch.distributed behind a mesh: made once, reused where two groups have the same ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from smpkit.plan.mesh import CommGroup, Mesh

__all__ = ["Groups", "loopback"]

# MP before PP and so on: any order serves, as long as every rank follows the same one.
_ORDER: Final = (CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP)


class Groups:
    """The process groups of this rank, by their ranks; lives as long as the default group.

    Args:
        timeout: for the groups made from now on.
        single_host: let gloo use the loopback interface.
    """

    def __init__(self, timeout: timedelta, *, single_host: bool) -> None:
        self._timeout = timeout
        self._single_host = single_host
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._others: set[tuple[int, ...]] = set()
        self._objects: dist.ProcessGroup | None = None
        self._lanes: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._alone: list[dist.ProcessGroup] = []
        """Groups of this rank alone, made while others made theirs."""

    def of_mesh(self, mesh: Mesh, rank: int) -> dict[CommGroup, dist.ProcessGroup]:
        """Return the group of each kind that `rank` (this one) belongs to, making those that are missing."""
        world = dist.group.WORLD
        assert world is not None
        groups = {CommGroup.WORLD: world}
        self._by_ranks[tuple(range(mesh.size))] = world
        # A default group that a script bound to its GPU splits communicators, in which every rank takes part. Otherwise
        # only the members do, so a job of a thousand ranks makes five groups per rank and not thousands.
        together = world.bound_device_id is not None
        for kind in _ORDER:
            mine = mesh.group(kind, rank)
            for ranks in mesh.groups(kind) if together else (mine,):
                self._make(ranks, kind.value, mine=ranks == mine, together=together)
            groups[kind] = self._by_ranks[mine]
        return groups

    def for_objects(self) -> dist.ProcessGroup:
        """Return a group of all ranks that carries CPU tensors: WORLD, unless a script made that for nccl only."""
        if self._objects is None:
            world = dist.group.WORLD
            assert world is not None
            if "cpu:gloo" in str(dist.get_backend_config(world)):
                self._objects = world
            else:
                with self._network():
                    self._objects = _made(dist.new_group(backend="gloo", timeout=self._timeout, group_desc="objects"))
        return self._objects

    def of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of some ranks; None if this is none of them.

        Whoever may come to be in a group with one of them calls this too, in the same order: torch names a group by its
        ranks and by how many groups the process has, and ranks that have made unlike many would wait for one another.
        """
        if dist.get_rank() in ranks:
            self._make(ranks, "shared parameters", mine=True, together=False)
        elif ranks not in self._others:
            self._others.add(ranks)
            with self._network():
                self._alone.append(_made(dist.new_group([dist.get_rank()], use_local_synchronization=True)))
        return self._by_ranks.get(ranks)

    def lanes(self, ranks: tuple[int, ...], backend: str) -> list[dist.ProcessGroup]:
        """Return two groups of some ranks beside all others, one for each direction; all of the ranks call this."""
        if ranks not in self._lanes:
            with self._network():
                self._lanes[ranks] = [
                    _made(
                        dist.new_group(
                            list(ranks),
                            timeout=self._timeout,
                            backend=backend,
                            use_local_synchronization=True,
                            group_desc=f"lanes to {where} ranks",
                        )
                    )
                    for where in ("higher", "lower")
                ]
        return self._lanes[ranks]

    def set_timeout(self, timeout: timedelta) -> None:
        """Use another timeout in all groups but a default group that the script made."""
        self._timeout = timeout
        for group in self.all():
            group.set_timeout(timeout)

    def all(self) -> list[dist.ProcessGroup]:
        """Return every group, without repetition."""
        objects = [] if self._objects is None or self._objects in self._by_ranks.values() else [self._objects]
        lanes = [group for both in self._lanes.values() for group in both]
        return [*self._by_ranks.values(), *lanes, *self._alone, *objects]

    def _make(self, ranks: tuple[int, ...], description: str, *, mine: bool, together: bool) -> None:
        if ranks in self._by_ranks or ranks in self._others:
            return
        with self._network():
            group = dist.new_group(
                list(ranks), timeout=self._timeout, use_local_synchronization=not together, group_desc=description
            )
        if mine:
            self._by_ranks[ranks] = _made(group)
        else:
            self._others.add(ranks)

    def _network(self) -> contextlib.AbstractContextManager[None]:
        return loopback() if self._single_host else contextlib.nullcontext()


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of every group it makes"
    return group


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Let gloo groups that are made in this block use the loopback interface, unless the user chose one.

    Otherwise gloo asks for the address of the host's own name, which laptops and containers often cannot resolve.
    """
    name = "lo0" if sys.platform == "darwin" else "lo"
    if "GLOO_SOCKET_IFNAME" in os.environ or name not in {name for _, name in socket.if_nameindex()}:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
