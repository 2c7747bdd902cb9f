"""Training in half precision gives, to the bit, what the same casts, masters and scale give in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit.torch.step import collate
from tests import models
from tests.models import Case
from tests.ranks import run_ranks
from tests.train import OPTIMIZERS, Plain, Trace, Way, batch, build, check_same, flat, part, trace_of, training

# Large enough that the first steps overflow, small enough that later ones do not; grows again after three good ones.
DYNAMIC = {"init_scale": 2.0**22, "scale_window": 3, "scale_factor": 4.0, "min_scale": 1.0, "delayed_shift": 2}
SCALING = {"fp16": {"dynamic_loss_scale": True, "dynamic_loss_args": DYNAMIC}, "static": {"static_loss_scale": 1024.0}}
STEPS = 6


def case_of(name: str) -> Case:
    return replace(models.MODELS[name], dtype=torch.float32)


def way_of(half: str = "fp16", **more: Any) -> Way:
    """Return a way to train in "fp16", in "bf16", or in fp16 with a "static" scale of the loss."""
    config = {"bf16" if half == "bf16" else "fp16": True}
    batches = (8,) * STEPS * more.get("accumulation", 1)
    return Way(**{"microbatches": 2, "batches": batches, "config": config, "scaling": SCALING.get(half, {}), **more})


@dataclass
class Halves:
    """A trace, and what is beside it in half precision."""

    trace: Trace
    scales: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def train(case: Case, way: Way) -> Halves:
    """Train on this rank and return what it holds."""
    with training(case, way) as script:
        found = Halves(Trace(0, [], {}, {}))
        outputs = []
        for number in range(len(way.batches)):
            outputs.append(script.run(number))
            if (number + 1) % way.accumulation == 0:
                found.overflows.append(script.optimizer.overflow)
                found.scales.append(script.optimizer.loss_scale)
        names = {id(parameter): name for name, parameter in script.model.named_parameters()}
        groups = zip(script.optimizer.fp16_groups, script.optimizer.fp32_from_fp16_groups, strict=True)
        for weights, masters in groups:
            found.masters |= {names[id(w)]: m.detach().clone() for w, m in zip(weights, masters, strict=True)}
        found.trace = trace_of(outputs, script.model)
        return found


class ByHand(Plain):
    """The algorithm, as one writes it for one process; replicas are taken one after the other, and averaged."""

    def __init__(self, case: Case, way: Way) -> None:
        self.dtype = half_of(way)
        super().__init__(build(case).to(self.dtype), way.microbatches * way.accumulation)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.float()
        self.case, self.way = case, way
        self.weights = dict(self.module.named_parameters())
        self.masters: dict[str, Tensor] = {
            name: each.detach().float() if each.requires_grad and each.dtype == self.dtype else each
            for name, each in self.weights.items()
        }
        self.optimizer = OPTIMIZERS[way.optimizer](
            [each for name, each in self.masters.items() if self.weights[name].requires_grad]
        )
        self.scale = 1.0 if "bf16" in way.config else float(way.scaling.get("static_loss_scale", DYNAMIC["init_scale"]))
        self.good, self.forgiven = 0, 0
        self.scales: list[float] = []
        self.overflows: list[bool] = []

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.module(*[each.to(self.dtype) if each.is_floating_point() else each for each in args])
        return result.float()

    def backward(self, tensors: Tensor, gradients: Any = None) -> None:
        assert gradients is None
        (tensors * (self.scale / self.parts)).backward()

    def train_replicas(self) -> list[Halves]:
        """Return what each replica sees."""
        way = self.way
        outputs: list[list[Any]] = [[] for _ in range(way.replicas)]
        for first in range(0, len(way.batches), way.accumulation):
            seen = []
            for replica in range(way.replicas):
                self.zero_grad()
                for number in range(first, first + way.accumulation):
                    outputs[replica].append(self.run(number, replica))
                seen.append({name: each.grad for name, each in self.weights.items()})
            for name, weight in self.weights.items():
                found = [each / way.replicas for of_one in seen if (each := of_one[name]) is not None]
                weight.grad = sum(found[1:], start=found[0]) if found else None
            self.step()
        gradients = {name: each.grad for name, each in self.weights.items()}
        masters = {name: each for name, each in self.masters.items() if each is not self.weights[name]}
        traces = [Trace(replica, each, gradients, self.module.state_dict()) for replica, each in enumerate(outputs)]
        return [Halves(trace, self.scales, self.overflows, masters) for trace in traces]

    def run(self, number: int, replica: int) -> list[Any]:
        arguments, count = batch(self.case, number, self.way.batches[number], replica), self.way.microbatches
        parts = ([part(each, index, count) for each in arguments] for index in range(count))
        return flat(collate([self.case.step(self, *each) for each in parts]))

    def step(self) -> None:
        for name, master in self.masters.items():
            gradient = self.weights[name].grad
            master.grad = None if gradient is None else gradient.float() / self.scale
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        overflow = self.dtype is torch.float16 and not all(bool(each.isfinite().all()) for each in gradients)
        if not overflow:
            if self.way.clip:
                nn.utils.clip_grad_norm_(list(self.masters.values()), self.way.clip)
            self.optimizer.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    self.weights[name].copy_(master)
        self.learn(overflow)
        self.overflows.append(overflow)
        self.scales.append(self.scale)

    def learn(self, overflow: bool) -> None:
        if "dynamic_loss_scale" not in self.way.scaling:
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


def check(case: Case, way: Way) -> None:
    """Compare to the bit, or the masters alone and up to roundings where ranks round elsewhere than one process."""
    rounds = way.ranks > 1 and (way.clip > 0 or case.build is models.Tied)
    tolerance = 4 * torch.finfo(half_of(way)).eps if rounds else 0.0
    plain = ByHand(case, way).train_replicas()
    found = run_ranks(train, way.ranks, case, way)
    assert set().union(*(each.masters for each in found)) == plain[0].masters.keys()
    if "dynamic_loss_scale" in way.scaling:  # or the test would prove little
        assert set(plain[0].overflows) == {True, False}
    for ours in found:
        theirs = plain[ours.trace.replica]
        assert (ours.scales, ours.overflows) == (theirs.scales, theirs.overflows)
        for name, master in ours.masters.items():
            torch.testing.assert_close(master, theirs.masters[name], rtol=tolerance, atol=tolerance, msg=name)
        if not rounds:
            if way.replicas > 1:  # each has statistics of its own batches
                ours.trace.values = {name: ours.trace.values[name] for name in ours.trace.gradients}
            check_same(ours.trace, theirs.trace, 0)
    if "shard_optimizer_state" in way.config:
        assert not set(found[0].masters) & set(found[1].masters), "an owner alone has a master"


def half_of(way: Way) -> torch.dtype:
    return torch.bfloat16 if "bf16" in way.config else torch.float16


ONE_RANK = [
    ("BatchNorm", way_of(optimizer="AdamW")),
    ("tied modules", way_of(clip=0.5, early=True)),
    ("frozen and unused parameters", way_of(microbatches=4, accumulation=2, clip=0.1)),
    ("BatchNorm", way_of("static", optimizer="AdamW", early=True)),
    ("tied modules", way_of("bf16", clip=0.5, optimizer="AdamW")),
    ("BatchNorm", way_of("bf16", accumulation=2)),
]
SHARDED = {"fp16": True, "shard_optimizer_state": True}
TWO_RANKS = [
    ("BatchNorm", way_of(pipeline=2)),
    ("BatchNorm", way_of(replicas=2, accumulation=2, early=True)),
    ("frozen and unused parameters", way_of("static", pipeline=2, accumulation=2, early=True)),
    ("frozen and unused parameters", way_of("bf16", replicas=2, optimizer="AdamW")),
    ("BatchNorm", way_of(replicas=2, config=SHARDED)),
    # A norm, and the gradient of a tied weight, are sums over ranks.
    ("tied modules", way_of(pipeline=2, clip=0.5)),
    ("BatchNorm", way_of(replicas=2, clip=0.1)),
]


@pytest.mark.parametrize(("name", "way"), ONE_RANK + TWO_RANKS, ids=str)
def test_ranks_equal_a_hand_written_loop_to_the_bit(name: str, way: Way) -> None:
    check(case_of(name), way)
