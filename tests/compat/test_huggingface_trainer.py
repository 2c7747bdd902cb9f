"""Hugging Face's own `Trainer` trains a pipeline: one script, which does not know of SMP, alone and over ranks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import smpkit.torch as smp
from smpkit.torch.compat.trainer import SmpTrainer, adapt_accelerator
from tests.compat.commands import run_on_ranks, run_script
from tests.torch.steps import on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate, of the `dev` extra"
)

SCRIPT = "huggingface_trainer.py"
PIPELINE = {"partitions": 2, "ddp": True, "microbatches": 2}


def _train(
    folder: Path,
    *arguments: str,
    ranks: int = 1,
    parameters: Mapping[str, Any] = MappingProxyType({}),
    run: Callable[..., None] = run_on_ranks,
) -> dict[str, Any]:
    report = folder / f"report-{ranks}-{len(list(folder.glob('report*')))}.json"
    given = ("--output_dir", str(folder / f"out-{ranks}"), "--report", str(report), *arguments)
    run(SCRIPT, *given, ranks=ranks, parameters=parameters)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Losses, norms and metrics are equal; the logged training loss is summed up in float32 by `Trainer`."""
    names = {"loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_count"}
    for entry, against in zip(one["history"], other["history"], strict=True):
        for name in entry.keys() & names:
            assert against[name] == pytest.approx(entry[name], rel=3e-7 if name == "loss" else 1e-12), (name, entry)


def _same_weights(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    saved = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=1e-10, atol=1e-12)


def test_a_pipeline_with_replicas_trains_as_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms and evaluations over pipeline 2 × data 2 are those of one process with the whole batch."""
    alone = _train(tmp_path)
    over_ranks = _train(tmp_path, "--batch_size", "4", ranks=4, parameters=PIPELINE)
    assert (alone["wrapped"], over_ranks["wrapped"]) == ("BertForSequenceClassification", "DistributedModel")
    assert len(alone["history"]) == 9
    _same(alone, over_ranks)
    _same_weights(tmp_path / "out-1", tmp_path / "out-4")


@pytest.mark.slow
def test_a_pipeline_of_divided_modules_trains_and_saves_as_one_process(tmp_path: Path) -> None:
    alone = _train(tmp_path)
    divided = {**PIPELINE, "tensor_parallel_degree": 2, "prescaled_batch": True, "_match_weights": True}
    _same(alone, _train(tmp_path, "--tensor_parallel", "1", ranks=4, parameters=divided, run=run_script))
    _same_weights(tmp_path / "out-1", tmp_path / "out-4")


@pytest.mark.slow
def test_a_pipeline_resumes_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = _train(tmp_path, "--accumulate", "2", ranks=2, parameters=PIPELINE)
    resume = ("--resume", str(tmp_path / "out-2" / "checkpoint-3"))
    _same(whole, _train(tmp_path, "--accumulate", "2", *resume, ranks=2, parameters=PIPELINE))
    # One process with twice the batch: of this model, `Trainer` by itself adds up the losses of accumulated batches.
    _same(_train(tmp_path, "--batch_size", "16"), whole)


class _Original:
    """What a `transformers.Trainer` is to the mixin."""

    def __init__(self, model: nn.Module, _args: Any) -> None:
        self.model = model
        self.optimizer: Any = None


class _Own(SmpTrainer, _Original):
    """A public fork's, with `create_optimizer` in the form that Trainer itself had since 4.4."""

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = smp.DistributedOptimizer(self.optimizer)
        return self.optimizer


@on_ranks(1)
def test_a_subclass_that_wraps_its_optimizer_is_asked_for_it_once() -> None:
    smp.init()
    trainer: Any = _Own(nn.Linear(1, 1))
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, smp.DistributedOptimizer)
    assert trainer.create_optimizer() is optimizer


class _Computes(_Original):
    """Has a loss of its own, as for smoothed labels, and three batches left of an epoch."""

    create_optimizer = None
    args = SimpleNamespace(gradient_accumulation_steps=4, device="cpu")
    current_gradient_accumulation_steps = 3

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return 6 * model(inputs["x"]).sum()


class _Steps(SmpTrainer, _Computes):
    """Trainer as SMP has it."""


@on_ranks(1)
def test_a_batch_trains_by_the_trainers_loss_divided_by_the_batches_of_its_update() -> None:
    # Label smoothing, and `compute_loss` of a script, changed evaluations only.
    smp.init()
    model = smp.DistributedModel(nn.Linear(1, 1, bias=False))
    [weight] = model.parameters()
    nn.init.ones_(weight)  # of random ones a sixth is rounded otherwise by 6 and 3 than by 2
    trainer: Any = _Steps(model)
    loss = trainer.training_step(model, {"x": torch.ones(1, 1)})
    assert loss == 2
    assert weight.grad == 2


@on_ranks(1)
def test_trainer_says_which_weights_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    # A model resumed from the folder of another one, without its head say, trained on from random weights.
    smp.init()
    layers: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    layers[1].weight = layers[0].weight
    trainer: Any = _Steps(layers)
    trainer.model_wrapped, results = smp.DistributedModel(layers), list[Any]()
    trainer._issue_warnings_after_load = results.append
    save_file({"0.weight": torch.ones(2, 2), "head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    trainer._load_from_checkpoint(str(tmp_path))
    [(missing, unexpected)] = results
    assert (missing, unexpected) == (["2.weight", "2.bias"], ["head.weight"])
    assert layers[1].weight.equal(torch.ones(2, 2))


@on_ranks(1)
def test_trainer_sees_the_class_of_the_model() -> None:
    # Label smoothing goes by it, and compared each token with itself instead of the one before.
    smp.init()
    model = smp.DistributedModel(nn.Linear(1, 1))
    accelerator: Any = SimpleNamespace(unwrap_model=lambda module: module)
    adapt_accelerator(accelerator)
    assert accelerator.unwrap_model(model) is model.get_module()
