"""Half precision and sharded data parallelism: a resumed job has the weights of one that did not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from tests.ranks import run_ranks

Weights = dict[str, torch.Tensor]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pipeline": {"pipeline_parallel_degree": 2},
    "bf16": {"bf16": True},
    "bf16 pipeline": {"bf16": True, "pipeline_parallel_degree": 2},
    "fp16": {"fp16": True},
    "fp16 sharded states": {"fp16": True, "shard_optimizer_state": True},
    "sharded": {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
}


def begin(mode: str, seed: int) -> tuple[Any, Any]:
    smp.init({"ddp": True, "microbatches": 2, **MODES[mode]})
    torch.manual_seed(seed)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, smp.DistributedOptimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def train(model: Any, optimizer: Any, first: int) -> None:
    for step in range(first, first + 2):
        optimizer.zero_grad()
        train_step(model, torch.linspace(-1, 1 + step, 12).view(4, 3))
        optimizer.step()


def save_and_go_on(path: str, modes: list[str]) -> list[Weights]:
    ended = []
    for mode in modes:
        model, optimizer = begin(mode, seed=0)
        train(model, optimizer, 0)
        smp.save_checkpoint(path, mode)
        train(model, optimizer, 2)
        ended.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        smp.shutdown()
    return ended


def resume_and_go_on(path: str, pairs: list[tuple[str, str]]) -> list[Weights]:
    ended = []
    for saved, now in pairs:
        model, optimizer = begin(now, seed=1)
        smp.resume_from_checkpoint(path, saved)
        train(model, optimizer, 2)
        ended.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        smp.shutdown()
    return ended


PAIRS = [
    ("sharded", "sharded"),
    ("sharded", "plain"),
    ("plain", "sharded"),
    ("sharded", "pipeline"),
    ("bf16", "bf16 pipeline"),
    ("bf16 pipeline", "bf16"),
    ("fp16", "fp16"),
    ("fp16", "fp16 sharded states"),
    ("fp16 sharded states", "fp16"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_training_goes_on_in_the_same_or_another_mode(tmp_path: Path) -> None:
    path, modes = str(tmp_path), list(MODES)
    kept = dict(zip(modes, run_ranks(save_and_go_on, 2, path, modes, timeout=150)[0], strict=True))
    for ended in run_ranks(resume_and_go_on, 2, path, PAIRS, timeout=150):
        for (saved, now), weights in zip(PAIRS, ended, strict=True):
            expected = kept[saved]
            for name, value in weights.items():
                # The pipeline's microbatches and one rank's round their sums in another order.
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=f"{saved} -> {now}: {name}")
    names = {each.name for each in (tmp_path / "fp16 sharded states_partial").iterdir()}
    assert {"fp16_states_0_0_0.pt", "fp16_states_0_0_1.pt", "optimizer_0_0_1.pt", "model_0_0.pt"} <= names
    assert {"model_0_0_0.pt", "model_0_0_1.pt"} <= {each.name for each in (tmp_path / "sharded_partial").iterdir()}
