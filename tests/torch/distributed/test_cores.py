"""How many threads a rank takes, and the cores that it is bound to: those of one host share its cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smpkit.torch.distributed import cores

ONE_OF_EIGHT = {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "at_start", "allowed", "expected"),
    [
        ({}, 96, 96, 96),
        (ONE_OF_EIGHT, 96, 96, 12),
        (ONE_OF_EIGHT, 96, 12, 12),  # bound to its part, it does not share that
        (ONE_OF_EIGHT, 96, 4, 4),
        (ONE_OF_EIGHT, 4, 4, 1),
        ({"RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, 4, 96, 4),  # the launcher does not say how many share it
    ],
)
def test_ranks_of_one_host_share_its_cores(
    environ: dict[str, str], at_start: int, allowed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_AT_START", at_start)
    monkeypatch.setattr(cores, "_allowed", lambda: allowed)
    for name in ONE_OF_EIGHT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cores.own_cores() == expected


GPU = "0001:3b:0a.0"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Build a machine of two sockets with eight cores each, the GPU at the second one."""
    files = {
        "devices/system/node/online": "0-1",
        "devices/system/cpu/online": "0-15",
        f"bus/pci/devices/{GPU}/numa_node": "1",
        f"bus/pci/devices/{GPU}/local_cpulist": "4-7,12-15",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "SYSFS", tmp_path)
    return tmp_path


def test_the_cores_of_the_gpus_socket_are_found_unless_somebody_has_chosen_them(machine: Path) -> None:
    assert cores.cores_near_gpu(GPU, range(16)) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores.cores_near_gpu("0000:00:00.0", range(16)) == set()
    assert cores.cores_near_gpu(GPU, range(8)) == set()
    (machine / "devices/system/cpu/online").write_text("0-7")
    assert cores.cores_near_gpu(GPU, range(8)) == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("devices/system/node/online", "0"),
        (f"bus/pci/devices/{GPU}/numa_node", "-1"),
        (f"bus/pci/devices/{GPU}/local_cpulist", "0-15"),
        (f"bus/pci/devices/{GPU}/local_cpulist", ""),
    ],
)
def test_nothing_is_bound_where_it_would_not_help(machine: Path, name: str, text: str) -> None:
    (machine / name).write_text(text)
    assert cores.cores_near_gpu(GPU, range(16)) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has affinities")
@pytest.mark.parametrize(("environ", "binds"), [({}, True), ({"SMPKIT_NUMA": "0"}, False)], ids=str)
@pytest.mark.usefixtures("machine")
def test_all_threads_that_nobody_has_bound_are_bound(
    environ: dict[str, str], binds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    masks = {0: set(range(16)), 100: set(range(16)), 101: {3}}
    for task in (100, 101, 102):  # the last one has ended meanwhile
        (tmp_path / "task" / str(task)).mkdir(parents=True)
    monkeypatch.setattr(cores, "TASKS", tmp_path / "task")

    def mask_of(task: int) -> set[int]:
        if task not in masks:
            raise ProcessLookupError
        return masks[task]

    monkeypatch.setattr(os, "sched_getaffinity", mask_of)
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: masks.update({task: set(cores)}))
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    cores.bind(torch.device("cuda", 0), environ)
    assert masks[100] == ({4, 5, 6, 7, 12, 13, 14, 15} if binds else set(range(16)))
    assert masks[101] == {3}


def test_a_rank_without_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    cores.bind(torch.device("cpu"), {})
