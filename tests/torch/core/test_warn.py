"""A warning shows a line of the script, and comes from one rank."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import smpkit.torch as smp
from smpkit.testing import run_ranks
from smpkit.torch.core.warn import warn_user

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


def warned_through_torch() -> list[str]:
    smp.init()
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: warn_user("look"))
    if smp.rank() == 0:
        with pytest.warns(UserWarning, match="look") as caught:
            module(torch.ones(1, 1))
    else:
        module(torch.ones(1, 1))  # warnings are errors here
        return []
    return [Path(each.filename).name for each in caught]


def test_one_rank_warns() -> None:
    assert run_ranks(warned_through_torch, 2) == [["test_warn.py"], []]


def number_of_warnings() -> int:
    smp.init()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("look")
    smp.shutdown()
    return len(caught)


def test_the_other_ranks_say_nothing() -> None:
    assert run_ranks(number_of_warnings, 2) == [1, 0]
