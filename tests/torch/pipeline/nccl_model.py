"""A model of GPUs that nccl connects, at its worst: which orders of operations can never hang, whatever runs when.

Ranks are threads of one process, of which one runs at a time. Which rank goes on, which message of the hosts arrives,
and what each GPU starts next is drawn by dice, so a seed repeats a run. A run in which nothing can go on any more is a
`Deadlock` that says what everybody waits for. The rules:

- A stream runs what it was given in order; an event that it records has happened when all before it is over.
- A send or receive of a communicator goes to a stream of that communicator's, behind what its caller's stream has been
  given so far, as in torch. It is a kernel that stays on its GPU until its partner runs on the other one.
- Between two ranks, the first send of a communicator's meets the first receive, and so on.
- All streams of a GPU run side by side.

The code under test talks to `World.devices()` in place of `smpkit.torch.core.devices`, and to groups of `Hosts` and of
`Gpus`.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch

from smpkit.torch.core import devices


class Deadlock(AssertionError):
    """Nothing can go on; says what every rank and every GPU waits for."""


class _Ended(BaseException):
    """Unwinds a rank whose world has ended."""


@dataclass(eq=False)
class Event:
    """Has happened when everything that a stream was given before it is over."""

    has_happened: bool = False


@dataclass(eq=False)
class Stream:
    """A queue of one GPU."""

    name: str
    queue: deque[Any] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        self.queue.append(_Wait(event))


@dataclass(eq=False)
class _Wait:
    event: Event
    name = "an event"


@dataclass(eq=False)
class _Record:
    event: Event


@dataclass(eq=False)
class _Kernel:
    """Something that is computed."""

    run: Callable[[], None]
    name: str


@dataclass(eq=False)
class _Half:
    """A send or a receive."""

    name: str
    device: _Device
    memory: torch.Tensor
    sends: bool
    channel: _Channel
    number: int
    runs: bool = False

    def partner(self) -> _Half | None:
        others = self.channel.receives if self.sends else self.channel.sends
        return others[self.number] if self.number < len(others) else None


@dataclass(eq=False)
class _Channel:
    """One direction between two ranks in a communicator."""

    sends: list[_Half] = field(default_factory=list)
    receives: list[_Half] = field(default_factory=list)


class _Device:
    """A GPU."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams = [Stream("compute")]
        self.current = self.streams[0]

    @property
    def is_idle(self) -> bool:
        return not any(stream.queue for stream in self.streams)

    def settle(self) -> None:
        """Do what takes no time."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                while stream.queue and self._passes(stream.queue[0]):
                    stream.queue.popleft()
                    moved = True

    @staticmethod
    def _passes(item: Any) -> bool:
        if isinstance(item, _Record):
            item.event.has_happened = True
            return True
        return isinstance(item, _Wait) and item.event.has_happened

    def moves(self) -> Iterator[Callable[[], None]]:
        """Yield what the GPU could do next."""
        self.settle()
        for stream in self.streams:
            head = stream.queue[0] if stream.queue else None
            if isinstance(head, _Kernel):
                yield lambda head=head, stream=stream: (stream.queue.popleft(), head.run())  # type: ignore[misc]
            elif isinstance(head, _Half) and not head.runs:
                yield lambda head=head: self._start(head)  # type: ignore[misc]

    def _start(self, half: _Half) -> None:
        half.runs = True
        other = half.partner()
        if other is None or not other.runs:
            return
        sent, received = (half, other) if half.sends else (other, half)
        assert sent.memory.nbytes == received.memory.nbytes, f"{sent.name} of other length than {received.name}"
        received.memory.numpy()[:] = sent.memory.numpy()
        for each in (half, other):
            each.device.finish(each)

    def finish(self, half: _Half) -> None:
        next(stream for stream in self.streams if stream.queue and stream.queue[0] is half).queue.popleft()

    def __str__(self) -> str:
        heads = [f"{stream.name}: {stream.queue[0].name}" for stream in self.streams if stream.queue]
        return f"GPU {self.rank} has before it {'; '.join(heads) or 'nothing'}"


@dataclass
class _Rank:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    can_go: Callable[[], bool] = lambda: True
    waits_for: str = "its start"
    is_over: bool = False
    error: BaseException | None = None


class World:
    """Ranks with a GPU each.

    Args:
        seed: of the dice.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.size = size
        self.gpus = [_Device(rank) for rank in range(size)]
        self.kept: list[Any] = []
        """Memory that the CPU would give to others sooner than a GPU's allocator."""
        self._ranks = [_Rank() for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._here = threading.local()
        self._ended = False
        self.channels: defaultdict[tuple[str, int, int], _Channel] = defaultdict(_Channel)
        self.asked: defaultdict[tuple[int, int, int], deque[_Letter]] = defaultdict(deque)
        """By sender, receiver and tag, the receives that have begun."""
        self.mail: defaultdict[tuple[int, int, int], deque[_Letter]] = defaultdict(deque)
        # How often hosts, messages between them and GPUs get on: one may be far ahead of the others.
        self._paces = [self.dice.choice((1, 4, 20)) for _ in range(3)]

    @property
    def rank(self) -> int:
        """The one whose thread asks."""
        return cast("int", self._here.rank)

    @property
    def gpu(self) -> _Device:
        return self.gpus[self.rank]

    # --- what ranks call ------------------------------------------------------------------------------------------

    def wait(self, can_go: Callable[[], bool], what: str) -> None:
        """Let others go on, until a condition holds and the dice fall on this rank."""
        mine = self._ranks[self.rank]
        mine.can_go, mine.waits_for = can_go, what
        self._back.release()
        mine.go.acquire()
        if self._ended:
            raise _Ended

    def pause(self) -> None:
        """Let others go on."""
        self.wait(lambda: True, "its turn")

    def synchronize(self, what: str = "its GPU") -> None:
        """Hold up the host until its GPU is idle."""
        gpu = self.gpu
        self.wait(lambda: gpu.is_idle, what)

    def synchronize_stream(self) -> None:
        """Hold up the host until its current stream is done."""
        event = self.record()
        self.wait(lambda: event.has_happened, "a stream")

    def compute(self, run: Callable[[], None], name: str) -> None:
        """Give something to the current stream."""
        self.gpu.current.queue.append(_Kernel(run, name))

    @contextmanager
    def devices(self) -> Iterator[None]:
        """Let `smpkit.torch.core.devices` be this world."""

        def new_stream(_device: object, *, high_priority: bool = False) -> Stream:
            self.gpu.streams.append(Stream("memory of messages" if high_priority else "another stream"))
            return self.gpu.streams[-1]

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            gpu = self.gpu
            before, gpu.current = gpu.current, stream
            yield
            gpu.current = before

        def record_event(_device: object, *, keeps_time: bool = False) -> Event:
            return self.record()

        with mock.patch.multiple(
            devices,
            is_asynchronous=lambda _: True,
            current_stream=lambda _: self.gpu.current,
            new_stream=new_stream,
            on_stream=on_stream,
            record_event=record_event,
            wait_for_event=lambda stream, event: stream.wait_event(event),
            wait_for_stream=lambda _: self.synchronize_stream(),
        ):
            yield

    def record(self) -> Event:
        event = Event()
        self.gpu.current.queue.append(_Record(event))
        return event

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, program: Callable[[int], None]) -> None:
        """Run a program on all ranks, and what it leaves on their GPUs.

        Raises:
            Deadlock: it cannot end.
        """
        threads = [threading.Thread(target=self._main, args=(rank, program), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            while self._go_on():
                pass
        finally:
            self._ended = True
            for rank in self._ranks:
                rank.go.release()
            for thread in threads:
                thread.join()

    def _main(self, rank: int, program: Callable[[int], None]) -> None:
        self._here.rank = rank
        mine = self._ranks[rank]
        mine.go.acquire()
        try:
            if not self._ended:
                program(rank)
        except _Ended:
            pass
        except BaseException as error:  # handed to the thread that runs the world
            mine.error = error
        mine.is_over = True
        self._back.release()

    def _go_on(self) -> bool:
        """Do one thing that can be done; return whether there is more."""
        choices: list[tuple[int, Callable[[], object]]] = []
        moves = [move for gpu in self.gpus for move in gpu.moves()]
        hosts = [rank for rank in self._ranks if not rank.is_over and rank.can_go()]
        channels = [key for key, letters in self.mail.items() if letters and self.asked[key]]
        if hosts:
            choices.append((self._paces[0], lambda: self._resume(self.dice.choice(hosts))))
        if channels:
            choices.append((self._paces[1], lambda: self._deliver(self.dice.choice(channels))))
        if moves:
            choices.append((self._paces[2], self.dice.choice(moves)))
        if not choices:
            if all(rank.is_over for rank in self._ranks) and all(gpu.is_idle for gpu in self.gpus):
                return False
            waits = [f"rank {i} waits for {r.waits_for}" for i, r in enumerate(self._ranks) if not r.is_over]
            raise Deadlock(". ".join([*waits, *map(str, self.gpus)]))
        self.dice.choices([do for _, do in choices], [weight for weight, _ in choices])[0]()
        return True

    def _resume(self, rank: _Rank) -> None:
        rank.go.release()
        self._back.acquire()
        if rank.error is not None:
            raise rank.error

    def _deliver(self, key: tuple[int, int, int]) -> None:
        sent, asked = self.mail[key].popleft(), self.asked[key].popleft()
        asked.content.view(-1).view(torch.uint8).numpy()[:] = sent.content.view(-1).view(torch.uint8).numpy()
        sent.is_over = asked.is_over = True


@dataclass(eq=False)
class _Letter:
    """A message between hosts, or where it goes."""

    content: torch.Tensor
    is_over: bool = False


class Hosts:
    """A group between hosts, as gloo's: the messages of a tag arrive in order, others in any."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: Sequence[torch.Tensor], target: int, tag: int) -> _Work:
        letter = _Letter(tensors[0])
        self._world.mail[self._rank, target, tag].append(letter)
        return _Work(lambda: self._world.wait(lambda: letter.is_over, f"rank {target} to take a message"))

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Work:
        letter = _Letter(tensors[0])
        self._world.asked[source, self._rank, tag].append(letter)
        return _Work(lambda: self._world.wait(lambda: letter.is_over, f"a message of rank {source}"))


@dataclass
class _Work:
    _wait: Callable[[], None]

    def wait(self, _timeout: object = None) -> None:
        self._wait()


class Gpus:
    """A group between GPUs, as nccl's: a communicator, and a stream on each GPU, for each pair of ranks."""

    def __init__(self, world: World, rank: int, name: str) -> None:
        self._world = world
        self._rank = rank
        self._name = name
        self._streams: dict[int, Stream] = {}

    def send(self, tensors: Sequence[torch.Tensor], target: int, _tag: int) -> _Work:
        return self._begin(tensors[0], self._rank, target)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, _tag: int) -> _Work:
        return self._begin(tensors[0], source, self._rank)

    def _begin(self, memory: torch.Tensor, source: int, target: int) -> _Work:
        world, gpu, sends = self._world, self._world.gpu, source == self._rank
        world.kept.append(memory)
        peer = target if sends else source
        if peer not in self._streams:
            self._streams[peer] = Stream(f"{self._name} with rank {peer}")
            gpu.streams.append(self._streams[peer])
        stream = self._streams[peer]
        channel = world.channels[self._name, source, target]
        halves = channel.sends if sends else channel.receives
        name = f"send {len(halves)} to rank {target}" if sends else f"receive {len(halves)} of rank {source}"
        half = _Half(name, gpu, memory, sends, channel, len(halves))
        halves.append(half)
        stream.wait_event(world.record())
        over = Event()
        stream.queue += [half, _Record(over)]
        return _Work(lambda: world.gpu.current.wait_event(over))
