"""Hundreds of steps in which the GPU's streams come late at random, with every bit checked; and memcheck."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, offload_activations
from smpkit.torch.offload.link import AcceleratorLink
from tests.device.device import gpu, on_stream, scaled, sleep
from tests.device.models import Checkpointed, gradients_of, layers

_STEPS = scaled(200)
_WIDTH, _TOKENS, _LAYERS = scaled(512), scaled(2048), 6
_MOST_CYCLES = 2_000_000
"""A millisecond of the GPU's clock, longer than a layer or a copy of these sizes."""


class Late:
    """Sends a random sleep ahead of some of what a stream is given."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def __call__(self, *_: Any, stream: Any = None) -> None:
        if self.dice.random() < 0.25:
            with on_stream(stream) if stream is not None else contextlib.nullcontext():
                sleep(self.dice.randrange(_MOST_CYCLES))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Return what makes compute late; the streams that copy are late already."""
    sleeper = Late(0)
    for name, stream in (("send", "_out"), ("fetch", "_back")):
        plain = getattr(AcceleratorLink, name)

        def slow(self: AcceleratorLink, *args: Any, plain: Any = plain, stream: str = stream) -> Any:
            sleeper(stream=getattr(self, stream))
            return plain(self, *args)

        monkeypatch.setattr(AcceleratorLink, name, slow)
    return sleeper


@pytest.mark.timeout(150)
def test_offloaded_activations(late: Late) -> None:
    model = Checkpointed(*layers(_WIDTH, _LAYERS)).to(gpu())
    x = torch.randn(_TOKENS, _WIDTH, device=gpu())
    expected = gradients_of(model, x)

    def both_ways(_module: nn.Module, _args: Any, y: Tensor) -> None:
        late()
        y.register_hook(late)

    for layer in model:
        layer.register_forward_hook(both_ways)
    with offload_activations(model, lead=1, min_bytes=0) as offload:
        for step in range(_STEPS):
            found = gradients_of(model, x)
            assert all(map(torch.equal, found, expected)), f"step {step}"
            if step % 50 == 0:
                gc.collect()
        assert offload.report().bytes_back > 0


@pytest.mark.timeout(150)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
def test_an_offloaded_model(late: Late, checkpoint: bool) -> None:
    model = OffloadModel(
        layers(_WIDTH, _LAYERS), gpu(), num_slices=3, checkpoint_activation=checkpoint, num_microbatches=2
    )
    x = torch.randn(64, _WIDTH, device=gpu())
    expected = gradients_of(model, x)
    for piece in model.model_slices:
        piece.register_forward_hook(lambda *_: late())
    for step in range(_STEPS // 2):
        found = gradients_of(model, x)
        assert all(map(torch.equal, found, expected)), f"step {step}"


@pytest.mark.real_gpu("runs compute-sanitizer")
@pytest.mark.timeout(170)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_memcheck_finds_nothing() -> None:
    """No kernel and no copy of the smallest step touches what is not allocated."""
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
