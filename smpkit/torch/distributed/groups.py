"""The process groups behind a mesh: each made once, and reused where two kinds of group have the same ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import chain
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _world as _torch_world

from smpkit.errors import DeadlineError
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.rendezvous import gather, name_ranks

# Any order will do, as long as every rank makes its groups in the same one.
_ORDER: Final = (CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP)


class Groups:
    """The process groups of this rank, by their ranks; lives as long as the default group.

    Args:
        store: where ranks exchange what making a group needs; its keys are used for nothing else.
        single_host: let gloo use the loopback interface.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta, *, single_host: bool) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._single_host = single_host
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._others: set[tuple[int, ...]] = set()
        self._backend: str | None = None
        """Backend of the groups made from now on; None: that of the default group."""
        self._of_all: dict[str, dist.ProcessGroup] = {}
        """Further groups of all ranks, over gloo, by what they are for."""
        self._for_messages: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        """By the ranks of a pipeline; see `for_messages`."""
        self._padding_groups: list[dist.ProcessGroup] = []
        """Groups of this rank alone, see `_align_group_counts`."""

    def for_mesh(self, mesh: Mesh, rank: int) -> dict[CommGroup, dist.ProcessGroup]:
        """Return this rank's group of each kind; make those that are missing."""
        world = dist.group.WORLD
        assert world is not None
        groups = {CommGroup.WORLD: world}
        if backends.carries_host_tensors(world):
            self._by_ranks[tuple(range(mesh.size))] = world
        else:  # a script made it for GPUs only, and ranks also send each other tensors of the host
            self._backend = f"cpu:{backends.GLOO},{dist.get_backend_config(world)}"
        # A default group that a script bound to its GPU splits communicators, in which every rank takes part. Otherwise
        # only the members do, so a job of a thousand ranks makes five groups per rank and not thousands.
        all_ranks = world.bound_device_id is not None
        for kind in _ORDER:
            mine = mesh.group(kind, rank)
            for ranks in mesh.groups(kind) if all_ranks else (mine,):
                self._make(ranks, kind.value, mine=ranks == mine, all_ranks=all_ranks)
            groups[kind] = self._by_ranks[mine]
        return groups

    def for_objects(self) -> dist.ProcessGroup:
        """Return a group of all ranks that carries CPU tensors: WORLD, unless a script made that for devices only."""
        world = dist.group.WORLD
        assert world is not None
        return world if backends.carries_host_tensors(world) else self.over_gloo("objects")

    def over_gloo(self, description: str) -> dist.ProcessGroup:
        """Return a group of all ranks over gloo for one purpose, such as `saves`; all ranks call this."""
        if description not in self._of_all:
            with loopback(single_host=self._single_host):
                group = dist.new_group(backend=backends.GLOO, timeout=self._timeout, group_desc=description)
            self._of_all[description] = _checked(group)
        return self._of_all[description]

    def for_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of some ranks, all of which call this, in the same order as their other such calls."""
        self._make(ranks, "shared parameters", mine=True, all_ranks=False)
        return self._by_ranks[ranks]

    def for_messages(self, ranks: tuple[int, ...], backend: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return groups for the messages of a pipeline, to higher ranks and to lower ones; all its ranks call this."""
        if ranks not in self._for_messages:
            with _without_bound_device():
                up, down = (
                    _checked(self._new(ranks, name, backend, options=backends.message_options(backend, self._timeout)))
                    for name in ("messages up", "messages down")
                )
            self._for_messages[ranks] = up, down
        return self._for_messages[ranks]

    def warm_up(self, groups: Mapping[CommGroup, dist.ProcessGroup], device: torch.device) -> None:
        """Connect the devices now; all ranks call this."""
        # At its first operation a communicator (nccl's) allocates memory, which waits for the whole GPU, and blocks the
        # hosts of its ranks until all have come. In the middle of a step, messages of a pipeline would be under way
        # meanwhile, in an order that depends on which rank is where first.
        seen = set()
        for kind in (CommGroup.WORLD, *_ORDER):
            group = groups[kind]
            if group.size() == 1 or group in seen:
                continue
            seen.add(group)
            name = f"the connection of {kind.value} between the GPUs"
            hosts = group if backends.carries_host_tensors(group) else self.for_objects()
            with waiting(name, group):  # over gloo first: nccl makes a communicator without a deadline
                dist.all_reduce(torch.zeros(1, device="cpu"), group=hosts)
            work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
            assert work is not None, "this rank is in the group"
            self._wait_for_gpu(work, name, group)

    def _wait_for_gpu(self, work: dist.Work, name: str, group: dist.ProcessGroup) -> None:
        """Wait on the host for an operation on GPUs, with a deadline; nccl's `wait` only makes the stream wait."""
        seconds = self._timeout.total_seconds()
        ends = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > ends:
                others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
                raise DeadlineError(
                    f"rank {self._rank} waited {seconds:.0f} s in {name} for {name_ranks(others)}",
                    hint="see what nccl says with NCCL_DEBUG=INFO; is the network between the hosts open?",
                )
            time.sleep(0.001)
        with waiting(name, group):
            work.wait()

    def set_timeout(self, timeout: timedelta, *, owns_default_group: bool) -> None:
        """Use another timeout in all groups but a default group that the script made."""
        self._timeout = timeout
        for group in self.all():
            if owns_default_group or group is not dist.group.WORLD:
                group.set_timeout(timeout)

    def all(self) -> list[dist.ProcessGroup]:
        """Return every group, without repetition."""
        messages = chain.from_iterable(self._for_messages.values())
        groups = [*self._by_ranks.values(), *messages, *self._padding_groups, *self._of_all.values()]
        world = dist.group.WORLD
        return groups if world is None or world in groups else [world, *groups]

    def _make(self, ranks: tuple[int, ...], description: str, *, mine: bool, all_ranks: bool) -> None:
        if ranks in self._by_ranks or ranks in self._others:
            return
        group = self._new(ranks, description, all_ranks=all_ranks)
        if mine:
            self._by_ranks[ranks] = _checked(group)
        else:
            self._others.add(ranks)

    def _new(
        self,
        ranks: tuple[int, ...],
        description: str,
        backend: str | None = None,
        *,
        all_ranks: bool = False,
        options: object = None,
    ) -> object:
        with loopback(single_host=self._single_host):
            if not all_ranks:
                self._align_group_counts(ranks, description)
            return dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend=backend or self._backend,
                pg_options=options,
                use_local_synchronization=not all_ranks,
                group_desc=description,
            )

    def _align_group_counts(self, ranks: tuple[int, ...], description: str) -> None:
        """Make the number of groups equal on all of the ranks, by groups of this rank alone."""
        # Torch derives the name of the next group from the number of groups, among other things. Without this, ranks
        # would not meet in it where a script has made a group of some of them, or where some share parameters with
        # third ranks.
        what = f"the group of {name_ranks(ranks)} ({description})"
        key = hashlib.sha1(what.encode() + str(ranks).encode(), usedforsecurity=False).hexdigest()
        count = len(_torch_world.pg_names)
        hint = "its ranks make it at the same time: do all of them run the same script, with the same model?"
        key = f"groups/{key}"
        counts = gather(self._store, key, self._rank, ranks, str(count), self._timeout, what=what, hint=hint)
        for _ in range(max(map(int, counts)) - count):
            self._padding_groups.append(_checked(dist.new_group([self._rank], use_local_synchronization=True)))


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of every group it makes"
    return group


@contextlib.contextmanager
def _without_bound_device() -> Iterator[None]:
    """Unbind the default group from a GPU to which a script may have bound it, while another group is made."""
    # Torch would split the new communicator off the default group's, in which all ranks of the job must take part at
    # the same time. A communicator of its own needs only its own ranks.
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    if world is None or bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


@contextlib.contextmanager
def loopback(*, single_host: bool) -> Iterator[None]:
    """Let gloo groups of a single host that are made in this block use the loopback interface, or what the user chose.

    Otherwise gloo asks for the address of the host's own name, which laptops and containers often cannot resolve.
    """
    name = "lo0" if sys.platform == "darwin" else "lo"
    is_there = name in {name for _, name in socket.if_nameindex()}
    if not single_host or "GLOO_SOCKET_IFNAME" in os.environ or not is_there:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
