"""A job that resumes on other degrees goes on as if it had not stopped: with the weights of one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.shards import TpShard, mark, take_shard
from tests.ranks import run_ranks

Layout = tuple[int, int, int]
LAYOUTS: list[Layout] = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
TOLERANCE = 1e-15  # a tied weight's gradient is the sum over its units, which ranks add in another order
PIECES: dict[str, tuple[int, tuple[int, ...]]] = {"fused": (0, (8, 8, 4)), "across": (1, ()), "vector": (0, ())}
"""Which parameters of a unit are divided over tensor-parallel ranks: along which dimension, in which parts."""
PACKED: dict[str, tuple[int, tuple[int, ...]]] = {"packed": (0, (8, 8, 8))}


class Unit(nn.Module):
    """Adds the sum of its parameters, each weighted by a buffer: so that is their gradient, whole or divided."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        shapes = {"fused": (20, 3), "across": (2, 8), "vector": (8,), "whole": (3,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
            self.register_buffer(f"{name}_factor", torch.randn(shape, dtype=torch.float64))
        self.tied = tied
        self.register_buffer("tied_factor", torch.randn(tied.shape, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.get_buffer("calls").add_(1)
        return x + sum((param * self.get_buffer(f"{name}_factor")).sum() for name, param in self.named_parameters())


class Trio(nn.Module):
    """Adds three weights' sums; tensor parallelism replaces it."""

    FACTORS = (1.5, -0.5, 2.0)

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.randn(width, 3, dtype=torch.float64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(factor * each.sum() for factor, each in zip(self.FACTORS, self.parameters(), strict=True))


class DistributedTrio(smp.nn.DistributedModule):
    """The same with the three in one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shard = TpShard((3 * width, 3), 0, (width,) * 3, smp.tp_rank(), smp.tp_size(), CommGroup.RDP_GROUP, 1.0)
        self.packed = nn.Parameter(torch.empty(shard.local_shape, dtype=torch.float64))
        mark(self.packed, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(factor * each.sum() for factor, each in zip(Trio.FACTORS, self.packed.chunk(3), strict=True))


def to_distributed(values: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[tuple[str, Any]]:
    if "a" in values:
        yield "packed", lambda: torch.cat([values[name] for name in "abc"])


def from_distributed(values: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[tuple[str, Any]]:
    if "packed" in values:
        for index, name in enumerate("abc"):
            yield name, lambda index=index: values["packed"].chunk(3)[index]


smp.tp_register_with_module(Trio, DistributedTrio, to_distributed=to_distributed, from_distributed=from_distributed)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    tied = nn.Parameter(torch.randn(5, dtype=torch.float64))
    model = nn.Sequential(*(Unit(tied) for _ in range(4)), Trio(8))
    smp.set_tensor_parallelism(model[-1])
    return model


def divide(model: nn.Module) -> None:
    """Leave of each divided parameter, and of its factor, what this tensor-parallel rank holds."""
    units = [module for module in model.modules() if isinstance(module, Unit)]
    for unit, (name, (dim, parts)) in itertools.product(units, PIECES.items()):
        whole = unit.get_parameter(name)
        shard = TpShard(tuple(whole.shape), dim, parts, smp.tp_rank(), smp.tp_size(), CommGroup.RDP_GROUP, 1.0)
        piece, factor = (
            nn.Parameter(take_shard(whole.data, shard)),
            take_shard(unit.get_buffer(f"{name}_factor"), shard),
        )
        mark(piece, shard)
        mark(factor, shard)
        setattr(unit, name, piece)
        setattr(unit, f"{name}_factor", factor)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    wide = [param for param in model.parameters() if param.dim() > 1]
    narrow = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


@smp.step
def train_step(model: Any, x: torch.Tensor) -> None:
    model.backward(model(x).mean())


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        train_step(model, torch.ones(4, 1, dtype=torch.float64))
        optimizer.step()


def begin(layout: Layout, seed: int) -> tuple[Any, Any]:
    pp, tp, rdp = layout
    sharded = rdp > 1 and tp > 1  # the optimizer's states too, on some of the layouts
    smp.init(
        {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True, "microbatches": 2}
        | ({"shard_optimizer_state": True} if sharded else {})
    )
    module = build(seed)
    divide(module)
    model = smp.DistributedModel(module)
    return model, smp.DistributedOptimizer(optimizer_of(model))


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return what this rank holds: parameters, buffers and the optimizer's states of them."""
    found = {name: value.clone() for name, value in model.local_state_dict().items() if isinstance(value, torch.Tensor)}
    for name, parameter in model.local_named_parameters():
        states = optimizer.state[parameter] if model.owns(parameter) else {}
        found |= {f"{name}/{key}": value.clone() for key, value in states.items()}
    return found


def largest_difference(model: Any, optimizer: Any, whole: dict[str, torch.Tensor]) -> float:
    worst = 0.0
    for name, value in state_of(model, optimizer).items():
        last = name.split("/")[0].rpartition(".")[2].removesuffix("_factor")
        expected = _expected(name, whole)
        if last in PIECES | PACKED and expected.dim():
            dim, parts = (PIECES | PACKED)[last]
            shape = tuple(expected.shape)
            shard = TpShard(shape, dim, parts, smp.tp_rank(), smp.tp_size(), CommGroup.RDP_GROUP, 1.0)
            expected = take_shard(expected, shard)
        assert value.shape == expected.shape, name
        worst = max(worst, (value.double() - expected.double()).abs().max().item())
    return worst


def _expected(name: str, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    if name in whole:
        return whole[name]
    states = [whole[name.replace("packed", part)] for part in "abc"]
    return torch.cat(states) if states[0].dim() else states[0]


def save_all(path: str, layouts: list[Layout]) -> None:
    for layout in layouts:
        model, optimizer = begin(layout, seed=0)
        train(model, optimizer, 2)
        smp.save_checkpoint(path, "-".join(map(str, layout)), user_content={"step": 2})
        smp.shutdown()


def resume_all(
    path: str, pairs: list[tuple[Layout, Layout]], middle: dict[str, Any], end: dict[str, Any]
) -> list[tuple[float, float, Any]]:
    """Resume each first layout on the second; return the differences after that, and two steps later."""
    found = []
    for saved, now in pairs:
        model, optimizer = begin(now, seed=1)
        content = smp.resume_from_checkpoint(path, "-".join(map(str, saved)))
        if now[0] == 1:
            before = largest_difference(model, optimizer, middle)
        else:  # a pipeline's rank knows what it holds after the first step
            before = 0.0
        train(model, optimizer, 2)
        found.append((before, largest_difference(model, optimizer, end), content))
        smp.shutdown()
    return found


def reference() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the state after two and four steps of plain PyTorch."""
    module = build(0)
    optimizer = optimizer_of(module)
    states = []
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):  # microbatches
                (module(torch.ones(2, 1, dtype=torch.float64)).mean() / 2).backward()
            optimizer.step()
        found = {name: value.clone() for name, value in module.state_dict().items()}
        for name, parameter in module.named_parameters():
            found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state[parameter].items()}
        states.append(copy.deepcopy(found))
    return states[0], states[1]


def check(found: list[list[tuple[float, float, Any]]]) -> None:
    for per_rank in found:
        for before, after, content in per_rank:
            assert before <= TOLERANCE
            assert after <= TOLERANCE
            assert content == {"step": 2}


def test_four_ranks_resume_each_others_layouts_and_one_rank_any(tmp_path: Path) -> None:
    path = str(tmp_path)
    middle, end = reference()
    one: Layout = (1, 1, 1)
    save_all(path, [one])
    run_ranks(save_all, 4, path, LAYOUTS, timeout=150)
    pairs = [(saved, now) for saved, now in itertools.product([*LAYOUTS, one], LAYOUTS) if saved != now]
    check(run_ranks(resume_all, 4, path, pairs[::2], middle, end, timeout=150))
    check([resume_all(path, [(saved, one) for saved in LAYOUTS], middle, end)])


@pytest.mark.slow
@pytest.mark.timeout(900)  # 19 layouts on each other
def test_every_layout_of_one_to_eight_ranks_resumes_on_every_other(tmp_path: Path) -> None:
    path = str(tmp_path)
    middle, end = reference()
    by_size: dict[int, list[Layout]] = {}
    for layout in itertools.product([1, 2, 4], [1, 2, 4], [1, 2, 4]):
        size = layout[0] * layout[1] * layout[2]
        if size <= 8:
            by_size.setdefault(size, []).append(layout)
    for size, layouts in by_size.items():
        run_ranks(save_all, size, path, layouts, timeout=170)
    everything = [layout for layouts in by_size.values() for layout in layouts]
    for size, layouts in by_size.items():
        for now in layouts:
            check(run_ranks(resume_all, size, path, [(saved, now) for saved in everything], middle, end, timeout=170))
