"""The plan of the model that runs is in the run's folder as soon as it can be known, whatever degrees the job has."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.observe.runs import RUN_DIR
from smpkit.plan.decide import decide
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.speed import Speed
from smpkit.torch.core.runtime import state
from smpkit.torch.describe import describe
from smpkit.torch.run_plan import peak, planned
from tests.ranks import run_ranks
from tests.torch.steps import evaluate

WIDTH, ROWS, MICROBATCHES = 16, 8, 2
WEIGHTS = 4 * 2 * (WIDTH * WIDTH + WIDTH)
SPEED = Speed(1e12, LinkSpeed(1e9, 1e9))


class Counted(nn.Sequential):
    """Counts its calls where a trace must not leave its own, and draws random numbers."""

    def __init__(self) -> None:
        with smp.tensor_parallelism(state.initialized):
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        self.calls: list[str] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls.append("call")
        return super().forward(value)


step_calls: list[str] = []


@smp.step
def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    step_calls.append("call")
    loss = model(batch).square().mean()
    model.backward(loss)
    return loss


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def train(folder: Path | None, config: dict[str, Any], *, evaluates: bool = False) -> tuple[list[float], int, int]:
    """Train for two steps; return the losses, and how often step function and model were called."""
    step_calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(RUN_DIR, raising=False)
        if folder is not None:
            patch.setenv(RUN_DIR, str(folder))
        smp.init({"microbatches": MICROBATCHES, **config})
        torch.manual_seed(1)
        model = smp.DistributedModel(inner := Counted())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        batch = torch.randn(ROWS, WIDTH)
        if evaluates:
            with torch.no_grad():
                evaluate(model, batch)
            if folder is not None and smp.rank() == 0:
                assert plan_of(folder)["stages"][0]["parameters_bytes"] > 0
        losses = []
        for _ in range(2):
            losses.append(train_step(model, batch).reduce_mean().item())
            optimizer.step()
        smp.shutdown()
    return losses, len(step_calls), len(inner.calls)


@pytest.mark.usefixtures("world")
def test_the_folder_of_a_run_may_be_named_in_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smp.init({})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_DIR, "run")
    assert peak() is None
    smp.shutdown()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("evaluates", [False, True])
def test_without_a_pipeline_the_plan_knows_sizes_and_training_is_as_without(evaluates: bool, tmp_path: Path) -> None:
    assert train(tmp_path, {}, evaluates=evaluates) == train(None, {}, evaluates=evaluates)
    cfg = ModelParallelConfig(microbatches=MICROBATCHES)
    facts = describe(lambda: (Counted(), torch.ones(ROWS // MICROBATCHES, WIDTH)), cfg=cfg)
    [expected] = decide(cfg, 1, facts, SPEED, "adamw").memory
    found = plan_of(tmp_path)
    [stage] = found["stages"]
    assert (found["model"], found["optimizer"]) == ("Counted", "adamw")
    assert not found["traced"]
    assert stage["activations_bytes"] is None
    assert stage["total_bytes"] == expected.total_bytes - (expected.activations_bytes or 0)
    assert stage["optimizer_bytes"] == 2 * WEIGHTS


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("make", "num_states"),
    [
        (smp.optimizers.FusedAdam, 2),
        (partial(torch.optim.SGD, momentum=0.9), 1),
        (smp.optimizers.FusedLAMB, None),
        (partial(torch.optim.RMSprop, momentum=0.9), None),
        (partial(torch.optim.AdamW, amsgrad=True), None),
    ],
    ids=["FusedAdam", "momentum", "FusedLAMB", "RMSprop with momentum", "amsgrad"],
)
def test_no_memory_is_planned_for_an_optimizer_whose_states_nobody_knows(
    make: Any, num_states: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    smp.init({})
    model = smp.DistributedModel(Counted())
    smp.DistributedOptimizer(make(model.parameters(), lr=0.1))
    train_step(model, torch.ones(ROWS, WIDTH))
    kept = planned()
    assert (None if kept is None else kept.states) == (None if num_states is None else num_states * WEIGHTS)
    assert (tmp_path / "plan.json").exists() == (num_states is not None)
    smp.shutdown()


@pytest.mark.parametrize(
    ("config", "stages", "weights"),
    [
        ({"ddp": True}, 1, WEIGHTS),
        ({"ddp": True, "tensor_parallel_degree": 2}, 1, WEIGHTS // 2),
        ({"pipeline_parallel_degree": 2}, 2, WEIGHTS // 2),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_two_ranks_write_one_plan_also_where_the_first_step_evaluates(
    config: dict[str, Any], stages: int, weights: int, tmp_path: Path
) -> None:
    run_ranks(partial(train, evaluates=True), 2, tmp_path, config)
    found = plan_of(tmp_path)
    assert len(found["stages"]) == stages
    for stage in found["stages"]:
        assert stage["parameters_bytes"] == pytest.approx(weights, abs=4 * WIDTH)  # a bias may be whole on both
        assert (stage["activations_bytes"] or 0) > 0 or stages == 1
    assert [path.name for path in tmp_path.glob(".plan*")] == []


def test_a_pipeline_that_resumes_its_partition_has_its_stages(tmp_path: Path) -> None:
    checkpoints, first, second = (tmp_path / name for name in ("checkpoints", "first", "second"))
    for folder in (checkpoints, first, second):
        folder.mkdir()
    run_ranks(_resume_and_train, 2, first, checkpoints, False)
    run_ranks(_resume_and_train, 2, second, checkpoints, True)
    # By memory, the table alone would be a stage: the partition is that of the checkpoint.
    for folder in (first, second):
        assert [stage["units"] for stage in plan_of(folder)["stages"]] == [["0", "1", "2"], ["3", "4"]]
    # Nothing is planned anew, so the model is not traced, which would make the first step slow.
    assert [plan_of(folder)["traced"] for folder in (first, second)] == [True, False]


def test_a_model_with_a_layer_that_the_checkpoint_has_not_is_partitioned_anew(tmp_path: Path) -> None:
    checkpoints, first, second = (tmp_path / name for name in ("checkpoints", "first", "second"))
    for folder in (checkpoints, first, second):
        folder.mkdir()
    run_ranks(_resume_and_train, 2, first, checkpoints, False)
    # With the partition of the checkpoint the last layer was on no rank, and all ranks held it.
    placed = {"0": 0, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}
    assert run_ranks(_resume_and_train, 2, second, checkpoints, True, 5) == [placed, placed]
    assert [stage["units"] for stage in plan_of(second)["stages"]] == [["0"], ["1", "2", "3", "4", "5"]]


def _resume_and_train(folder: Path, checkpoints: Path, resumes: bool, num_layers: int = 4) -> dict[str, int]:
    """Return on which pipeline rank each layer is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIR, str(folder))
        smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "memory_weight": float(resumes)})
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)]
        model = smp.DistributedModel(nn.Sequential(nn.Embedding(999, WIDTH), *layers))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        if resumes:
            smp.resume_from_checkpoint(checkpoints, partial=True, strict=False, load_optimizer=num_layers == 4)
        train_step(model, torch.zeros(ROWS, WIDTH, dtype=torch.int64))
        optimizer.step()
        if not resumes:
            smp.save_checkpoint(checkpoints, tag="step_1", partial=True)
        assert model.pipeline is not None
        assert model.pipeline.assignment is not None
        placed = model.pipeline.assignment.partition_of
        smp.shutdown()
        return placed
