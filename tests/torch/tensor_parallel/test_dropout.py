"""Dropout between tensor-parallel ranks: alike where values are."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.dropout import ParallelDropout
from smpkit.torch.tensor_parallel.layouts import Layout
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, train_step

WIDTH, LENGTH, SAMPLES, MICROBATCHES = 16, 4, 2, 2


class Model(nn.Module):
    """A stack between layers that nothing divides, with dropouts of their own."""

    def __init__(self, p: float, recompute: str = "") -> None:
        super().__init__()
        sizes: Any = {"hidden_size": WIDTH, "num_attention_heads": 4, "attention_head_size": 4, "intermediate_size": 32}
        dropouts: Any = {"attention_dropout_prob": p, "hidden_dropout_prob": p}
        self.first, self.last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p)) for _ in range(2))
        self.stack = smp.nn.DistributedTransformer(num_layers=2, **sizes, **dropouts)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recompute == "torch":
            x = checkpoint(self._layers, x, use_reentrant=False)
        else:
            x = self._layers(x)
        return self.last(x)

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack((x, None))[0]


def plain_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    model.backward(loss)
    return loss


def wrapped(p: float, recompute: str = "", *, seed: int = 5, **config: Any) -> Any:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "microbatches": MICROBATCHES, **config})
    torch.manual_seed(1)
    module = Model(p, recompute)
    torch.manual_seed(seed)
    model = smp.DistributedModel(module)
    if recompute == "smp":
        for layer in module.stack.seq_layers:
            smp.set_activation_checkpointing(layer)
    return model


def batch(*, prescaled: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3 + (0 if prescaled else smp.tp_rank()))
    return torch.randn(SAMPLES * MICROBATCHES, LENGTH, WIDTH, generator=generator)


SETTINGS = [(True, "speed"), (False, "speed"), (True, "memory")]


def masks(in_step: bool, prescaled: bool, optimize: str, recompute: str) -> dict[str, Any]:
    """Return where each dropout has put zeros, call by call, and the gradients."""
    # Ranks may have been seeded in any way.
    model = wrapped(0.5, recompute, seed=5 + int(os.environ["RANK"]), prescaled_batch=prescaled, optimize=optimize)
    seen: dict[str, list[Any]] = {}
    kinds: dict[str, bool] = {}

    def note(name: str, module: nn.Module) -> None:
        def hook(_: Any, __: Any, output: torch.Tensor) -> None:
            seen.setdefault(name, []).append((output == 0).tolist())

        kinds[name] = module.boundary is Layout.REPLICATE if isinstance(module, ParallelDropout) else prescaled
        module.register_forward_hook(hook)

    for name, module in model.module.named_modules():
        if isinstance(module, ParallelDropout | nn.Dropout):
            note(name, module)
    x = batch(prescaled=prescaled).to(state.device)
    before = torch.get_rng_state()
    for _ in range(2):
        (train_step if in_step else plain_step)(model, x)
    gradients = {name: each.grad.tolist() for name, each in model.named_parameters()}
    unchanged = torch.equal(before, torch.get_rng_state())
    smp.shutdown()
    return {"masks": seen, "equal": kinds, "gradients": gradients, "unchanged": unchanged}


@pytest.mark.parametrize(("prescaled", "optimize"), SETTINGS)
@pytest.mark.parametrize("in_step", [True, False])
def test_equal_values_are_dropped_alike_and_parts_are_not_and_recomputation_repeats_it(
    in_step: bool, prescaled: bool, optimize: str
) -> None:
    first, second = run_ranks(masks, 2, in_step, prescaled, optimize, "")
    assert len(first["masks"]) == 2 + 2 * 2
    calls = 2 * (MICROBATCHES if in_step else 1)
    for name, ours in first["masks"].items():
        theirs = second["masks"][name]
        assert len(ours) == len(theirs) == calls
        for left, right in zip(ours, theirs, strict=True):
            assert (left == right) is first["equal"][name], name
        assert len({str(mask) for mask in ours}) == calls, name  # each microbatch and step has its own
    every = [str(mask) for each in first["masks"].values() for mask in each]
    assert len(set(every)) == len(every)
    assert first["unchanged"] is in_step  # outside of a step each forward takes one number
    for recompute in ("smp", "torch"):
        again = run_ranks(masks, 2, in_step, prescaled, optimize, recompute)
        for plain, recomputed in zip((first, second), again, strict=True):
            assert recomputed["gradients"] == plain["gradients"], recompute


def over_a_pipeline(degree: int, recompute: str) -> tuple[int, list[float]]:
    config: Any = {"pipeline_parallel_degree": degree, "skip_tracing": True}
    model = wrapped(0.5, recompute, prescaled_batch=False, **config)
    losses = [float(train_step(model, batch(prescaled=False)).reduce_mean()) for _ in range(3)]
    rank = smp.tp_rank()
    smp.shutdown()
    return rank, losses


@pytest.mark.parametrize("recompute", ["", "smp"])
def test_masks_are_the_same_over_a_pipeline(recompute: str) -> None:
    expected = dict(run_ranks(over_a_pipeline, 2, 1, ""))
    assert expected[0] != expected[1]
    for rank, losses in run_ranks(over_a_pipeline, 4, 2, recompute):
        assert losses == pytest.approx(expected[rank], rel=1e-5)


class DrawsOfItsOwn(Model):
    """Draws as many numbers between its layers as this rank's samples ask for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch.rand(1 + smp.tp_rank())
        return self.last(self._layers(x))


@on_ranks(2)
def test_ranks_may_draw_numbers_of_their_own_between_layers() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    torch.manual_seed(1)
    model = smp.DistributedModel(DrawsOfItsOwn(0.5))
    losses = [float(train_step(model, batch(prescaled=True)).reduce_mean()) for _ in range(2)]
    first, second = smp.allgather(losses, smp.WORLD)
    assert first == second


class LayerDrop(nn.Module):
    """As Wav2Vec2 does, leave out layers by a coin, and note which were not."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(layerdrop=0.5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.kept: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if torch.rand([]) > self.config.layerdrop:
                self.kept.append(index)
                x = x + layer(x)
        return x


@on_ranks(2)
def test_ranks_leave_out_the_same_layers_in_a_step_and_none_outside() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(1 + smp.rank())
    module = LayerDrop()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    with pytest.raises(UnsupportedError, match=r"LayerDrop has `layerdrop` 0\.5: outside of a step each"):
        model(batch(prescaled=False))
    train_step(model, batch(prescaled=False))
    first, second = smp.allgather(module.kept, smp.WORLD)
    assert 0 < len(first) < 8
    assert first == second
