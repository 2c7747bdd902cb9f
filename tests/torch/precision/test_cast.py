"""Half precision: what is cast and what is not, and an optimizer step that all ranks take or skip together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.precision.cast import cast_model
from tests.torch.steps import on_ranks, train_step, wrap

pytestmark = pytest.mark.usefixtures("world")

HALF = torch.float16


def begin(module: nn.Module, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Start smpkit with fp16, unless told otherwise, and return a wrapped model and its optimizer."""
    model = wrap(module, **({"fp16": True} if config is None else config))
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **options)


def model_parameter_of(model: smp.DistributedModel) -> torch.Tensor:
    return next(model.parameters())


# --- what is cast -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("sinks", "correction", "gate.weight")

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.sinks = nn.Parameter(torch.rand(3))
        self.wi = nn.Linear(4, 4)
        self.wo = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("inv_freq", torch.rand(3))
        self.register_buffer("full_attention_inv_freq", torch.rand(3))
        self.register_buffer("correction", torch.rand(3))
        self.register_buffer("bias", torch.rand(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        self.seen = [x.dtype, ids.dtype]
        hidden = self.norm(self.wo(self.wi(x).to(self.wo.weight.dtype)).to(self.wi.weight.dtype))
        return {"hidden": [hidden], "ids": ids, "text": "kept"}


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_model_is_cast_and_what_goes_in_and_comes_out(name: str, dtype: torch.dtype) -> None:
    smp.init({name: True})
    assert getattr(smp.state.cfg, name) is True
    module = Model()
    weights = dict(module.named_parameters())
    model = smp.DistributedModel(module)
    out = model(torch.rand(8, 4, dtype=torch.float64), ids=torch.arange(8))
    assert module.seen == [dtype, torch.int64]
    assert out["hidden"][0].dtype is torch.float32
    assert (out["ids"].dtype, out["text"]) == (torch.int64, "kept")
    assert {id(each) for each in model.parameters()} == {id(each) for each in weights.values()}
    kept = torch.float32 if name == "fp16" else dtype  # Transformers' rule for this list
    assert (module.wi.weight.dtype, module.wo.weight.dtype) == (dtype, kept)
    assert (module.sinks.dtype, module.gate.weight.dtype, module.gate.bias.dtype) == (torch.float32,) * 2 + (dtype,)
    norm: Any = module.norm
    assert (norm.weight.dtype, norm.running_var.dtype, norm.num_batches_tracked.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
    buffers = {key: value.dtype for key, value in module.named_buffers(recurse=False)}
    in_float32 = dict.fromkeys(["inv_freq", "full_attention_inv_freq", "correction"], torch.float32)
    assert buffers == {**in_float32, "bias": dtype, "count": torch.int64}


def test_delayed_weights_stay_without_memory_and_are_those_of_float32_rounded() -> None:
    with smp.delay_param_initialization():
        module = nn.Linear(64, 64)
    cast_model(module, HALF)
    assert module.weight.dtype is HALF
    assert module.weight.untyped_storage().nbytes() == 2
    with smp.delay_param_initialization():
        plain = nn.Linear(64, 64)
    torch.manual_seed(3)
    expected = model_parameter_of(wrap(plain)).detach().to(HALF)
    torch.manual_seed(3)
    assert model_parameter_of(wrap(module, fp16=True)).equal(expected)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_masters_take_the_place_of_weights_with_their_state_and_marks() -> None:
    smp.init({"fp16": True})
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[0].bias.requires_grad_(False)
    vars(module[2].weight)["no_decay"] = True
    model = smp.DistributedModel(module)
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)  # makes its state at once
    optimizer = smp.DistributedOptimizer(inner)
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [3]
    masters = optimizer.fp32_from_fp16_groups[0]
    assert [each.dtype for each in inner.param_groups[0]["params"]].count(HALF) == 1  # the frozen one
    assert vars(masters[1]) == {"no_decay": True}
    assert all(inner.state[master]["sum"].dtype is torch.float32 for master in masters)
    model.backward(model(torch.randn(4, 2)).square().sum())
    optimizer.step()
    weights = optimizer.fp16_groups[0]
    assert all(weight.equal(master.to(HALF)) for weight, master in zip(weights, masters, strict=True))
    assert [master.grad for master in masters] == [None] * 3
    assert weights[0].grad is not None
    optimizer.zero_grad(set_to_none=False)
    assert not weights[0].grad.any()
    optimizer.zero_grad()
    assert [weight.grad for weight in weights] == [None] * 3
    module[0].bias.requires_grad_(True)  # unfrozen later, and a group added later
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.init_master_params()
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [4, 0]


def test_what_would_be_scaled_wrongly_is_refused() -> None:
    model, optimizer = begin(nn.Linear(2, 1), static_loss_scale=128.0)
    with pytest.raises(UsageError, match="with fp16, where the loss has a scale"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(UsageError, match="was given a closure"):
        optimizer.step(lambda: 1.0)
    assert optimizer.clip_master_grads(0.5) == pytest.approx(math.sqrt(3))
    with pytest.raises(UsageError, match="after gradients were clipped and before"):
        model.backward(model(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_optimizer_takes_no_step_when_another_one_has_the_scale(precision: str) -> None:
    # Its gradients were divided by its own scale, clipped to a norm of 0, and its masters overwrote loaded weights.
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = wrap(module, **{precision: True})
    halves = [torch.optim.SGD(half.parameters(), lr=0.5) for half in module]
    first, last = [smp.DistributedOptimizer(each, static_loss_scale=128.0) for each in halves]
    model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(UsageError, match="this is not the optimizer that was wrapped last"):
        first.step()
    with pytest.raises(UsageError, match="SGD would update weights in half precision, which loses small updates"):
        halves[0].step()
    last.step()


def test_clipping_is_by_the_norm_without_the_scale() -> None:
    model, optimizer = begin(nn.Linear(2, 1), dynamic_loss_scale=True, init_scale=128.0)
    weight, bias = model.parameters()
    model.backward(model(torch.ones(1, 2)).sum())
    assert smp.clip_grad_norm_(bias, 1.0) == pytest.approx(1.0)  # one parameter of the model
    assert smp.clip_grad_norm_(optimizer.fp32_from_fp16_groups[0], 0.5) == pytest.approx(math.sqrt(3))
    assert smp.clip_grad_norm_(model, 1.0) == pytest.approx(0.5)
    assert weight.grad.tolist() == [[128.0, 128.0]]
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 2)).sum() * math.inf)
    with pytest.raises(UsageError, match="the norm of the gradients is"):
        smp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not math.isfinite(smp.clip_grad_norm_(model, 1.0))
    optimizer.step()
    assert optimizer.overflow


def test_a_model_that_diverged_is_named_once() -> None:
    model, optimizer = begin(nn.Linear(2, 1), dynamic_loss_scale=True, init_scale=2.0)
    masters: Any = optimizer.masters
    for scale in (1.0, 1.0, 1.0):
        optimizer.zero_grad()
        model.backward(model(torch.ones(1, 2)).sum() * math.nan)
        if not optimizer.loss_scaler.at_minimum or masters._warned:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="not finite at the smallest loss scale"):
                optimizer.step()
        assert (optimizer.overflow, optimizer.loss_scale) == (True, scale)


def test_sparse_gradients_reach_their_masters() -> None:
    model, optimizer = begin(nn.Embedding(4, 2, sparse=True), static_loss_scale=8.0)
    before = model_parameter_of(model).detach().clone()
    model.backward(model(torch.tensor([1, 1])).sum())
    assert optimizer.clip_master_grads(100.0) == pytest.approx(math.sqrt(8))
    optimizer.step()
    assert model_parameter_of(model).equal((before.float() - torch.tensor([0, 1, 0, 0])[:, None]).to(HALF))


def test_without_half_precision_gradients_can_be_clipped_all_the_same() -> None:
    model, optimizer = begin(nn.Linear(1, 1, bias=False), {})
    model(torch.full((1, 1), 3.0)).sum().backward()
    assert optimizer.clip_master_grads(1.0) == 3.0
    assert next(model.parameters()).grad == pytest.approx(1.0)
    assert not hasattr(optimizer, "overflow")
    assert not hasattr(optimizer, "loss_scale")


# --- all ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline_parallel_degree": 2},
        {"tensor_parallel_degree": 2, "ddp": True},
        {"ddp": True, "shard_optimizer_state": True},
    ],
    ids=["pipeline", "tensor", "sharded states"],
)
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_of_all(config: dict[str, Any], spoiled: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    config = {"fp16": True, "microbatches": 2, **config}
    model, optimizer = begin(module, config, dynamic_loss_scale=True, init_scale=16.0)
    train_step(model, torch.ones(4, 4))
    own = [each for each in model.local_parameters() if each.grad is not None]
    before = [each.detach().clone() for each in own]
    if smp.rank() == spoiled:  # after everything has been reduced
        own[0].grad.fill_(math.inf)
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 8.0)
    assert all(each.equal(old) for each, old in zip(own, before, strict=True))
    optimizer.zero_grad()
    train_step(model, torch.ones(4, 4))
    optimizer.step()
    assert not optimizer.overflow
    assert not all(each.equal(old) for each, old in zip(own, before, strict=True))
