"""Messages between GPUs cannot hang, as long as a GPU runs kernels of several streams side by side.

The transport is the real one, over a model of nccl's rules; dice draw models, placements, schedules and delays.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from smpkit.plan.schedule.actions import Action, Schedule, check
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.torch.core.tensor_spec import TensorSpec
from smpkit.torch.pipeline import host_link
from smpkit.torch.pipeline.executor import graph_of
from smpkit.torch.pipeline.host_link import HostLink
from smpkit.torch.pipeline.messages import Message, P2PTransfer, Tag
from smpkit.torch.pipeline.transport import Transport
from tests.torch.pipeline.nccl_model import Deadlock, Gpus, Hosts, World

CPU = torch.device("cpu")


def drawn_moves(dice: random.Random, size: int) -> tuple[list[P2PTransfer], tuple[int, ...]]:
    """Return what travels in a model whose units lie anywhere and use what others before them have made."""
    loops = dice.random() < 0.5
    owners = [index % size if loops else index for index in range(size * (2 if loops else 1))]
    owners += [dice.randrange(size) for _ in range(dice.choice((0, 0, 1, 3)))]
    if dice.random() < 0.3:
        dice.shuffle(owners)
    segments, sent = [0] * size, [False] * size
    transfers: list[P2PTransfer] = []
    there = {(0, owners[0])}
    for unit in range(1, len(owners)):
        for used in sorted({unit - 1, *(dice.sample(range(unit), 1) if dice.random() < 0.3 else ())}):
            source, target = owners[used], owners[unit]
            if source == target or (used, target) in there:
                continue
            there.add((used, target))
            if sent[target]:
                segments[target] += 1
                sent[target] = False
            sent[source] = True
            length = dice.choice((0, 1, 2, 2, 2))
            spec = TensorSpec((length,), (1,), torch.float64, dice.random() < 0.9)
            transfers.append(P2PTransfer(len(transfers), source, target, segments[source], segments[target], spec))
        there.add((unit, owners[unit]))
    return transfers, tuple(segment + 1 for segment in segments)


def drawn_schedule(dice: random.Random, graph: SegmentGraph) -> Schedule:
    count = dice.randint(1, 6)
    if dice.random() < 0.2:
        schedule = simple(graph, count)
    else:
        schedule = interleaved(graph, count, dice.randint(1, 6), split_backward=dice.random() < 0.3)
    check(schedule)
    return schedule


def code_of(microbatch: int, transfer: P2PTransfer, *, backward: bool) -> float:
    return 1 + microbatch * 1000 + transfer.number * 2 + backward


@dataclass
class Driver:
    """Runs a schedule on one rank as the executor does, with numbers in place of a model."""

    world: World
    transport: Transport
    schedule: Schedule
    transfers: list[P2PTransfer]
    rank: int
    kept: defaultdict[int, list[tuple[torch.Tensor, float]]] = field(default_factory=lambda: defaultdict(list))
    """By microbatch, what autograd would save, and what must be in it."""

    def __post_init__(self) -> None:
        self.dice = random.Random(self.world.dice.random())

    def step(self, diverges: int | None) -> None:
        """Run a step; in one microbatch, nobody needs what the last transfer brings."""
        actions = self.schedule.actions[self.rank]
        last = {action.microbatch: place for place, action in enumerate(actions)}
        for place, action in enumerate(actions):
            if self.dice.random() < 0.5:
                self.world.pause()
            self._act(action, self.transfers[:-1] if action.microbatch == diverges else self.transfers)
            if last[action.microbatch] == place:
                del self.kept[action.microbatch]
        self.transport.end_step()

    def _act(self, action: Action, needed: list[P2PTransfer]) -> None:
        microbatch, backward = action.microbatch, action.kind is Kind.BACKWARD
        here = (self.rank, action.segment)
        came = [transfer for transfer in needed if (transfer.target, transfer.target_segment) == here]
        went = [transfer for transfer in self.transfers if (transfer.source, transfer.source_segment) == here]
        if action.kind is Kind.WEIGHT:
            came = went = []
        elif backward:
            came, went = (
                [m for m in went if m in needed and m.spec.requires_grad],
                [m for m in came if m.spec.requires_grad],
            )
        for transfer in came:
            value = self.transport.receive(Message(microbatch, transfer, backward))
            if value is not None:
                self.kept[microbatch].append((value, code_of(microbatch, transfer, backward=backward)))
        self._check(microbatch, str(action))
        for transfer in went:
            self.world.pause()
            self._send(microbatch, transfer, backward)

    def _check(self, microbatch: int, name: str) -> None:
        """Compute with all that a microbatch keeps: it must still be there."""
        # By address: what is told to a GPU does not keep memory for it.
        seen = [(value.data_ptr(), value.numel(), code) for value, code in self.kept[microbatch]]

        def look() -> None:
            for address, length, code in seen:
                content = list((ctypes.c_double * length).from_address(address))
                assert content == [code] * length, f"{name} read what another message brought"

        self.world.compute(look, name)

    def _send(self, microbatch: int, transfer: P2PTransfer, backward: bool) -> None:
        message = Message(microbatch, transfer, backward)
        # Some gradients are absent: the same on all ranks.
        if backward and (microbatch + transfer.number) % 5 == 0:
            self.transport.send(None, message)
            return
        value = torch.zeros(transfer.spec.shape, dtype=torch.float64)
        self.world.kept.append(value)
        code, data = code_of(microbatch, transfer, backward=backward), value.numpy()
        self.world.compute(lambda: data.fill(code), f"what {'B' if backward else 'F'}{microbatch} sends")
        self.transport.send(value, message)


@contextmanager
def over(world: World) -> Iterator[None]:
    """Run transports over a world, and keep memory as long as a GPU may use it."""

    def send(self: HostLink, data: torch.Tensor, target: int, tag: int, *args: Any) -> Any:
        if tag != Tag.HEADERS:
            world.synchronize_stream()
        return sends(self, data, target, tag, *args)

    def receive(self: HostLink, buffer: torch.Tensor, *args: Any) -> Any:
        world.kept.append(buffer)
        return receives(self, buffer, *args)

    sends, receives = HostLink._send, HostLink._recv
    fixed = SimpleNamespace(timeout=timedelta(seconds=60))
    clock = SimpleNamespace(
        sleep=lambda _: world.pause(), monotonic=time.monotonic, perf_counter_ns=time.perf_counter_ns
    )
    with (
        world.devices(),
        mock.patch.object(host_link, "time", clock),
        mock.patch.object(host_link, "state", fixed),
        mock.patch.object(HostLink, "_send", send),
        mock.patch.object(HostLink, "_recv", receive),
    ):
        yield


def play(seed: int, directions: tuple[str, str] = ("up", "down"), *, diverges: bool = False) -> None:
    """Run some steps of a drawn model; in the second, a message that was sent is needed by nobody if it `diverges`.

    Args:
        directions: the names of the groups that carry what travels to later ranks and to earlier ones.
    """
    dice = random.Random(seed)
    size = dice.choice((2, 3, 4, 8))
    transfers, counts = drawn_moves(dice, size)
    stub: Any = SimpleNamespace(
        stage=SimpleNamespace(size=size), num_segments=counts, transfers=transfers, has_backward=dice.random() < 0.9
    )
    schedule = drawn_schedule(dice, graph_of(stub))
    diverging = dice.randrange(schedule.num_microbatches) if diverges else None
    world = World(size, seed)

    def program(rank: int) -> None:
        groups: Any = {name: Gpus(world, rank, name) for name in directions}
        up, down = (groups[name] for name in directions)
        hosts: Any = Hosts(world, rank)
        transport = Transport(hosts, range(size), CPU, (up, down))
        transport.connect(transfers)
        driver = Driver(world, transport, schedule, transfers, rank)
        for number in range(3):
            driver.step(diverging if number == 1 else None)
        world.synchronize("the end")

    with over(world):  # around all ranks: they are threads, and each would put back what another one had put there
        world.run(program)


SEEDS = [pytest.param(range(25), id="25 seeds"), pytest.param(range(200), id="200 seeds", marks=pytest.mark.slow)]


@pytest.mark.parametrize("diverges", [False, True], ids=["as recorded", "diverging"])
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.timeout(900)
def test_no_order_of_events_hangs(seeds: range, diverges: bool) -> None:
    for seed in seeds:
        play(seed, diverges=diverges)


def test_one_group_for_both_directions_would_hang() -> None:
    with pytest.raises(Deadlock):  # the first seed that does
        play(3, ("both", "both"))
