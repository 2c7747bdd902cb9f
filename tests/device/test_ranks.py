"""Ranks as processes of their own on a GPU: which see it, where they run, and that none waits for one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from smpkit.torch.core.devices.backends import nccl_version
from tests.device.device import IS_SIMULATED

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
"""For a rank to end. Their waits have 600: who needs that has not been told."""


def run(script: str, tmp_path: Path, size: int = 1, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a script on some ranks, and return how each of them ended; raise TimeoutExpired if one does not."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **variables}
    outputs = [(tmp_path / f"{rank}.out", tmp_path / f"{rank}.err") for rank in range(size)]
    ranks = []
    for rank, (out, err) in enumerate(outputs):
        with out.open("w") as stdout, err.open("w") as stderr:
            own = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, str(path)], env=own, stdout=stdout, stderr=stderr))
    try:
        codes = [process.wait(SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())
        for process, code, (out, err) in zip(ranks, codes, outputs, strict=True)
    ]


INIT = """
    import smpkit.torch as smp
    smp.init({})
    print(smp.state.device)
"""


@pytest.mark.real_gpu("CUDA_VISIBLE_DEVICES, and what torch's CUDA build says")
def test_a_rank_that_cannot_see_the_gpu_refuses_to_train_on_the_cpu(tmp_path: Path) -> None:
    (blind,) = run(INIT, tmp_path, CUDA_VISIBLE_DEVICES="9", SM_NUM_GPUS="1")
    assert blind.returncode == 1
    assert "rank 0 sees no GPU but should have one (SM_NUM_GPUS is 1)" in blind.stderr
    assert f"is built for CUDA {torch.version.cuda}" in blind.stderr
    assert "CUDA_VISIBLE_DEVICES is 9" in blind.stderr
    (meant,) = run(INIT, tmp_path, CUDA_VISIBLE_DEVICES="", SM_NUM_GPUS="1")
    assert (meant.returncode, meant.stdout) == (0, "cpu\n"), meant.stderr


AFFINITY = """
    import os
    before = os.sched_getaffinity(0)
    import smpkit.torch as smp
    smp.init({})
    from smpkit.torch.distributed.cores import cores_near_gpu
    import torch
    found = torch.cuda.get_device_properties(0)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    expected = cores_near_gpu(address, before) or before
    print(os.path.isdir(f"/sys/bus/pci/devices/{address}"), os.sched_getaffinity(0) == expected)
"""


@pytest.mark.real_gpu("looks at the PCI bus")
def test_a_rank_runs_on_the_cores_beside_its_gpu(tmp_path: Path) -> None:
    (rank,) = run(AFFINITY, tmp_path)
    assert rank.returncode == 0, rank.stderr
    listed, is_bound = rank.stdout.split()
    if listed == "False":
        pytest.skip("this machine does not list its GPU below /sys")
    assert is_bound == "True"


FAILS = """
    from tests.device.device import gpu
    gpu()
    import torch, torch.distributed as dist
    import smpkit.torch as smp
    smp.init({"ddp": True, "timeout_seconds": 600})
    x = torch.ones(1, device=smp.state.device)
    dist.all_reduce(x)
    print(x.item(), flush=True)
    if smp.rank() == 1:
        raise ValueError("the mask is empty")
    dist.all_reduce(x)
    x.item()  # behind a kernel that waits for rank 1
    smp.barrier()
"""


@pytest.mark.skipif(
    not IS_SIMULATED and torch.cuda.device_count() < 2 and nccl_version() < (2, 30),
    reason="needs two GPUs, or NCCL 2.30 or newer",
)
def test_a_rank_that_waits_for_a_kernel_hears_who_failed(tmp_path: Path) -> None:
    shared = {"SMPKIT_SHARED_GPU_NCCL": "1"} if torch.cuda.device_count() < 2 else {}
    started = time.monotonic()
    ranks = run(FAILS, tmp_path, 2, **shared)
    assert [rank.stdout for rank in ranks] == ["2.0\n", "2.0\n"], [rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "RemoteError: rank 1 failed: ValueError: the mask is empty" in ranks[0].stderr
    assert time.monotonic() - started < SECONDS / 2
