"""Training in half precision gives, to the bit, what the same casts, masters and scale give in plain PyTorch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.transparency.models import WIDTH, Net, batch, loss_of

STEPS = 6
# Large enough that the first steps overflow, small enough that later ones do not; grows again after three good ones.
DYNAMIC = {"init_scale": 2.0**22, "scale_window": 3, "scale_factor": 4.0, "min_scale": 1.0, "delayed_shift": 2}


class Untied(Net):
    """Net with a head of its own and a normalisation that stays in float32.

    A tied weight on two pipeline ranks gets its gradient as the rounded sum of two rounded parts: the same up to a
    rounding of half precision, but not to the bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, self.embedding.num_embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.frozen
        x = x + self.scale * self.shrink(torch.tanh(self.grow(self.norm(x))))
        return self.head(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


MODELS = {"untied": Untied, "tied": Net}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        parts: what a batch is cut into, over microbatches and replicas together.
    """

    half: str = "fp16"
    model: str = "untied"
    parts: int = 1
    accumulation: int = 1
    max_norm: float | None = None
    static: float | None = None
    optimizer: str = "AdamW"

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        rest = {"weight_decay": 0.1} if self.optimizer == "AdamW" else {"momentum": 0.9}
        return getattr(torch.optim, self.optimizer)(parameters, lr=0.05, **rest)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half == "fp16" else torch.bfloat16


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[case.model]()


# --- with smpkit -----------------------------------------------------------------------------------------------------


@smp.step
def train_step(model: Any, tokens: Tensor, targets: Tensor, divisor: int) -> Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss / divisor)
    return loss


def train(case: Case, degree: int = 1, optimizer_first: bool = False, **config: Any) -> Trace:
    """Train on this world and return what this rank holds."""
    replicas = int(os.environ["WORLD_SIZE"]) // degree
    given = {"pipeline_parallel_degree": degree, "ddp": True, "microbatches": case.parts // replicas}
    smp.init({case.half: True, **given, **config})
    module = build(case)
    inner = case.make_optimizer(module.parameters()) if optimizer_first else None
    model = smp.DistributedModel(module, backward_passes_per_step=case.accumulation, bucket_cap_mb=0.001)
    optimizer = smp.DistributedOptimizer(
        inner or case.make_optimizer(model.parameters()),
        static_loss_scale=case.static,
        dynamic_loss_scale=case.static is None,
        dynamic_loss_args=DYNAMIC,
    )
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for turn in range(case.accumulation):
            tokens, targets = batch(step * case.accumulation + turn)
            mine = [each.chunk(smp.dp_size())[smp.dp_rank()] for each in (tokens, targets)]
            losses = [loss.item() for loss in train_step(model, *mine, case.accumulation).outputs]
            trace.losses += [loss for theirs in smp.allgather(losses, smp.DP_GROUP) for loss in theirs]
        if case.max_norm is not None:
            trace.norms.append(clip(model, optimizer, case.max_norm, step))
        optimizer.step()
        trace.overflows.append(optimizer.overflow)
        trace.scales.append(optimizer.loss_scale)
    record(trace, model, optimizer)
    smp.shutdown()
    return trace


def clip(model: Any, optimizer: Any, max_norm: float, step: int) -> float:
    """Clip in one of the ways that scripts do it; return -1 for a norm that is not finite."""
    if step % 3 == 0:
        return float(optimizer.clip_master_grads(max_norm))
    members = [each for group in optimizer.param_groups for each in group["params"]]
    norm = float(smp.clip_grad_norm_(model if step % 3 == 1 else members, max_norm))
    return norm if math.isfinite(norm) else -1.0


def record(trace: Trace, model: Any, optimizer: Any) -> None:
    held = {name for name, _ in model.local_named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True):
        trace.masters |= {names[id(w)]: m.detach().clone() for w, m in zip(weights, masters, strict=True)}
    trace.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters() if n in held}
    trace.weights = {n: value for n, value in model.local_state_dict().items() if isinstance(value, Tensor)}


# --- and by hand -----------------------------------------------------------------------------------------------------


class ByHand:
    """The algorithm, as one writes it for one process; replicas are taken one after the other, and averaged."""

    def __init__(self, case: Case, replicas: int = 1) -> None:
        self.case = case
        self.replicas = replicas
        self.model = build(case).to(case.dtype)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.float()
        self.parameters = dict(self.model.named_parameters())
        self.masters = {
            name: parameter.detach().float() if parameter.requires_grad and parameter.dtype == case.dtype else parameter
            for name, parameter in self.parameters.items()
        }
        self.optimizer = case.make_optimizer(list(self.masters.values()))
        self.scale = 1.0 if case.half == "bf16" else case.static or float(DYNAMIC["init_scale"])
        self.good, self.forgiven = 0, 0
        self.trace = Trace()

    def train(self) -> Trace:
        for step in range(STEPS):
            first = step * self.case.accumulation
            self.backward([batch(index) for index in range(first, first + self.case.accumulation)])
            self.step()
        self.trace.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
        self.trace.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.trace.masters = {n: m for n, m in self.masters.items() if m is not self.parameters[n]}
        return self.trace

    def backward(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        microbatches = self.case.parts // self.replicas
        losses: list[list[float]] = [[] for _ in batches]
        gradients = []
        for replica in range(self.replicas):
            self.model.zero_grad()
            for turn, whole in enumerate(batches):
                mine = (each.chunk(self.replicas)[replica].chunk(microbatches) for each in whole)
                for part, goal in zip(*mine, strict=True):
                    loss = loss_of(lambda x: self.model(x).float(), part, goal)  # type: ignore[arg-type]
                    ((loss / self.case.accumulation) * (self.scale / microbatches)).backward()
                    losses[turn].append(loss.item())
            gradients.append({name: parameter.grad for name, parameter in self.parameters.items()})
        self.trace.losses += [loss for of_turn in losses for loss in of_turn]
        for name, parameter in self.parameters.items():
            parts = [gradient / self.replicas for each in gradients if (gradient := each[name]) is not None]
            parameter.grad = sum(parts[1:], start=parts[0]) if parts else None

    def step(self) -> None:
        for name, master in self.masters.items():
            gradient = self.parameters[name].grad
            master.grad = None if gradient is None else gradient.float() / self.scale
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        overflow = self.case.half == "fp16" and not all(bool(each.isfinite().all()) for each in gradients)
        if self.case.max_norm is not None:
            self.trace.norms.append(-1.0 if overflow else self.clip())
        if not overflow:
            self.optimizer.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    self.parameters[name].copy_(master)
        self.learn(overflow)
        self.trace.overflows.append(overflow)
        self.trace.scales.append(self.scale)

    def clip(self) -> float:
        assert self.case.max_norm is not None
        return float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.case.max_norm))

    def learn(self, overflow: bool) -> None:
        if self.case.half == "bf16" or self.case.static is not None:
            return
        if overflow:
            self.good = 0
            self.forgiven += 1
            if self.forgiven >= DYNAMIC["delayed_shift"]:
                self.scale /= DYNAMIC["scale_factor"]
            return
        self.good += 1
        if self.good % DYNAMIC["scale_window"] == 0:
            self.scale *= DYNAMIC["scale_factor"]
            self.forgiven = 0


def assert_equal(ours: Trace, plain: Trace) -> None:
    """Compare to the bit what `ours` holds."""
    assert ours.losses == plain.losses
    assert (ours.scales, ours.overflows, ours.norms) == (plain.scales, plain.overflows, plain.norms)
    for kind in ("gradients", "weights", "masters"):
        mine, theirs = getattr(ours, kind), getattr(plain, kind)
        for name, value in mine.items():
            assert (value is None) == (theirs[name] is None), (kind, name)
            if value is not None:
                torch.testing.assert_close(
                    value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=f"{kind} of {name} differ"
                )


# --- one rank ---------------------------------------------------------------------------------------------------------

ONE_RANK = [
    Case(),
    Case(model="tied", parts=2, max_norm=0.5),
    Case(parts=4, accumulation=2, optimizer="SGD", max_norm=0.1),
    Case(static=1024.0, parts=2),
    Case("bf16", model="tied", parts=2, max_norm=0.5),
    Case("bf16", accumulation=2, optimizer="SGD"),
]


def train_all(cases: list[Case], degree: int = 1, **config: Any) -> list[Trace]:
    return [train(case, degree, optimizer_first=number % 2 == 1, **config) for number, case in enumerate(cases)]


def train_sharded(cases: list[Case]) -> list[Trace]:
    return train_all(cases, shard_optimizer_state=True)


def test_one_rank_equals_a_hand_written_loop_to_the_bit() -> None:
    (traces,) = run_ranks(train_all, 1, ONE_RANK)
    for case, trace in zip(ONE_RANK, traces, strict=True):
        plain = ByHand(case).train()
        assert trace.masters.keys() == plain.masters.keys()
        assert_equal(trace, plain)
        if case.half == "fp16" and case.static is None:  # or the test would prove little
            assert True in trace.overflows, trace
            assert False in trace.overflows, trace


# --- several ranks ---------------------------------------------------------------------------------------------------

SEVERAL_RANKS = [
    Case(parts=2),
    Case(parts=4, accumulation=2, optimizer="SGD"),
    Case(parts=2, static=1024.0),
    Case("bf16", parts=4),
]
"""Every sum has its terms in the order of one process."""

ROUNDED = [
    Case(parts=2, optimizer="SGD", max_norm=0.1),
    Case(model="tied", parts=2, optimizer="SGD", max_norm=0.5),
    Case("bf16", model="tied", parts=4, optimizer="SGD"),
]
"""The norm, and the gradient of a tied weight, are sums over ranks: they are rounded elsewhere than in one process."""


@pytest.mark.parametrize("degree", [2, 1], ids=["pp2", "dp2"])
def test_two_ranks_equal_one(degree: int) -> None:
    ranks = run_ranks(train_all, 2, SEVERAL_RANKS + ROUNDED, degree, timeout=120)
    for case, *traces in zip(SEVERAL_RANKS + ROUNDED, *ranks, strict=True):
        plain = ByHand(case, 2 // degree).train()
        assert set().union(*(trace.masters for trace in traces)) == plain.masters.keys()
        for trace in traces:
            if degree == 1:  # replicas have statistics of their own parts; the first one's are kept
                trace.weights = {name: trace.weights[name] for name in trace.gradients}
            if case in ROUNDED:
                assert_close(trace, plain, case.dtype)
            else:
                assert_equal(trace, plain)


def test_sharded_states_have_masters_on_their_owner_only() -> None:
    cases = SEVERAL_RANKS[:1]
    ranks = run_ranks(train_sharded, 2, cases, timeout=120)
    for case, *traces in zip(cases, *ranks, strict=True):
        plain = ByHand(case, 2).train()
        first, second = (set(trace.masters) for trace in traces)
        assert first | second == plain.masters.keys()
        assert not first & second
        for trace in traces:
            trace.weights = {name: trace.weights[name] for name in trace.gradients}
            trace.gradients = {}  # only the owners have them
            assert_equal(trace, plain)


def assert_close(ours: Trace, plain: Trace, dtype: torch.dtype) -> None:
    assert (ours.scales, ours.overflows) == (plain.scales, plain.overflows)
    tolerance = 4 * torch.finfo(dtype).eps
    for name, master in ours.masters.items():
        torch.testing.assert_close(master, plain.masters[name], rtol=tolerance, atol=tolerance)
