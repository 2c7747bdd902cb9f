"""Memory of the host: exact, aligned, there before it is pinned, unpinned before it goes; and how much there is."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smpkit.torch.core import devices
from smpkit.torch.distributed import host_memory
from smpkit.torch.distributed.host_memory import (
    LARGE_PAGE,
    PAGE,
    available_bytes,
    container_limit,
    mapped_bytes,
    pinned_bytes,
    zeros,
)

CUDA = torch.device("cuda")
ASKS_LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of the process")


def process_bytes(field: int) -> int:
    """Return how much this process has mapped (0), or has in memory (1)."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * PAGE


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_elements", [0, 5, LARGE_PAGE // 4 - 1, LARGE_PAGE // 4, LARGE_PAGE + 12_345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_are_zeros_of_exactly_that_size(num_elements: int, dtype: torch.dtype) -> None:
    tensor = zeros(num_elements, dtype)
    assert (tensor.shape, tensor.dtype) == ((num_elements,), dtype)
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == dtype.itemsize * num_elements  # what torch.save writes
    assert tensor.nbytes < LARGE_PAGE or tensor.data_ptr() % LARGE_PAGE == 0
    assert tensor.fill_(1).sum() == num_elements


@ASKS_LINUX
def test_memory_goes_back_to_the_system_with_the_last_tensor() -> None:
    before = process_bytes(0)
    whole = mapped_bytes(256 << 20)
    part = whole[:64].view(torch.float32)
    del whole
    assert process_bytes(0) - before >= 192 << 20  # threads of other tests may end meanwhile, and give back stacks
    assert part.tolist() == [0.0] * 16
    del part
    assert process_bytes(0) - before < 128 << 20


@pytest.mark.parametrize("num_bytes", [1, PAGE, 5000, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5000])
def test_mapped_bytes_are_exact_and_large_pages_are_asked_for_where_one_fits(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = list[mmap.mmap]()
    advice = list[tuple[int, ...]]()

    class Advised(host_memory._Pages):
        def madvise(self, *what: int) -> None:
            mappings.append(self)
            advice.append(what)
            super().madvise(*what)

    monkeypatch.setattr(host_memory, "_Pages", Advised)
    memory = mapped_bytes(num_bytes)
    assert memory.untyped_storage().nbytes() == num_bytes
    assert memory.data_ptr() % (LARGE_PAGE if num_bytes >= LARGE_PAGE else PAGE) == 0
    large = [(start, length) for _, start, length in advice]
    begin = memory.data_ptr() - torch.frombuffer(mappings[0], dtype=torch.uint8).data_ptr() if mappings else 0
    assert large == ([(begin, num_bytes // LARGE_PAGE * LARGE_PAGE)] if num_bytes >= LARGE_PAGE else [])


def test_a_child_has_no_part_of_what_is_not_for_it() -> None:
    """A GPU would go on with pages that a write after the fork has moved elsewhere."""
    script = """
import os, warnings
from smpkit.torch.distributed.host_memory import _map
warnings.simplefilter("ignore")
for in_children in (True, False):
    memory, _ = _map(1 << 16, in_children=in_children)
    memory.fill_(3)
    child = os.fork()
    if not child:
        os._exit(int(memory[0]))
    status = os.waitpid(child, 0)[1]
    print(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["3", "-11"]


# --- pinned memory ----------------------------------------------------------------------------------------------------


class Cudart:
    """Stands for the CUDA runtime: pins nothing, and notes what it was asked for."""

    def __init__(self) -> None:
        self.error = 0
        self.pinned = list[tuple[int, int]]()
        self.unpinned = list[int]()
        self.readable = list[int]()
        """What is read at an address that is being unpinned: it is mapped still."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.pinned.append((address, num_bytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        with Path("/proc/self/mem").open("rb") as memory:
            memory.seek(address)
            self.readable += memory.read(1)
        self.unpinned.append(address)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(devices, "has_streams", lambda device: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_memory_is_pinned_in_one_piece_when_its_pages_are_there(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[int]()
    monkeypatch.setattr(host_memory, "touch", lambda memory: order.append(len(cudart.pinned)))
    memory = [pinned_bytes(CUDA, num_bytes) for num_bytes in (100, LARGE_PAGE, 5 * LARGE_PAGE + 5000)]
    assert [each.nbytes for each in memory] == [100, LARGE_PAGE, 5 * LARGE_PAGE + 5000]
    sizes = [PAGE, LARGE_PAGE, 5 * LARGE_PAGE + 2 * PAGE]
    assert cudart.pinned == [(each.data_ptr(), size) for each, size in zip(memory, sizes, strict=True)]
    assert order == [0, 1, 2]


@ASKS_LINUX
@pytest.mark.parametrize("num_bytes", [100, LARGE_PAGE + 1])
def test_memory_is_unpinned_with_its_last_tensor_while_it_is_still_mapped(cudart: Cudart, num_bytes: int) -> None:
    """Else something else could be at its address by then."""
    memory = pinned_bytes(CUDA, num_bytes).fill_(9)
    address, part = memory.data_ptr(), memory[:50].view(torch.int16)
    del memory
    assert cudart.unpinned == []
    del part
    assert (cudart.unpinned, cudart.readable) == ([address], [9])


def test_a_forked_child_unpins_nothing(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pinned_bytes(CUDA, 100)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    del memory
    assert cudart.unpinned == []


def test_what_the_driver_does_not_pin_is_an_error_and_its_own_error_is_over(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps a failed call as the thread's last error, which torch takes for that of its next kernel."""
    launched = list[str]()

    def launch(size: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", launch)
    cudart.error = 2
    with pytest.raises(OSError, match="cudaHostRegister of 4096 bytes failed with CUDA error 2"):
        pinned_bytes(CUDA, 100)
    assert launched == ["cuda"]
    assert cudart.unpinned == []


def test_a_device_whose_driver_registers_nothing_gets_memory_that_torch_has_pinned(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: Any = torch.zeros

    def zeros_without_driver(num_bytes: int, *, pin_memory: bool = False, **options: object) -> Tensor:
        assert pin_memory
        if num_bytes > PAGE:
            raise RuntimeError("no driver")
        return inner(num_bytes, **options)

    monkeypatch.setattr(devices, "host_registration", lambda device: None)
    monkeypatch.setattr(torch, "zeros", zeros_without_driver)
    assert pinned_bytes(CUDA, 5).tolist() == [0] * 5
    with pytest.raises(OSError, match="torch could not pin 4097 bytes of the host: no driver"):
        pinned_bytes(CUDA, PAGE + 1)


def test_a_device_without_streams_needs_no_pinned_memory(cudart: Cudart) -> None:
    assert pinned_bytes(torch.device("cpu"), 3 * LARGE_PAGE).nbytes == 3 * LARGE_PAGE
    assert pinned_bytes(CUDA, 0).nbytes == 0
    assert cudart.pinned == []


# --- how much there is ------------------------------------------------------------------------------------------------

V2 = {"memory.max": "1000", "memory.current": "990", "memory.stat": "anon 90\ninactive_file 800\nfile 900\n"}
JOB = "system.slice/slurmstepd.scope/job_7"
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"cgroup/{folder}/{name}": text for name, text in files.items()}


TREES: dict[str, tuple[dict[str, str], int | None, int | None]] = {
    "no container": ({}, None, None),
    "the machine": ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n"}, 7168, None),
    "version 2": (below("", {"memory.max": "1000", "memory.current": "400"}), 600, 1000),
    "no limit": (below("", {"memory.max": "max", "memory.current": "400"}), None, None),
    # After a data set was read: the kernel drops files that nobody uses as soon as somebody needs the memory.
    "page cache": (below("", V2), 810, 1000),
    "a machine with less": ({**below("", V2), "proc/meminfo": "MemAvailable: 0 kB\n"}, 0, 1000),
    "a Slurm job without a namespace": (
        {
            "proc/self/cgroup": f"0::/{JOB}/step_0/user/task_0\n",
            **below(f"{JOB}/step_0/user/task_0", {"memory.max": "max", "memory.current": "100"}),
            **below(f"{JOB}/step_0", {"memory.max": "3000", "memory.current": "1000"}),
            **below(JOB, {"memory.max": "2000", "memory.current": "1500"}),
            **below("", {"cgroup.procs": "1"}),
        },
        500,
        2000,
    ),
    "another job beside ours": (
        {"proc/self/cgroup": "0::/job_1\n", **below("job_2", {"memory.max": "10", "memory.current": "1"})},
        None,
        None,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "11:cpu,cpuacct:/other\n9:memory:/slurm/job_7\n0::/\n",
            **below("memory/slurm/job_7", dict(zip(V1, ("1000", "990"), strict=True))),
            **below("memory/slurm/job_7", {"memory.stat": "inactive_file 1\ntotal_inactive_file 800\n"}),
            **below("memory/other", dict(zip(V1, ("10", "1"), strict=True))),
        },
        810,
        1000,
    ),
    "version 1, used up": (below("memory", dict(zip(V1, ("1000", "1200"), strict=True))), 0, 1000),
    "version 1, no limit": (below("memory", dict(zip(V1, ("9223372036854771712", "5"), strict=True))), None, None),
}


@pytest.mark.parametrize(("files", "free", "limit"), TREES.values(), ids=TREES)
def test_what_a_process_may_take(
    files: dict[str, str], free: int | None, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path / "cgroup")
    assert (available_bytes(), container_limit()) == (free, limit)
