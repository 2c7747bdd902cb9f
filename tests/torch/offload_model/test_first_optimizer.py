"""The first optimizer of a process, which is when torch imports its compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys, weakref, torch
from torch import nn
from smpkit import OffloadModel, OffloadOptimizer
gc.collect()
gc.disable()

def train():
    model = OffloadModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "cpu")
    assert "torch._dynamo" not in sys.modules
    optimizer = OffloadOptimizer(model)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return [weakref.ref(each) for each in (model, optimizer, optimizer._states[0].entries[0].master)]

assert [each() for each in train()] == [None] * 3
"""


def test_its_memory_goes_with_it_and_not_when_python_looks_for_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
