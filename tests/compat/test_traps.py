"""The traps of a drop-in that show over several ranks, met under SMP v1's import; README.md says where each is."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from smpkit.drop_in import DROP_IN_PATH
from smpkit.errors import UsageError
from tests.ranks import run_ranks

FOLDER = Path(__file__).parent


def _smp() -> Any:
    sys.path.append(str(DROP_IN_PATH))
    return importlib.import_module("smdistributed.modelparallel.torch")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Doubled(Block):
    """Calls the forward it overrides in the way that SMP v1's guide asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super()._orig_forward(x)  # type: ignore[misc]


class Output(dict[str, Any]):
    """Indexed as a dict and read as an object: what Hugging Face's models return."""

    @property
    def loss(self) -> Any:
        return self["loss"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Doubled(), Block(), Block())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: float | None = None) -> Output:
        assert scale is None
        logits = self.head(self.layers(x))
        return Output(loss=functional.cross_entropy(logits, labels), logits=logits)


def _trained_alone(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in _batches(steps):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _batches(steps: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 4, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, 3, (8,), generator=generator),
            "scale": None,
        }
        for _ in range(steps)
    ]


class _Plain:
    """An optimizer that is no `torch.optim.Optimizer`, as scripts wrapped before SMP v1.10."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


def _a_pipeline_with_replicas() -> list[float]:
    smp = _smp()
    smp.init()  # as Hugging Face does when it is imported
    smp.init({"partitions": 2, "ddp": True, "microbatches": 2})
    assert smp.rank() in smp.get_pp_group()
    assert smp.get_tp_group() == [smp.rank()]
    assert smp.mp_size() * smp.rdp_size() == smp.size() == smp.pp_size() * smp.dp_size()

    class Trainer:
        @smp.step()  # type: ignore[untyped-decorator]
        def train_step(model: Any, inputs: dict[str, Any]) -> Any:  # noqa: N805
            output = model(**inputs)
            loss = output["loss"]
            loss /= 1
            model.backward(loss)
            return output, loss.item(), None

        def step(self, model: Any, inputs: dict[str, Any]) -> Any:
            return self.train_step(model, inputs)

    torch.manual_seed(0)
    module = Model().double()
    inner = torch.optim.SGD(module.parameters(), lr=0.5)
    optimizer = smp.DistributedOptimizer(_Plain(inner) if smp.pp_rank() else inner)
    model = smp.DistributedModel(module)
    assert model.get_module() is module is model.module
    last: Any = model.module.module
    assert last.layers is module.layers
    assert model.train() is model
    called: list[str] = []
    model.register_post_partition_hook(lambda m, o: called.append(f"partitioned {m is model} {o is optimizer}"))
    model.register_post_step_hook(lambda m, o: called.append(f"stepped {m is model} {o is optimizer}"))
    losses = []
    for batch in _batches(3):
        share = slice(4 * smp.dp_rank(), 4 * smp.dp_rank() + 4)
        mine = {"x": batch["x"][share], "labels": batch["labels"][share], "scale": None}
        optimizer.zero_grad(set_to_none=True)
        output, numbers, nothing = Trainer().step(model, mine)
        assert isinstance(output, Output)
        assert isinstance(output["loss"], smp.step.StepOutput)
        assert output["logits"].concat().shape == (4, 3)
        assert output["loss"].reduce_mean().item() == pytest.approx(sum(numbers) / 2)
        assert nothing == [None, None]
        optimizer.step()
        losses.append(torch.stack(smp.allgather(output.loss.reduce_mean(), smp.DP_GROUP)).mean().item())
    assert called == ["partitioned True True", "stepped True True"]
    with pytest.raises(UsageError, match="outside a step"):
        model(**mine)
    assert model.local_state_dict()["_smp_is_partial"] is True
    whole = {**model.state_dict(), "_smp_is_partial": False}
    model.load_state_dict(whole)
    assert whole["_smp_is_partial"] is False
    if smp.rank() == 0:
        smp.broadcast({"news": 1}, smp.WORLD)
    else:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == {"news": 1}
    smp.shutdown()
    return losses


def test_a_script_over_a_pipeline_with_replicas_falls_into_none() -> None:
    """Traps 4 to 11 and 13 to 16 on pipeline 2 × data 2; `super()._orig_forward()` besides."""
    with mock.patch.object(Block, "_orig_forward", Block.forward, create=True):
        expected = _trained_alone(3)
    for losses in run_ranks(_a_pipeline_with_replicas, 4, env={"SMPKIT_CUDA_ON_CPU": "0"}):
        assert losses == pytest.approx(expected, rel=1e-12)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_of_traps_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", (FOLDER / "README.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 23))
    for number, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, f"trap {number} names no test"
        for file, name in named:
            path = FOLDER.parent / file
            found = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            assert name in found, f"trap {number}: {file} has no {name}"
