"""Memory of the host in large pages: aligned, exact, there before it is used, given back."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from smpkit.torch.offload import arena as pages
from smpkit.torch.offload.arena import Progress, mapped_bytes, touch, zero_bytes, zeros

PAGE = 2 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("num_elements", [0, 5, PAGE // 4 - 1, PAGE // 4, PAGE + 12_345])
def test_it_is_zeros_of_exactly_that_size(num_elements: int) -> None:
    tensor = zeros(num_elements)
    assert tensor.shape == (num_elements,)
    assert tensor.dtype is torch.float32
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == 4 * num_elements  # what torch.save writes
    tensor.fill_(1)
    assert tensor.sum() == num_elements


def test_what_is_large_starts_at_a_large_page() -> None:
    tensors = [zero_bytes(PAGE + extra) for extra in (0, 1, PAGE)]
    assert [tensor.data_ptr() % PAGE for tensor in tensors] == [0, 0, 0]
    assert zeros(PAGE, torch.float64).data_ptr() % PAGE == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of the process")
def test_it_goes_back_to_the_system_with_the_last_tensor() -> None:
    def num_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    before = num_bytes()
    whole = zero_bytes(256 << 20)
    part = whole[:64].view(torch.float32)
    del whole
    assert num_bytes() - before >= 192 << 20  # threads of other tests may end meanwhile, and give back their stacks
    assert part.tolist() == [0.0] * 16
    del part
    assert num_bytes() - before < 128 << 20


class Advised(mmap.mmap):
    """A mapping that notes what the system was told of it: what, from where, how much."""

    made: list[Advised]

    def __init__(self, *_: object, **__: object) -> None:
        self.advice: list[tuple[int, ...]] = []
        self.made.append(self)

    def madvise(self, *advice: int) -> None:
        self.advice.append(advice)
        super().madvise(*advice)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[Advised]:
    Advised.made = []
    monkeypatch.setattr(mmap, "mmap", Advised)
    return Advised.made


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, PAGE - 1, PAGE, 3 * PAGE + 5000])
@pytest.mark.parametrize("in_children", [False, True])
def test_mapped_bytes_are_exact_and_the_system_is_told_what_they_are_for(
    advised: list[Advised], num_bytes: int, in_children: bool
) -> None:
    memory = mapped_bytes(num_bytes, in_children=in_children)
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % (PAGE if num_bytes >= PAGE else 4096) == 0
    (mapping,) = advised
    large = [(length, start) for what, start, length in (each for each in mapping.advice if len(each) == 3)]
    begin = memory.data_ptr() - torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    assert large == ([(num_bytes // PAGE * PAGE, begin)] if num_bytes >= PAGE else [])
    assert ((mmap.MADV_DONTFORK,) in mapping.advice) == (not in_children)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of the process")
def test_pages_that_were_touched_are_there_and_nothing_else_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PIECE", 16 << 20)
    monkeypatch.setattr(pages, "SLAB", 64 << 20)
    monkeypatch.setattr(pages, "own_cores", lambda: 2)
    threads = set[str]()
    both = threading.Barrier(2, timeout=60)

    def write(bytes_of_pages: torch.Tensor, inner: object = pages._write) -> None:
        threads.add(threading.current_thread().name)
        if len(threads) < 2:
            both.wait()  # until the other has begun
        elif both.n_waiting:
            both.wait()
        inner(bytes_of_pages)  # type: ignore[operator]

    monkeypatch.setattr(pages, "_write", write)
    memory, ready = mapped_bytes(160 << 20), list[int]()
    before = resident_bytes()
    touch(memory, lambda num_bytes, seconds: ready.append(num_bytes))
    assert resident_bytes() - before >= 150 << 20  # threads of other tests may end meanwhile
    assert ready == [64 << 20, 64 << 20, 32 << 20]
    assert len(threads) == 2
    assert not memory[:: 1 << 16].any()


def test_a_child_has_no_part_of_what_is_not_for_it() -> None:
    """A GPU would go on with pages that a write after the fork has moved elsewhere."""
    script = """
import os, warnings
from smpkit.torch.offload.arena import mapped_bytes
warnings.simplefilter("ignore")
for in_children in (True, False):
    memory = mapped_bytes(1 << 16, in_children=in_children)
    memory.fill_(3)
    child = os.fork()
    if not child:
        os._exit(int(memory[0]))
    status = os.waitpid(child, 0)[1]
    print(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["3", "-11"]


def test_long_work_says_how_far_it_is_and_short_work_nothing(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress("pinning host memory", every_seconds=5)
    with caplog.at_level(logging.INFO, "smpkit"):
        for _ in range(12):
            progress.add(1 << 30, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "pinning host memory: 5.0 GiB in 5 s (1.00 GiB/s)",
        "pinning host memory: 10.0 GiB in 10 s (1.00 GiB/s)",
    ]
