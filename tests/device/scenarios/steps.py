"""`smpkit.fit`, and checkpoints in the background: each on one simulated device."""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.checkpoints import save as saving
from smpkit.torch.memory import Fitted, fit
from tests.device.scenarios.activations import make, train_step
from tests.device.scenarios.common import WIDTH, add, assert_same, rows
from tests.torch.steps import train_step as smp_step


def fitted(share: float) -> None:
    """Train a model that `smpkit.fit` keeps within a part of the memory that it would take, and look at its peaks."""
    model, tokens = make(is_checkpointed=False, dropout=0.3)
    tokens = tokens.repeat(2, 4)

    def train(limit: int | None) -> tuple[list[Tensor], int, Fitted | None]:
        with torch.device("cpu"):
            trained = copy.deepcopy(model)
        fitted = None if limit is None else fit(trained, device_gib=limit / 2**30, lead=1, min_bytes=0)
        optimizer = torch.optim.Adam(trained.parameters(), foreach=False)
        steps, peak = [], 0
        for _ in range(9):
            torch.accelerator.reset_peak_memory_stats(0)
            steps += train_step(trained, tokens)
            optimizer.step()
            peak = max(peak, torch.accelerator.max_memory_allocated(0))
        return steps, peak, fitted

    expected, whole, _ = train(None)
    limit = int(share * whole)
    found, peak, fitted = train(limit)
    assert_same(found, expected)
    assert peak <= limit, f"a peak of {peak} within {limit}"
    assert fitted is not None
    report = fitted.report()
    assert report.fits
    assert report.least_seconds > 0, "it has not waited for the step that it measured"
    fitted.remove()


add("fit, most recomputed", partial(fitted, 0.8), is_quick=True)
add("fit, most kept", partial(fitted, 0.95))


def saved_in_the_background() -> None:
    """Write copies of the weights while training goes on, twice; the second save takes the memory of the first."""
    write = saving._write_files

    def write_later(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return write(*args)

    def train(number: int) -> None:
        optimizer.zero_grad()
        smp_step(model, rows(number))
        optimizer.step()

    def read(folder: Path) -> list[Tensor]:
        found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        assert found
        return [each for tensors in found for each in tensors.values()]

    smp.init({"microbatches": 1})
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model: Any = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    with tempfile.TemporaryDirectory() as name, mock.patch.object(saving, "_write_files", write_later):
        train(0)
        for number in range(2):
            smp.save_checkpoint(name, f"now_{number}")
            pending = smp.save_checkpoint(name, f"later_{number}", blocking=False)
            train(number + 1)
        assert pending is not None
        pending.wait()
        for number in range(2):
            now, later = (read(Path(name, f"{tag}_{number}_partial")) for tag in ("now", "later"))
            assert_same(later, now, f"of save {number}")
        smp.save_checkpoint(name, "last", user_content={"step": 3}, blocking=False)
        assert smp.resume_from_checkpoint(name) == {"step": 3}, "it resumed from an older save"
    smp.shutdown()


add("saved in the background", saved_in_the_background, is_quick=True)
