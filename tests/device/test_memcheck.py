"""No kernel and no copy of the smallest step touches what is not allocated, says NVIDIA's memcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.real_gpu("runs compute-sanitizer")
@pytest.mark.timeout(170)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_memcheck_finds_nothing() -> None:
    code = (
        "import torch, smpkit\n"
        "from torch import nn\n"
        "from tests.device.models import Checkpointed\n"
        "model = Checkpointed(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)]).cuda()\n"
        "with smpkit.offload_activations(model, lead=1, min_bytes=0) as offload:\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(32, 64, device='cuda')).sum().backward()\n"
        "    torch.cuda.synchronize()\n"
        "    print('done', offload.report().bytes_back > 0)\n"
    )
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"]  # CUDA's own libraries ask for functions that are not there
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False, cwd=root, env=environment)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine's device")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "done True" in done.stdout
