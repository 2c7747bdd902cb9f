from __future__ import annotations

import weakref
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.offload import accelerator
from smpkit.torch.offload import arena as arenas
from smpkit.torch.offload.accelerator import pinned_memory
from smpkit.torch.offload.arena import ALIGNMENT, LARGE_PAGE, Arena, Block
from smpkit.torch.offload.emulated import CopyEvent, EmulatedLink

CUDA = torch.device("cuda")


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
            arena.free(block)
    assert arena.mapped_bytes <= 3 * 4096
    assert (arena.num_blocks, arena.used_bytes, arena.peak_bytes) == (0, 0, 3 * 1024)


def test_what_is_mapped_is_what_is_used_to_two_percent() -> None:
    arena = Arena(memory=lambda num_bytes: (torch.empty(num_bytes, dtype=torch.uint8), lambda: None))
    payload = [take(arena, 3_000_000 + 4096 * number).bytes.numel() for number in range(40)]
    assert arena.mapped_bytes <= 1.02 * sum(payload)


def test_a_new_size_is_cut_from_free_blocks_of_others_before_more_is_mapped() -> None:
    arena = Arena(budget_bytes=4096)
    for block in [take(arena, 1024) for _ in range(4)]:
        arena.free(block)
    assert take(arena, 4096).bytes.numel() == 4096
    assert arena.take(1) is None


def test_pieces_of_many_segments_are_used_up() -> None:
    arena = Arena()
    for block in [take(arena, size) for size in (5000, 9000, 13000, 3000)]:
        arena.free(block)
    mapped = arena.mapped_bytes
    assert sum(take(arena, 2560).bytes.numel() for _ in range(10)) == 25600
    assert arena.mapped_bytes == mapped


def test_sizes_that_vary_without_end_leave_nothing() -> None:
    arena = Arena(budget_bytes=1 << 20)
    for number in range(1000):
        blocks = [take(arena, (1300 - number - each) * ALIGNMENT) for each in (0, 1)]
        for block in blocks:
            arena.free(block)
    assert len(arena._free) + len(arena._cut) + len(arena._ranges) < 20


def test_a_spent_budget_gives_none_and_recovers() -> None:
    arena = Arena(budget_bytes=1024)
    block = take(arena, 1000)
    assert arena.take(1000) is None
    arena.free(block)
    assert take(arena, 1000) is block


def test_a_block_comes_with_the_events_of_its_last_users() -> None:
    arena, event = Arena(budget_bytes=4096), CopyEvent()
    arena.free(take(arena, 512), [event])
    assert take(arena, 512).free_after == (event,)


def test_events_stay_with_the_memory_when_blocks_are_joined() -> None:
    arena, events = Arena(budget_bytes=4096), [CopyEvent(), CopyEvent()]
    for block, event in zip([take(arena, 2048), take(arena, 2048)], events, strict=True):
        arena.free(block, [event])
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
        self.pinned = list[int]()
        """How much, each time."""
        self.watched: weakref.ref[torch.UntypedStorage] | None = None

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == num_bytes % 4096 == flags == 0
        assert num_bytes < LARGE_PAGE or address % LARGE_PAGE == 0
        self.pinned.append(num_bytes)
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
    monkeypatch.setattr(devices, "_clear_last_error", lambda: forgotten.append(True))
    assert Arena(memory=partial(pinned_memory, CUDA)).take(100) is None
    assert forgotten == [True]


def test_memory_is_unpinned_before_it_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else something else could be at its address by then."""
    runtime = Cudart(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = Arena(memory=partial(pinned_memory, CUDA))
    block = arena.take(100)
    assert block is not None
    runtime.watched = weakref.ref(block.slab.untyped_storage())
    arena.free(block)
    del block
    arena.close()
    assert runtime.unpinned == [True]
    assert runtime.watched() is None


class Forbidden:
    """An event during a capture."""

    device = CUDA

    def query(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_20_no_event_is_asked_for_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert accelerator._is_complete(Forbidden()) is False  # type: ignore[arg-type]


def test_a_block_remembers_few_of_the_forms_that_it_had() -> None:
    """The sizes of one's data vary without end; each is a list of tensors."""
    block, ever = take(Arena(), 4096), list[weakref.ref[torch.Tensor]]()
    for length in range(1, 500):
        forms = [(torch.uint8, torch.Size([length])), (torch.float32, torch.Size([length]))]
        pieces = block.views_of(forms)
        assert [(piece.dtype, piece.size()) for piece in pieces] == forms
        assert block.views_of(list(forms)) is pieces
        ever.append(weakref.ref(pieces[1]))
    assert sum(each() is not None for each in ever) <= 8


def test_a_budget_with_less_left_than_a_block_gives_none() -> None:
    arena = Arena(budget_bytes=4096 + 256)
    take(arena, 4096)
    assert arena.take(512) is None
    assert take(arena, 256).bytes.numel() == 256
    assert arena.mapped_bytes == 4096 + 256


def test_pages_are_there_before_the_driver_looks_them_up_and_all_are_one_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, runtime = list[int](), Cudart(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(accelerator, "touch", lambda memory, progress: order.append(len(runtime.pinned)))
    for num_bytes in (100, LARGE_PAGE, 5 * LARGE_PAGE + 5000):
        memory, release = pinned_memory(CUDA, num_bytes)
        assert memory.nbytes == num_bytes
        release()
    assert runtime.pinned == [4096, LARGE_PAGE, 5 * LARGE_PAGE + 8192]
    assert order == [0, 1, 2]
    assert len(runtime.unpinned) == 3


# --- memory that is known to be wanted --------------------------------------------------------------------------------


def test_what_was_reserved_is_taken_without_asking_the_system() -> None:
    arena = Arena()
    held = [take(arena, size) for size in (5000, 300)]
    arena.reserve([5000, 300, 70_000] * 4)
    segments = arena.num_slabs
    held += [take(arena, size) for size in (70_000, 300, 5000, 300, 5000, 70_000, 70_000, 300, 5000, 70_000)]
    assert arena.num_slabs == segments
    spans = sorted((b.slab.data_ptr() + b.offset, b.size) for b in held)
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
    arena.reserve([5000, 300, 70_000] * 4)
    assert arena.num_slabs == segments


def test_a_reservation_is_exact_to_the_page_and_comes_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLAB", 1 << 20)
    asked = list[int]()

    def memory(num_bytes: int) -> tuple[torch.Tensor, object]:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8), lambda: None

    arena = Arena(memory=memory)  # type: ignore[arg-type]
    arena.reserve([100 << 10] * 25 + [3 << 20])
    assert asked == [3 << 20, 1000 << 10, 1000 << 10, 500 << 10]
    assert arena.mapped_bytes == (3 << 20) + 2500 * 1024


def test_a_reservation_uses_what_is_there_first() -> None:
    arena = Arena()
    for block in [take(arena, 4096) for _ in range(4)]:
        arena.free(block)
    assert arena.num_slabs == 4
    arena.reserve([2048] * 8)
    assert (arena.num_slabs, arena.mapped_bytes) == (4, 4 * 4096)


def test_a_reservation_ends_with_the_budget() -> None:
    arena = Arena(budget_bytes=10_000)
    arena.reserve([4096] * 5)
    assert arena.mapped_bytes <= 10_000
    assert [arena.take(4096) is not None for _ in range(3)] == [True, True, False]


# --- memory that copies may still use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "forget"])
def test_memory_goes_back_only_when_no_copy_uses_it(how: str) -> None:
    order = list[str]()
    arena = Arena(
        memory=lambda size: (torch.empty(size, dtype=torch.uint8), lambda: order.append("released")),
        synchronize=lambda: order.append("settled"),
    )
    take(arena, 4096)
    if how == "close":
        arena.close()
    del arena
    assert order == ["settled", "released"]


def test_memory_stays_where_nobody_knows_whether_a_copy_uses_it() -> None:
    released, hanging = list[int](), [True]

    def synchronize() -> None:
        if hanging.pop():
            raise TimeoutError
        hanging.append(False)

    def memory(num_bytes: int) -> tuple[torch.Tensor, object]:
        return torch.empty(num_bytes, dtype=torch.uint8), lambda: released.append(num_bytes)

    arena = Arena(memory=memory, synchronize=synchronize)  # type: ignore[arg-type]
    take(arena, 4096)
    with pytest.raises(TimeoutError):
        arena.close()
    assert released == []
    hanging.append(False)
    arena.close()
    assert released == [4096]


def test_an_arena_of_pinned_memory_waits_for_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()

    class Gpu(EmulatedLink):
        device = torch.device("cuda")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=0))
    arena = arenas.make_arena(Gpu(), 1 << 20)
    take(arena, 100)
    del arena
    assert closed == [True]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"memory.max": "max", "memory.current": "400"}, None),
        # After a data set was read: the kernel drops files that nobody uses as soon as somebody needs the memory.
        ({"memory.max": "1000", "memory.current": "990", "memory.stat": "anon 90\ninactive_file 800\nfile 900"}, 810),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "990",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 800",
            },
            810,
        ),
        ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "1200"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}, None),
        ({}, None),
    ],
)
def test_containers_say_what_is_left_in_two_versions(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(arenas, "_CGROUP", tmp_path)
    assert arenas._container_bytes() == expected
