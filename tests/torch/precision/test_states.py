"""Master weights and the loss scale are saved and loaded, whole or on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from tests.models import CASES, singles
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Training, Way, batch, build

pytestmark = pytest.mark.usefixtures("world")
CASE = replace(CASES["Sequential"], batch=singles, dtype=torch.float32)
SCALING = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**12, "scale_window": 2}}


class Job(Training):
    """A training that can be saved and go on elsewhere."""

    def __init__(self, degree: int = 1) -> None:
        way = Way(pipeline=degree, microbatches=2, optimizer="AdamW", config={"fp16": True}, scaling=SCALING)
        smp.init(way.init)
        super().__init__(CASE, way)

    def train(self, steps: range) -> list[float]:
        return [self.step(*batch(CASE, number, 8)).reduce_mean().item() for number in steps]

    def end(self) -> tuple[float, dict[str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        pairs = zip(self.optimizer.fp16_groups[0], self.optimizer.fp32_from_fp16_groups[0], strict=True)
        masters = {names[id(weight)]: master.detach().clone() for weight, master in pairs}
        scale = self.optimizer.loss_scale
        smp.shutdown()
        return scale, masters


def go_on(folder: str, degree: int, resumes: bool) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Save after three steps or resume there, and take three more."""
    job = Job(degree)
    if resumes:
        smp.resume_from_checkpoint(folder)
    else:
        job.train(range(3))
        smp.save_checkpoint(folder, "three")
    losses = job.train(range(3, 6))
    return losses, *job.end()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_goes_on_with_the_same_masters_and_scale(tmp_path: Path, before: int, after: int) -> None:
    saved = run_ranks(go_on, before, str(tmp_path), before, False)
    ranks = run_ranks(go_on, after, str(tmp_path), after, True)
    names = {path.name for path in (tmp_path / "three_partial").iterdir()}
    assert {f"optimizer_{rank}_0_0.safetensors" for rank in range(before)} <= names
    assert [each[:2] for each in ranks] == [saved[0][:2]] * after
    masters, found = ({name: each for _, _, own in of for name, each in own.items()} for of in (saved, ranks))
    torch.testing.assert_close(found, masters, rtol=0, atol=0)


def resume_from_state_dicts(degree: int, *, is_frozen: bool) -> None:
    """Take six steps, and the last three again with what was saved before them."""
    job = Job(degree)
    job.train(range(3))
    weights = {name: value.clone() for name, value in job.model.state_dict().items()}
    kept = copy.deepcopy(job.optimizer.state_dict())
    losses = job.train(range(3, 6))
    end = job.end()
    again = Job(degree)
    again.model.get_module().requires_grad_(not is_frozen)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(kept)
    assert is_frozen or again.optimizer.state_dict()["state"].keys() == kept["state"].keys()
    again.model.get_module().requires_grad_(True)
    assert again.train(range(3, 6)) == losses
    torch.testing.assert_close(again.end(), end, rtol=0, atol=0)


@on_ranks(2)
def test_state_dicts_of_a_pipeline_load_before_its_first_step() -> None:
    """It is not partitioned yet: what is loaded waits, and is what `state_dict` returns meanwhile."""
    resume_from_state_dicts(2, is_frozen=False)


def test_states_of_layers_that_are_frozen_when_they_are_loaded_keep_their_precision() -> None:
    """Scripts freeze layers at the start, load, and unfreeze those that were trained when it was saved."""
    resume_from_state_dicts(1, is_frozen=True)


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
@on_ranks(2)
def test_a_setting_that_is_changed_before_the_first_step_stays(way: str, tmp_path: Path) -> None:
    """As scripts do that set the learning rate before each step, or go on with another one."""
    job = Job(2)
    job.train(range(1))
    smp.save_checkpoint(str(tmp_path), "one")
    kept = copy.deepcopy(job.optimizer.state_dict())
    job.end()
    again = Job(2)
    if way == "checkpoint":
        smp.resume_from_checkpoint(str(tmp_path))
    else:
        again.optimizer.load_state_dict(kept)
    assert again.optimizer.param_groups[0]["lr"] == kept["param_groups"][0]["lr"]
    again.optimizer.param_groups[0].update(lr=0.125, initial_lr=1.0)
    assert again.optimizer.state_dict()["param_groups"][0]["lr"] == 0.125
    again.train(range(1))
    assert again.optimizer.param_groups[0]["lr"] == 0.125
    assert again.optimizer.param_groups[0]["initial_lr"] == 1.0
    again.end()


# --- one process -----------------------------------------------------------------------------------------------------


def test_masters_follow_what_is_loaded_into_the_model_and_keep_what_rounds_to_it() -> None:
    job = Job()
    job.train(range(2))
    (weight, *_), (master, *_) = job.optimizer.fp16_groups[0], job.optimizer.fp32_from_fp16_groups[0]
    finer = master.detach().clone()
    assert not finer.equal(weight.float())
    job.model.load_state_dict({name: value.clone() for name, value in job.model.state_dict().items()})
    assert master.equal(finer)
    job.model.load_state_dict({name: value + 1 for name, value in job.model.state_dict().items()})
    assert master.equal(weight.float())
    with torch.no_grad():
        weight.zero_()
    job.optimizer.reload_model_params()
    assert not master.any()


def clamp_data(weight: Any) -> None:
    weight.data.clamp_(-0.1, 0.1)


def assign_data(weight: Any) -> None:
    weight.data = weight.detach().clamp(-0.1, 0.1)


@pytest.mark.parametrize("change", [lambda weight: weight.clamp_(-0.1, 0.1), clamp_data, assign_data])
def test_a_step_begins_with_the_weights_that_the_script_has_changed(change: Callable[[Any], object]) -> None:
    """As a WGAN's clipping and nGPT's normalisation do after each step; it was undone."""
    job = Job()
    job.train(range(1))
    (weight, *_), (master, *_) = job.optimizer.fp16_groups[0], job.optimizer.fp32_from_fp16_groups[0]
    finer = master.detach().clone()
    job.optimizer.param_groups[0]["lr"] = 0.0
    for number in range(1, 3):
        with torch.no_grad():
            change(weight)
        if number == 2:
            assert job.optimizer.state_dict()["state"][0]["master"].abs().max() <= 0.1
        job.train(range(number, number + 1))
        assert weight.abs().max() <= 0.1
        assert master.equal(torch.where(finer.abs() > 0.1, weight.float(), finer))
        assert not finer.equal(master)
    with torch.no_grad():
        change(weight)
        master.fill_(0.5)  # as decay by hand, of what is in the optimizer's groups: that counts
    job.train(range(3, 4))
    assert weight.eq(0.5).all()
    smp.shutdown()
    assert nn.Parameter.data is torch.Tensor.data


def test_the_state_of_an_optimizer_in_float32_loads() -> None:
    smp.init()
    module = build(CASE)
    plain = torch.optim.AdamW(module.parameters(), lr=0.5)
    module(batch(CASE, 0, 8)[0]).sum().backward()
    plain.step()
    smp.shutdown()
    job = Job()
    job.optimizer.load_state_dict(plain.state_dict())
    (master, *_) = job.optimizer.fp32_from_fp16_groups[0]
    assert job.optimizer.param_groups[0]["lr"] == 0.5
    assert job.optimizer.state[master]["exp_avg"].equal(plain.state[next(module.parameters())]["exp_avg"])
    job.train(range(1))
