"""A warning shows a line of the script, and comes from one rank."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import torch

import smpkit.torch as smp
from smpkit.torch.core.warn import warn_user
from tests.torch.steps import on_ranks

SCRIPT = """
import torch
import smpkit.torch as smp

smp.init({"offload_activations": True})
model = smp.DistributedModel(torch.nn.Linear(4, 4))

@smp.step
def train_step(x):
    model.backward(model(x).sum())

for _ in range(3):
    train_step(torch.ones(2, 4))  # the line to look at
"""


def test_a_warning_shows_the_line_of_the_script_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    said = done.stderr.splitlines()
    assert said[0].startswith(f"{script}:13: UserWarning: offload_activations has no effect")
    assert said[1:] == ["  train_step(torch.ones(2, 4))  # the line to look at"]


@on_ranks(2)
def test_the_other_ranks_say_nothing() -> None:
    smp.init()
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: warn_user("look"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(torch.ones(1, 1))
    assert [Path(each.filename).name for each in caught] == ["test_warn.py"] * (smp.rank() == 0)
