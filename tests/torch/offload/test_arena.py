from __future__ import annotations

import gc
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.testing import EmulatedLink
from smpkit.torch.offload import arena as arenas
from smpkit.torch.offload.arena import ALIGNMENT, Arena, Block, aligned, arena_for
from smpkit.torch.offload.link import DONE, Link
from tests.torch.offload.chains import allocate


def take(arena: Arena, num_bytes: int) -> Block:
    block = arena.take(num_bytes)
    assert block is not None
    return block


def span(block: Block) -> tuple[int, int]:
    return block.memory.data_ptr(), block.memory.data_ptr() + block.memory.numel()


@mock.patch.object(arenas, "_SLAB", 1024)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=40), st.integers(1, 16_000))
def test_blocks_are_aligned_apart_and_within_the_budget(actions: list[tuple[bool, int]], budget_bytes: int) -> None:
    """A model that only counts: a block is refused only where no gap of a slab holds it, and all comes back."""
    arena, held = Arena(budget_bytes, allocate), list[Block]()
    for is_taken, number in actions:
        if not is_taken and held:
            held.pop(number % len(held))
            continue
        size, before = aligned(number), arena.mapped_bytes
        block = arena.take(number)
        if block is None:
            assert before == arena.mapped_bytes
            assert before + size > budget_bytes
        else:
            assert number <= block.memory.numel() == size
            held.append(block)
        block = None
        assert arena.used_bytes == sum(each.memory.numel() for each in held) <= arena.peak_bytes
        assert arena.used_bytes <= arena.mapped_bytes <= budget_bytes
        assert all(each.memory.storage_offset() % ALIGNMENT == 0 for each in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(map(span, held))))
    held.clear()
    arena.collect()
    assert arena.used_bytes == 0
    assert len(arena._free) == len(arena._slabs)  # neighbours have joined: each slab is one range again


def test_steps_that_are_alike_use_the_same_memory() -> None:
    arena = Arena(16 * 1024, allocate)
    for _ in range(10):
        blocks = [take(arena, size) for size in (5000, 300, 1000)]
        places = [span(block) for block in blocks]
        del blocks
        assert [span(block) for block in [take(arena, size) for size in (5000, 300, 1000)]] == places
    assert (arena.mapped_bytes, arena.peak_bytes) == (16 * 1024, aligned(5000) + aligned(300) + aligned(1000))


def test_a_block_waits_for_the_latest_copy_back_from_any_part_of_it() -> None:
    arena = Arena(4096, allocate)
    assert take(arena, 4096).after is DONE
    blocks = [take(arena, 1024) for _ in range(4)]
    for block, number in zip(blocks, (7, 9, 8, 5), strict=True):
        block.last_read = SimpleNamespace(number=number, done=lambda: False)
    del block, blocks
    assert take(arena, 4096).after.number == 9
    assert take(arena, 1024).after.number == 9  # nobody has read it since then


def test_what_is_reserved_is_taken_without_asking_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_SLAB", 4096)
    asked = list[int]()

    def memory(num_bytes: int) -> Tensor:
        asked.append(num_bytes)
        return allocate(num_bytes)

    arena = Arena(64 * 1024, memory)
    first = take(arena, 300)
    arena.reserve(20_000)
    arena.reserve(20_000)
    assert asked == [4096, 20_000 - 4096]
    held = [first, *(take(arena, 5000) for _ in range(3))]
    assert len(asked) == 2
    arena.reserve(1 << 40)
    assert arena.mapped_bytes == sum(asked) == 64 * 1024  # as far as the budget goes
    del held


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])
def test_a_machine_without_memory_is_a_spent_budget(error: type[Exception]) -> None:
    def none(num_bytes: int) -> Tensor:
        raise error("no memory")

    arena = Arena(None, none)
    arena.reserve(10)
    assert (arena.take(10), arena.mapped_bytes) == (None, 0)


def test_memory_goes_back_with_the_arena_when_no_copy_uses_it() -> None:
    order = list[str]()

    class Memory(Tensor):
        def __del__(self) -> None:
            order.append("released")

    arena = Arena(4096, lambda size: allocate(size).as_subclass(Memory), lambda: order.append("finished"))
    arena.reserve(4096)
    assert order == []
    del arena
    gc.collect()
    assert order == ["finished", "released"]


def test_memory_that_goes_waits_for_no_thread() -> None:
    """Garbage is collected anywhere, also while a thread starts, under a lock that the end of another one needs."""
    closed, link = list[str](), EmulatedLink()
    link.close = lambda: closed.append("closed")  # type: ignore[method-assign]
    arena_for(link, 4096)
    gc.collect()
    assert not closed


BUDGETS = [(8000, None, 3000), (8000, 5000, 5000), (0, None, 1), (None, None, None)]


@pytest.mark.parametrize(("available", "wanted", "expected"), BUDGETS)
def test_the_budget_is_a_part_of_three_quarters_of_what_is_free(
    available: int | None, wanted: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="a host memory budget of 0 bytes holds nothing"):
        Arena(0, allocate)
    monkeypatch.setattr(arenas, "available_bytes", lambda: available)
    assert arenas.arena_for(Link(), wanted, num_sharers=2).budget_bytes == expected
