"""The optimizers of `smp.optimizers` do what their papers and Apex's names for the options say, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.shards import TpShard, mark, take_shard
from tests.torch.steps import on_ranks

TOLERANCE = 1e-12  # float64; the order of a few products differs
SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
STEPS = 5


def tensors() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int, shard: TpShard | None = None) -> list[torch.Tensor]:
    """Return those of `tensors`, or of a part of the first one and the others."""
    generator = torch.Generator().manual_seed(50 + step)
    first, *others = [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [first if shard is None else take_shard(first, shard), *others]


def train(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    steps: Iterable[int] = range(STEPS),
    shard: TpShard | None = None,
) -> list[torch.Tensor]:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, shard), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


assert_close = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


# --- the plain algorithms ---------------------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}


def lamb_by_hand(
    decay: float,
    *,
    adam_w_mode: bool,
    bias_correction: bool,
    grad_averaging: bool,
    max_grad_norm: float,
    use_nvlamb: bool,
) -> list[torch.Tensor]:
    lr, betas, eps = OPTIONS.values()
    weights = [parameter.detach() for parameter in tensors()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step in range(1, STEPS + 1):
        given = gradients(step - 1)
        norm = math.sqrt(sum(float(g.square().sum()) for g in given))
        divisor = max(1.0, norm / max_grad_norm)
        for i, weight in enumerate(weights):
            gradient = given[i] / divisor + (0.0 if adam_w_mode else decay) * weight
            first[i] = betas[0] * first[i] + ((1 - betas[0]) if grad_averaging else 1.0) * gradient
            second[i] = betas[1] * second[i] + (1 - betas[1]) * gradient**2
            m = first[i] / (1 - betas[0] ** step) if bias_correction else first[i]
            v = second[i] / (1 - betas[1] ** step) if bias_correction else second[i]
            update = m / (v.sqrt() + eps) + (decay if adam_w_mode else 0.0) * weight
            w, u = float(weight.norm()), float(update.norm())
            trusts = (use_nvlamb or decay) and w > 0 and u > 0
            weights[i] = weight - lr * (w / u if trusts else 1.0) * update
    return weights


def novograd_by_hand(
    *,
    bias_correction: bool,
    reg_inside_moment: bool,
    grad_averaging: bool,
    norm_type: int,
    init_zero: bool,
    weight_decay: float,
) -> list[torch.Tensor]:
    lr, betas, eps = OPTIONS.values()
    weights = [parameter.detach() for parameter in tensors()]
    momenta: list[Any] = [torch.zeros_like(w) for w in weights]
    averages: list[float | None] = [None for _ in weights]
    for step in range(1, STEPS + 1):
        for i, (weight, gradient) in enumerate(zip(weights, gradients(step - 1), strict=True)):
            norm = float(gradient.norm() if norm_type == 2 else gradient.abs().max())
            old = averages[i]
            if old is None:
                old = 0.0 if init_zero else norm
            if norm_type == 2:
                new = math.sqrt(betas[1] * old**2 + (1 - betas[1]) * norm**2)
            else:
                new = betas[1] * old + (1 - betas[1]) * norm
            averages[i] = new
            divisor = new / (math.sqrt(1 - betas[1] ** step) if bias_correction else 1.0) + eps
            share = (1 - betas[0]) if grad_averaging else 1.0
            correction = (1 - betas[0] ** step) if bias_correction else 1.0
            if reg_inside_moment:
                momenta[i] = betas[0] * momenta[i] + share * (gradient / divisor + weight_decay * weight)
                weights[i] = weight - lr * momenta[i] / correction
            else:
                momenta[i] = betas[0] * momenta[i] + share * gradient
                weights[i] = weight - lr * (momenta[i] / correction / divisor + weight_decay * weight)
    return weights


def choices(*names: str) -> Iterator[dict[str, Any]]:
    """Return all ways to set some options."""
    for values in itertools.product([True, False], repeat=len(names)):
        yield dict(zip(names, values, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("rule", "adam_w_mode"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)])
def test_adam(rule: Any, adam_w_mode: bool, decay: float) -> None:
    ours, plain = tensors(), tensors()
    optimizer = smp.optimizers.FusedAdam(ours, weight_decay=decay, adam_w_mode=adam_w_mode, **OPTIONS)
    assert_close(train(optimizer, ours), train(rule(plain, weight_decay=decay, **OPTIONS), plain))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb(decay: float) -> None:
    for chosen in choices("adam_w_mode", "bias_correction", "grad_averaging", "use_nvlamb"):
        parameters, options = tensors(), {**chosen, "max_grad_norm": 2.0}
        optimizer = smp.optimizers.FusedLAMB(parameters, weight_decay=decay, **OPTIONS, **options)
        assert_close(train(optimizer, parameters), lamb_by_hand(decay, **options))
    assert smp.optimizers.FusedLamb is smp.optimizers.FusedLAMB


@pytest.mark.parametrize("norm_type", [2, 0])
def test_novograd(norm_type: int) -> None:
    for chosen in choices("reg_inside_moment", "bias_correction", "grad_averaging", "init_zero"):
        parameters, options = tensors(), {**chosen, "norm_type": norm_type, "weight_decay": 0.1}
        optimizer = smp.optimizers.FusedNovoGrad(parameters, **OPTIONS, **options)
        assert_close(train(optimizer, parameters), novograd_by_hand(**options))


KINDS: list[Any] = [smp.optimizers.FusedAdam, smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad]


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_on_where_it_was_saved(kind: Any) -> None:
    straight, early, late = tensors(), tensors(), tensors()
    first, second = kind(early, lr=0.1), kind(late, lr=0.5)
    train(first, early, range(2))
    second.load_state_dict(first.state_dict())
    for new, old in zip(late, early, strict=True):
        new.data.copy_(old.data)
    assert_close(train(second, late, range(2, STEPS)), train(kind(straight, lr=0.1), straight))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradient_wait_and_count_their_own_steps(kind: Any) -> None:
    parameters, alone = tensors(), tensors()[:1]
    optimizer, other = kind(parameters, lr=0.1), kind(alone, lr=0.1)
    before = parameters[1].detach().clone()
    for step in range(2):
        parameters[0].grad = alone[0].grad = gradients(step)[0]
        optimizer.step()
        other.step()
    assert parameters[0].equal(alone[0])
    assert parameters[1].equal(before)
    assert len(optimizer.state) == 1
    parameters[1].grad = gradients(2)[1]
    assert optimizer.step(lambda: 2.5) == 2.5
    assert float(optimizer.state[parameters[0]]["step"]) == 3
    assert float(optimizer.state[parameters[1]]["step"]) == 1
    optimizer.zero_grad()
    assert [each.grad for each in parameters] == [None] * len(SHAPES)
    kept = kind(tensors(), set_grad_none=False)
    kept.param_groups[0]["params"][0].grad = gradients(0)[0]
    kept.zero_grad()
    assert not kept.param_groups[0]["params"][0].grad.any()


def test_rejects_wrong_options() -> None:
    with pytest.raises(UnsupportedError, match="FusedAdam has no amsgrad"):
        smp.optimizers.FusedAdam(tensors(), amsgrad=True)
    with pytest.raises(UsageError, match="`lr` of FusedLAMB must be at least 0, got -1"):
        smp.optimizers.FusedLAMB(tensors(), lr=-1)
    with pytest.raises(UsageError, match="`betas` of FusedAdam"):
        smp.optimizers.FusedAdam(tensors(), betas=(0.9, 1.0))
    with pytest.raises(UsageError, match="norm_type of FusedNovoGrad must be 2 or 0"):
        smp.optimizers.FusedNovoGrad(tensors(), norm_type=3)
    sparse = nn.Embedding(3, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse gradients"):
        smp.optimizers.FusedLAMB(sparse.parameters()).step()
    with pytest.raises(UnsupportedError, match="always corrects the moments"):
        smp.optimizers.FusedAdam(tensors(), bias_correction=False)


@on_ranks(2)
def test_norms_of_divided_tensors_are_those_of_the_whole() -> None:
    """The first tensor is divided over two tensor-parallel ranks."""
    plain = [train(kind(parameters := tensors(), lr=0.1), parameters) for kind in KINDS]
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    shard = TpShard((4, 3), 0, (), smp.tp_rank(), 2, CommGroup.RDP_GROUP, 1.0)
    for kind, (first, *others) in zip(KINDS, plain, strict=True):
        parameters = tensors()
        parameters[0] = nn.Parameter(take_shard(parameters[0].detach(), shard))
        mark(parameters[0], shard)
        found = train(kind(parameters, lr=0.1), parameters, shard=shard)
        assert_close(found, [take_shard(first, shard), *others])
