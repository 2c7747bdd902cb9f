"""The optimizers of `smp.optimizers` do what their papers and Apex's names for the options say, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.shards import TpShard, mark, take_shard
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64; the order of a few products differs
SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
STEPS = 5


def tensors() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int, scale: float = 3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# --- the plain algorithms ---------------------------------------------------------------------------------------------


def adam_by_hand(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    *,
    decoupled: bool,
    correct: bool,
    averaging: bool = True,
    max_norm: float = 0.0,
    lamb: bool = False,
    nvlamb: bool = False,
) -> list[torch.Tensor]:
    weights = [parameter.detach() for parameter in tensors()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step in range(1, STEPS + 1):
        given = gradients(step - 1)
        norm = math.sqrt(sum(float(g.square().sum()) for g in given))
        divisor = max(1.0, norm / max_norm) if max_norm else 1.0
        for i, weight in enumerate(weights):
            gradient = given[i] / divisor + (0.0 if decoupled else decay) * weight
            first[i] = betas[0] * first[i] + ((1 - betas[0]) if averaging else 1.0) * gradient
            second[i] = betas[1] * second[i] + (1 - betas[1]) * gradient**2
            m = first[i] / (1 - betas[0] ** step) if correct else first[i]
            v = second[i] / (1 - betas[1] ** step) if correct else second[i]
            update = m / (v.sqrt() + eps) + (decay if decoupled else 0.0) * weight
            ratio = 1.0
            if lamb and (nvlamb or decay):
                w, u = float(weight.norm()), float(update.norm())
                ratio = w / u if w > 0 and u > 0 else 1.0
            weights[i] = weight - lr * ratio * update
    return weights


def novograd_by_hand(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    *,
    inside: bool,
    correct: bool,
    averaging: bool,
    norm_type: int,
    init_zero: bool,
) -> list[torch.Tensor]:
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
            divisor = new / (math.sqrt(1 - betas[1] ** step) if correct else 1.0) + eps
            share = (1 - betas[0]) if averaging else 1.0
            correction = (1 - betas[0] ** step) if correct else 1.0
            if inside:
                momenta[i] = betas[0] * momenta[i] + share * (gradient / divisor + decay * weight)
                weights[i] = weight - lr * momenta[i] / correction
            else:
                momenta[i] = betas[0] * momenta[i] + share * gradient
                weights[i] = weight - lr * (momenta[i] / correction / divisor + decay * weight)
    return weights


def assert_close(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def both() -> Iterator[tuple[bool, bool]]:
    return itertools.product([True, False], [True, False])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam(decay: float) -> None:
    for decoupled in (True, False):
        parameters = tensors()
        optimizer = smp.optimizers.FusedAdam(
            parameters, 0.1, True, (0.8, 0.9), 1e-3, adam_w_mode=decoupled, weight_decay=decay
        )
        plain = adam_by_hand(0.1, (0.8, 0.9), 1e-3, decay, decoupled=decoupled, correct=True)
        assert_close(train(optimizer, parameters), plain)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb(decay: float) -> None:
    for (decoupled, correct), (averaging, nvlamb) in itertools.product(both(), both()):
        parameters = tensors()
        optimizer = smp.optimizers.FusedLAMB(
            parameters,
            0.1,
            correct,
            (0.8, 0.9),
            1e-3,
            decay,
            adam_w_mode=decoupled,
            grad_averaging=averaging,
            max_grad_norm=2.0,
            use_nvlamb=nvlamb,
        )
        plain = adam_by_hand(
            0.1,
            (0.8, 0.9),
            1e-3,
            decay,
            decoupled=decoupled,
            correct=correct,
            averaging=averaging,
            max_norm=2.0,
            lamb=True,
            nvlamb=nvlamb,
        )
        assert_close(train(optimizer, parameters), plain)
    assert smp.optimizers.FusedLamb is smp.optimizers.FusedLAMB


@pytest.mark.parametrize("norm_type", [2, 0])
def test_novograd(norm_type: int) -> None:
    for (inside, correct), (averaging, init_zero) in itertools.product(both(), both()):
        parameters = tensors()
        optimizer = smp.optimizers.FusedNovoGrad(
            parameters,
            0.1,
            correct,
            (0.8, 0.9),
            1e-3,
            0.1,
            reg_inside_moment=inside,
            grad_averaging=averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )
        plain = novograd_by_hand(
            0.1,
            (0.8, 0.9),
            1e-3,
            0.1,
            inside=inside,
            correct=correct,
            averaging=averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )
        assert_close(train(optimizer, parameters), plain)


KINDS: list[Any] = [smp.optimizers.FusedAdam, smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad]


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_on_where_it_was_saved(kind: Any) -> None:
    straight = tensors()
    whole = train(kind(straight, lr=0.1), straight)
    parameters, later = tensors(), tensors()
    first, second = kind(parameters, lr=0.1), kind(later, lr=0.5)
    for step in range(STEPS):
        optimizer, mine = (first, parameters) if step < 2 else (second, later)
        if step == 2:
            second.load_state_dict(first.state_dict())
            for new, old in zip(later, parameters, strict=True):
                new.data.copy_(old.data)
        for parameter, gradient in zip(mine, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert_close([each.detach() for each in later], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradient_wait_and_count_their_own_steps(kind: Any) -> None:
    parameters, alone = tensors(), tensors()[:1]
    optimizer, other = kind(parameters, lr=0.1), kind(alone, lr=0.1)
    before = parameters[1].detach().clone()
    for step in range(2):
        parameters[0].grad = alone[0].grad = gradients(step)[0]
        optimizer.step()
        other.step()
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


def test_what_cannot_be_meant_is_refused() -> None:
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


def train_pieces() -> list[list[torch.Tensor]]:
    """Train with the first tensor divided over two tensor-parallel ranks."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    shard = TpShard((4, 3), 0, (), smp.tp_rank(), 2, CommGroup.RDP_GROUP, 1.0)
    results = []
    for kind in KINDS:
        parameters = tensors()
        parameters[0] = nn.Parameter(take_shard(parameters[0].detach(), shard))
        mark(parameters[0], shard)
        optimizer = kind(parameters, lr=0.1)
        for step in range(STEPS):
            given = gradients(step)
            given[0] = take_shard(given[0], shard)
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient
            optimizer.step()
        results.append([parameter.detach() for parameter in parameters])
    return results


def test_norms_of_divided_tensors_are_those_of_the_whole() -> None:
    ranks = run_ranks(train_pieces, 2)
    for kind, *pieces in zip(KINDS, *ranks, strict=True):
        parameters = tensors()
        plain = train(kind(parameters, lr=0.1), parameters)
        assert_close([torch.cat([piece[0] for piece in pieces]), *pieces[0][1:]], plain)
        assert_close(pieces[1][1:], plain[1:])
