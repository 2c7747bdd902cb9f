"""Half precision and sharded data parallelism: a resumed job has the weights of one that did not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.torch.tensor_parallel.state_dict import join_state
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
HALF_MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "bf16 states": {"bf16": True, "shard_optimizer_state": True},
    "bf16 tensor": {"bf16": True, "tensor_parallel_degree": 2},
    "bf16 sharded": {"bf16": True, **MODES["sharded"]},
    "fp16": {"fp16": True},
    "fp16 sharded": {"fp16": True, **MODES["sharded"]},
}


def begin(mode: str, seed: int) -> tuple[Any, Any]:
    smp.init({"ddp": True, "microbatches": 2, **(MODES | HALF_MODES)[mode]})
    torch.manual_seed(seed)
    with smp.tensor_parallelism():  # divides the one of an even number of features
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1))
    model = smp.DistributedModel(module)
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
    halves = [f"{kind}_0_0_{part}" for kind in ("fp16_states", "optimizer") for part in range(2)]
    assert {f"{each}.safetensors" for each in (*halves, "model_0_0")} <= names
    names = {each.name for each in (tmp_path / "sharded_partial").iterdir()}
    assert {"model_0_0_0.safetensors", "model_0_0_1.safetensors"} <= names


def finest(model: Any, optimizer: Any) -> tuple[Weights, float | None]:
    """Return the whole weights as finely as they are kept, and the loss scale."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if optimizer.masters is not None:
        states = optimizer.state_dict()["state"]
        masters = {number: each["master"] for number, each in states.items() if "master" in each}
        names = [name for name, _ in model.module.named_parameters()]
        weights |= join_state(model.module, {names[number]: master.clone() for number, master in masters.items()})
    scale = None if optimizer.masters is None else float(optimizer.masters.scaler.loss_scale)
    return weights, scale


def carry(path: str, pairs: list[tuple[str, str]]) -> None:
    kept = {}
    for mode in HALF_MODES:
        model, optimizer = begin(mode, seed=0)
        train(model, optimizer, 0)
        smp.save_checkpoint(path, mode)
        kept[mode] = finest(model, optimizer)
        smp.shutdown()
    for saved, now in pairs:
        model, optimizer = begin(now, seed=1)
        smp.resume_from_checkpoint(path, saved)
        weights, scale = finest(model, optimizer)
        for name, value in kept[saved][0].items():
            assert weights[name].dtype == torch.float32, f"{saved} -> {now}: {name}"
            assert torch.equal(weights[name], value), f"{saved} -> {now}: {name}"
        if saved[:4] == now[:4]:
            assert scale == kept[saved][1]
        states = optimizer.optimizer.state_dict()["state"].values()
        assert all(each.keys() == {"step", "exp_avg", "exp_avg_sq"} for each in states), "and no master among them"
        smp.shutdown()


CARRIED = [
    ("bf16", "bf16 sharded"),
    ("bf16 states", "bf16 sharded"),
    ("bf16 tensor", "bf16 sharded"),
    ("bf16", "float32"),
    ("bf16 sharded", "bf16"),
    ("bf16 sharded", "bf16 states"),
    ("bf16 sharded", "bf16 tensor"),
    ("bf16 sharded", "fp16"),
    ("float32", "bf16 tensor"),
    ("fp16", "fp16 sharded"),
    ("fp16 sharded", "fp16"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_float32_weights_are_carried_wherever_a_mode_keeps_them(tmp_path: Path) -> None:
    run_ranks(carry, 2, str(tmp_path), CARRIED, timeout=150)
