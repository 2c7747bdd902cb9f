from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import torch

from smpkit.errors import UsageError
from smpkit.torch.offload import cuda
from smpkit.torch.offload.arena import ALIGNMENT, Arena, Block
from smpkit.torch.offload.emulated import Ticket


def take(arena: Arena, num_bytes: int) -> Block:
    block = arena.take(num_bytes)
    assert block is not None
    return block


def test_blocks_are_exact_aligned_and_do_not_overlap() -> None:
    arena = Arena()
    blocks = [take(arena, size) for size in (1, 255, 256, 257, 5000)]
    assert [block.bytes.numel() for block in blocks] == [1, 255, 256, 257, 5000]
    assert all(block.offset % ALIGNMENT == 0 for block in blocks)
    spans = sorted((b.bytes.data_ptr(), b.bytes.data_ptr() + b.bytes.numel()) for b in blocks)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_block_is_used_again_and_nothing_more_is_mapped() -> None:
    arena = Arena()
    for _ in range(10):
        blocks = [take(arena, 1000) for _ in range(3)]
        for block in blocks:
            arena.give(block)
    assert arena.mapped_bytes <= 3 * 4096
    assert (arena.num_blocks, arena.used_bytes, arena.peak_bytes) == (0, 0, 3 * 1024)


def test_what_is_mapped_is_what_is_used_to_two_percent() -> None:
    arena = Arena(memory=lambda num_bytes: (torch.empty(num_bytes, dtype=torch.uint8), lambda: None))
    payload = [take(arena, 3_000_000 + 4096 * number).bytes.numel() for number in range(40)]
    assert arena.mapped_bytes <= 1.02 * sum(payload)


def test_a_new_size_is_cut_from_free_blocks_of_others_before_more_is_mapped() -> None:
    arena = Arena(budget_bytes=4096)
    for block in [take(arena, 1024) for _ in range(4)]:
        arena.give(block)
    assert take(arena, 4096).bytes.numel() == 4096
    assert arena.take(1) is None


def test_pieces_of_many_segments_are_used_up() -> None:
    arena = Arena()
    for block in [take(arena, size) for size in (5000, 9000, 13000, 3000)]:
        arena.give(block)
    mapped = arena.mapped_bytes
    assert sum(take(arena, 2560).bytes.numel() for _ in range(10)) == 25600
    assert arena.mapped_bytes == mapped


def test_a_spent_budget_gives_none_and_recovers() -> None:
    arena = Arena(budget_bytes=1024)
    block = take(arena, 1000)
    assert arena.take(1000) is None
    arena.give(block)
    assert take(arena, 1000) is block


def test_a_block_comes_with_the_events_of_its_last_users() -> None:
    arena, event = Arena(budget_bytes=4096), Ticket()
    arena.give(take(arena, 512), [event])
    assert take(arena, 512).free_after == (event,)


def test_events_stay_with_the_memory_when_blocks_are_joined() -> None:
    arena, events = Arena(budget_bytes=4096), [Ticket(), Ticket()]
    for block, event in zip([take(arena, 2048), take(arena, 2048)], events, strict=True):
        arena.give(block, [event])
    assert set(take(arena, 4096).free_after) == set(events)


def test_a_machine_without_memory_is_a_spent_budget() -> None:
    def none(num_bytes: int) -> tuple[torch.Tensor, object]:
        raise OSError("no memory")

    assert Arena(memory=none).take(10) is None  # type: ignore[arg-type]


def test_memory_goes_back_to_the_system_on_closing_and_with_the_arena() -> None:
    released: list[int] = []
    for how in ("close", "forget"):
        arena = Arena(memory=lambda size: (torch.empty(size, dtype=torch.uint8), lambda: released.append(size)))
        take(arena, 4096)
        if how == "close":
            arena.close()
        del arena
    assert released == [4096, 4096]


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="budget of 0 bytes"):
        Arena(0)


class Cudart:
    """Stands for the CUDA runtime: pins nothing, and notes what it was asked for."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.unpinned = list[bool]()
        self.watched: weakref.ref[torch.UntypedStorage] | None = None

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == num_bytes % 4096 == flags == 0
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.unpinned.append(self.watched is None or self.watched() is not None)
        return 0


def test_25_what_the_driver_does_not_pin_is_a_spent_budget_and_its_error_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps a failed call as the thread's last error, which torch takes for that of its next kernel."""
    forgotten = list[bool]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    monkeypatch.setattr(cuda, "_forget_last_error", lambda: forgotten.append(True))
    assert Arena(memory=cuda.pinned_memory).take(100) is None
    assert forgotten == [True]


def test_memory_is_unpinned_before_it_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else something else could be at its address by then."""
    runtime = Cudart(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = Arena(memory=cuda.pinned_memory)
    block = arena.take(100)
    assert block is not None
    runtime.watched = weakref.ref(block.segment.untyped_storage())
    arena.give(block)
    del block
    arena.close()
    assert runtime.unpinned == [True]
    assert runtime.watched() is None


class Forbidden:
    """An event during a capture."""

    def query(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_20_no_event_is_asked_for_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda._is_over(Forbidden()) is False  # type: ignore[arg-type]


def test_a_block_remembers_few_of_the_forms_that_it_had() -> None:
    """The sizes of one's data vary without end; each is a list of tensors."""
    block, ever = take(Arena(), 4096), list[weakref.ref[torch.Tensor]]()
    for length in range(1, 500):
        forms = [(torch.uint8, torch.Size([length])), (torch.float32, torch.Size([length]))]
        pieces = block.shaped(forms)
        assert [(piece.dtype, piece.size()) for piece in pieces] == forms
        assert block.shaped(list(forms)) is pieces
        ever.append(weakref.ref(pieces[1]))
    assert sum(each() is not None for each in ever) <= 8


def test_a_budget_with_less_left_than_a_block_gives_none() -> None:
    arena = Arena(budget_bytes=4096 + 256)
    take(arena, 4096)
    assert arena.take(512) is None
    assert take(arena, 256).bytes.numel() == 256
    assert arena.mapped_bytes == 4096 + 256
