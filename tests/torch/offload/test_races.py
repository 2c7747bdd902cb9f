"""The rules of the engine, each broken on purpose: the checker must find it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.testing.checked_offload import CheckedEngine, CheckedHookContext, CheckedLink, RaceError
from smpkit.torch.offload import hooks as scope
from smpkit.torch.offload.arena import Arena, Block
from smpkit.torch.offload.emulated import EmulatedLink
from smpkit.torch.offload.hooks import SavedTensorHandle
from smpkit.torch.offload.link import CopyBatch, Event, Wait
from smpkit.torch.offload.saved_storage import Group, SavedStorage
from tests.torch.offload.chains import BATCH, WIDTH, chain, forward, inputs
from tests.torch.offload.streams import StreamLink

Engines = Callable[[StreamLink], CheckedEngine]


def healthy(inner: StreamLink) -> CheckedEngine:
    return CheckedEngine(CheckedLink(inner), Arena(), lead=2)


# --- what exercises the rules -----------------------------------------------------------------------------------------


def train(make: Engines) -> None:
    """Train two steps, so that all memory is used twice; the device never catches up by itself."""
    engine, layers = make(StreamLink()), chain(6)
    for _ in range(2):
        forward(layers, inputs(), engine).sum().backward()
        gc.collect()
        engine.end_step()


def drop_what_was_loaded(make: Engines) -> None:
    """Let go of graphs while loads for them are under way on another stream, and use their host memory again."""
    inner = StreamLink()
    engine = make(inner)
    for _ in range(2):
        results = separate_graphs(engine)
        with inner.on("side"):
            results[3].backward()  # loads 2 and 1 too
        del results
        gc.collect()
    engine.end_step()


def change_streams(make: Engines) -> None:
    """Load on one stream and use on another: `side` runs some backwards, and knows of no other stream's work."""
    inner = StreamLink()
    engine = make(inner)
    results = separate_graphs(engine)
    for number in (0, 5, 4, 3, 2, 1):
        with inner.on("side" if number in {0, 2} else "main"):
            results[number].backward()
    engine.end_step()


def separate_graphs(engine: CheckedEngine) -> list[Tensor]:
    """Return results whose backwards need one group each."""
    results = []
    for number in range(6):
        with engine.offload_inputs(f"layers.{number}"):
            results.append((torch.randn(WIDTH, requires_grad=True) * 1).square().sum())
    return results


def view_twice(make: Engines) -> None:
    """Save a square tensor and its transpose."""
    engine = make(StreamLink())
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with engine.offload_inputs("layer"):
        y = (x * 1).square()
        z = (y @ y.t()).sum()
    z.backward()


def leave_a_graph(make: Engines) -> None:
    """Run forward without backward."""
    engine = make(StreamLink())
    x = forward(chain(6), inputs(), engine)
    del x
    gc.collect()
    engine.end_step()


def save_on_two_streams(make: Engines) -> None:
    """Save on `side`, which nobody has waited for when all that the layer saves is sent from `main`."""
    inner = StreamLink()
    engine = make(inner)
    for _ in range(2):  # the first step learns how much the layer saves
        x, y = (torch.randn(WIDTH, requires_grad=True) * 1 for _ in range(2))
        with engine.offload_inputs("layer"):
            with inner.on("side"):
                there = x.square().sum()
            here = y.square().sum()
        here.backward()
        with inner.on("side"):
            there.backward()
        engine.end_step()


SCENARIOS = [train, drop_what_was_loaded, change_streams, save_on_two_streams, view_twice, leave_a_graph]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_engine_as_it_is_passes(scenario: Callable[[Engines], None]) -> None:
    scenario(healthy)


# --- the broken engines -----------------------------------------------------------------------------------------------


def with_link(link: type[CheckedLink]) -> Engines:
    return lambda inner: CheckedEngine(link(inner), Arena(), lead=2)


class LoadsBeforeTheCopyIsThere(CheckedLink):
    """Rule 1: a load waits for its own offload."""

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        return super().fetch(copies, after[-1:], what)


class LoadsIntoMemoryInUse(CheckedLink):
    """Rule 2, on the device: a load waits for what used its memory before."""

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        return super().fetch(copies, after[:-1], what)


class ForgetsReaders(Arena):
    """Rule 2, on the host: a block is written when its last reader is done."""

    def free(self, block: Block, after: Sequence[Event] = ()) -> None:
        super().free(block, ())


class RemembersTheStream(CheckedLink):
    """Rule 3: the current stream is asked for at each use."""

    def wait(self, event: Event, what: str) -> Wait:
        self.clocks.step("main", event.clock)  # type: ignore[attr-defined]
        return self.inner.wait(event.inner, what)  # type: ignore[attr-defined]


class SharesMemoryOfStreams(CheckedEngine):
    """Rule 3, of allocators: memory of one stream is not used on another without telling."""

    def _copy_to_stream(self, saved: SavedStorage, data: Tensor, stream: Hashable) -> Tensor:
        return data

    def restore(self, group: Group, saved: SavedStorage) -> Tensor:
        data = super().restore(group, saved)
        if saved.h2d_event is not None:  # what the allocator that it came from does after the last reference
            self._touch(saved.stream, data, "using memory again that was loaded", is_write=True)
        return data


class KnowsTheCurrentStreamOnly(CheckedLink):
    """Rule 1: a copy waits for the streams on which its bytes were made."""

    def now(self, stream: Hashable = None) -> Event:
        return super().now()


class LetsGoTooEarly(CheckedLink):
    """Rule 4: the source is held until its copy is complete."""

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        pass


class DoesNotWait(CheckedLink):
    """Compute waits for its load."""

    def wait(self, event: Event, what: str) -> Wait:
        return self.inner.wait(event, what)


class IgnoresStrides(CheckedHookContext):
    """Rule 5: a view comes back with its own strides (the defect of keys without them)."""

    def _pack(self, tensor: Tensor) -> SavedTensorHandle:
        inner, *rest = super()._pack(tensor)
        if len(inner) == 2:
            return (inner, *rest)
        saved, group, dtype, size, _, offset = inner
        return ((saved, group, dtype, size, torch.empty(size).stride(), offset), *rest)


class MixesUpStrides(CheckedEngine):
    context_type = IgnoresStrides


class KeepsItsBlocks(CheckedEngine):
    """Rule 7: what no graph needs is given back."""

    def retire(self, saved: SavedStorage) -> None:
        saved.block = None
        super().retire(saved)


BROKEN = [
    (with_link(LoadsBeforeTheCopyIsThere), change_streams, "not ordered after: the copy out"),
    (with_link(LoadsIntoMemoryInUse), train, "not ordered after: taking device memory"),
    (lambda inner: CheckedEngine(CheckedLink(inner), ForgetsReaders(), lead=2), drop_what_was_loaded, "the copy back"),
    (with_link(RemembersTheStream), change_streams, "not ordered after: the copy back"),
    (lambda inner: SharesMemoryOfStreams(CheckedLink(inner), Arena(), lead=2), change_streams, "using memory again"),
    (with_link(KnowsTheCurrentStreamOnly), save_on_two_streams, "the copy out of `layer` .read. is not ordered"),
    (with_link(LetsGoTooEarly), train, "using memory again that was offloaded"),
    (with_link(DoesNotWait), train, "the backward of `layers.*` is not ordered"),
    (lambda inner: MixesUpStrides(CheckedLink(inner), Arena(), lead=2), view_twice, "came back as"),
    (lambda inner: KeepsItsBlocks(CheckedLink(inner), Arena(), lead=2), leave_a_graph, "belong to no graph"),
]
NAMES = ["load", "load-into", "host-reuse", "stream", "allocator", "made", "source", "wait", "strides", "leak"]


@pytest.mark.parametrize(("broken", "scenario", "complaint"), BROKEN, ids=NAMES)
def test_a_broken_engine_is_caught(broken: Engines, scenario: Callable[[Engines], None], complaint: str) -> None:
    with pytest.raises(RaceError, match=complaint):
        scenario(broken)


def test_a_torn_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 6: without the look at the version, a write that races the copy is found by its checksum."""
    monkeypatch.setattr(scope, "check_version", lambda *_: None)
    engine = CheckedEngine(CheckedLink(EmulatedLink(latency_seconds=0.03)), Arena(), lead=1)
    with engine.offload_inputs("layer"):
        x = torch.randn(BATCH, WIDTH, requires_grad=True) * 1
        y = x.square()
    x.data.fill_(7)
    with pytest.raises(RaceError, match="`layer` came back as"):
        y.sum().backward()
    del x, y
    engine.close()


def test_a_change_in_place_names_the_layer() -> None:
    """Rule 6 as it is kept."""
    engine = CheckedEngine(CheckedLink(EmulatedLink()), Arena())
    with engine.offload_inputs("layers.5"):
        x = torch.randn(BATCH, WIDTH, requires_grad=True) * 1
        y = x.square()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(UsageError, match=r"`layers.5` saved for backward was changed in place"):
        y.sum().backward()


class Remembers(Arena):
    """Knows all blocks that it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []

    def take(self, num_bytes: int) -> Block | None:
        block = super().take(num_bytes)
        assert block is not None
        self.blocks.append(block)
        return block


def test_freed_host_memory_is_poisoned() -> None:
    arena = Remembers()
    leave_a_graph(lambda inner: CheckedEngine(CheckedLink(inner), arena, lead=2))
    assert len(arena.blocks) == 6
    assert all(bool((block.bytes == 0xFF).all()) for block in arena.blocks)
