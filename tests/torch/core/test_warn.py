"""A warning shows a line of the script, and comes from one rank."""

from __future__ import annotations

import linecache
import warnings
from pathlib import Path

import pytest
import torch

import smpkit.torch as smp
from smpkit.torch.core.warn import warn_user
from tests.torch.steps import on_ranks, train_step, wrap


@pytest.mark.usefixtures("world")
def test_a_warning_shows_the_line_of_the_script_once() -> None:
    model = wrap(torch.nn.Linear(4, 4), offload_activations=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            train_step(model, torch.ones(2, 4))  # the line to look at
    [warning] = caught
    assert str(warning.message).startswith("offload_activations has no effect")
    assert "the line to look at" in linecache.getline(warning.filename, warning.lineno)


@on_ranks(2)
def test_the_other_ranks_say_nothing() -> None:
    smp.init()
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: warn_user("look"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(torch.ones(1, 1))
    assert [Path(each.filename).name for each in caught] == ["test_warn.py"] * (smp.rank() == 0)
