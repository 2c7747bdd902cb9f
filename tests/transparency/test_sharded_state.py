"""`shard_optimizer_state` changes where optimizer states are, and nothing else."""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same, batch, build, loss_of, record, train_plainly

STEPS = 5
TOLERANCE = 1e-11  # as in test_data_parallel


@smp.step
def train_step(model: Any, tokens: Tensor, targets: Tensor, divisor: int) -> Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss / divisor)
    return loss


def start(sharded: bool, microbatches: int = 1, **options: Any) -> smp.DistributedModel:
    smp.init({"ddp": True, "shard_optimizer_state": sharded, "microbatches": microbatches})
    return smp.DistributedModel(build(), bucket_cap_mb=0.001, **options)


def optimizer_of(model: nn.Module) -> Any:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.05))


def run_steps(
    model: smp.DistributedModel, optimizer: Any, steps: range, accumulation: int = 1, clip: float = 0
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for turn in range(accumulation):
            tokens, targets = batch(step * accumulation + turn)
            mine = slice(smp.dp_rank(), None, smp.dp_size())
            train_step(model, tokens[mine], targets[mine], accumulation)
        if clip:
            smp.clip_grad_norm_(model, clip)
        optimizer.step()


def weights_after(sharded: bool, accumulation: int, overlap: bool, view: bool, clip: float) -> dict[str, Tensor]:
    model = start(
        sharded,
        microbatches=2,
        backward_passes_per_step=accumulation,
        overlapping_allreduce=overlap,
        gradient_as_bucket_view=view,
    )
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    for step in range(STEPS):
        run_steps(model, optimizer, range(step, step + 1), accumulation, clip)
        scheduler.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return weights


CASES = list(itertools.product([1, 2], [True, False], [True, False], [0.0]))


def train_grid() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(weights_after(True, *case), weights_after(False, *case)) for case in [*CASES, (1, True, False, 0.3)]]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_equal_those_without_sharding(size: int) -> None:
    """To the bit on two ranks; of more, gloo adds up the values of a buffer in an order that depends on their place."""
    ranks = run_ranks(train_grid, size, timeout=120)
    for pairs in ranks:
        *pairs_of_grid, clipped = pairs
        for ours, theirs in pairs_of_grid:
            for name, value in theirs.items():
                tolerance = 0 if size == 2 else TOLERANCE
                torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)
        # The norm adds up the same squares in another order.
        for name, value in clipped[1].items():
            torch.testing.assert_close(clipped[0][name], value, rtol=TOLERANCE, atol=TOLERANCE)
            assert torch.equal(clipped[0][name], ranks[0][-1][0][name])


def train_as_plainly() -> Trace:
    model = start(True, microbatches=2)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1))
    run_steps(model, optimizer, range(STEPS))
    return record(model, [])


def test_weights_equal_plain_pytorch() -> None:
    plain = train_plainly(STEPS, 1)
    plain.losses = []
    for trace in run_ranks(train_as_plainly, 4):
        trace.gradients = plain.gradients  # each is on one rank
        assert_same(trace, plain, TOLERANCE)


def measure() -> dict[str, Any]:
    """Count what is moved in a step, and what remains of it."""
    model = start(True)
    optimizer = optimizer_of(model)
    run_steps(model, optimizer, range(2))
    moved = {"reduce": 0, "broadcast": 0, "all_reduce": 0}

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            moved[name] += tensor.numel() * tensor.element_size()
            return original(tensor, *args, **kwargs)

        return mock.patch.object(dist, name, call)

    with counted("reduce"), counted("broadcast"), counted("all_reduce"):
        run_steps(model, optimizer, range(2, 3))
    live = [p for p in model.parameters() if p.requires_grad]
    owned = dict(model.virtual_named_parameters())
    states = [tensor for entry in optimizer.state.values() for tensor in entry.values() if tensor.ndim]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in owned.values()}
    assert all(p.grad is None for p in live if id(p) not in {id(each) for each in owned.values()})
    return {
        **moved,
        "parameters": sum(p.numel() * 8 for p in live),
        "flags": 8 * len(live),
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
        "states": sum(t.numel() * 8 for t in states),
        "unused": 8 * 2 * 3,
        "owned": sorted(owned),
        "group_lengths": [len(group["params"]) for group in optimizer.param_groups],
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_share_of_the_states_and_a_step_moves_each_gradient_and_weight_once(size: int) -> None:
    found = run_ranks(measure, size)
    first = found[0]
    assert sorted(name for each in found for name in each["owned"]) == sorted(n for n, _ in build().named_parameters())
    assert sum(each["states"] for each in found) == 2 * first["parameters"] - first["unused"]
    # Whole tensors, the largest of which is a third of all, cannot be divided better.
    assert max(each["states"] for each in found) <= 2 * max(1.15 * first["parameters"] / size, 8 * 24 * 8)
    for each in found:
        assert each["all_reduce"] == 0
        assert each["reduce"] == first["parameters"] + first["flags"]
        assert each["broadcast"] == first["parameters"] + first["buffers"]
        assert each["group_lengths"] == [3, 6]
        assert each["rates"] == [0.05, 0.02]


def add_without_clearing(sharded: bool) -> dict[str, list[Tensor]]:
    """Reduce twice before clearing, with clipping in between and one weight left out in the second."""
    results: dict[str, list[Tensor]] = {}
    for view in (True, False):
        model = start(sharded, gradient_as_bucket_view=view)
        optimizer_of(model)
        tokens, targets = batch(0)
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        train_step(model, tokens[mine], targets[mine], 1)
        smp.clip_grad_norm_(model, 1e9)
        model.module.get_parameter("grow.bias").requires_grad_(False)  # its gradient stays what it was
        train_step(model, tokens[mine], targets[mine], 3)
        train_step(model, tokens[mine], targets[mine], 2)  # as planned before: what is reduced lies in the buckets
        for name, parameter in model.virtual_named_parameters():
            if parameter.grad is not None:
                results.setdefault(name, []).append(parameter.grad.clone())
        smp.shutdown()
    return results


def test_a_second_reduction_adds_to_the_first() -> None:
    sharded, whole = run_ranks(add_without_clearing, 2, True), run_ranks(add_without_clearing, 2, False)
    found = {name: values for each in sharded for name, values in each.items()}
    assert found.keys() == whole[0].keys()
    for name, values in whole[0].items():
        for ours, theirs in zip(found[name], values, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-16, msg=name)


def save_and_go_on() -> dict[str, Any]:
    model = start(True)
    optimizer = optimizer_of(model)
    run_steps(model, optimizer, range(2))
    kept = {
        # Copies: a state dict refers to the states that go on changing.
        "listed": copy.deepcopy(optimizer.local_state_dict()),
        "own": copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False)),
        "whole": copy.deepcopy(optimizer.state_dict()),
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }
    run_steps(model, optimizer, range(2, 4))
    return {**kept, "after": {name: value.clone() for name, value in model.state_dict().items()}}


def load_and_go_on(kept: list[dict[str, Any]], forms: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    results: dict[str, list[dict[str, Tensor]]] = {}
    for form in forms:
        model = start(True)
        model.load_state_dict(kept[0]["weights"])
        optimizer = optimizer_of(model)
        source = kept[0] if form != "own" else kept[smp.rank()] if smp.rank() < len(kept) else None
        optimizer.load_state_dict(copy.deepcopy(source[form] if source else {**kept[0]["own"], "state": {}}))
        assert {id(p) for p in optimizer.state} <= {id(p) for _, p in model.virtual_named_parameters()}
        run_steps(model, optimizer, range(2, 4))
        results[form] = [{name: value.clone() for name, value in model.state_dict().items()}]
        smp.shutdown()
    return results


def test_states_are_saved_as_a_list_a_shard_or_whole_and_loaded_by_any_number_of_ranks() -> None:
    kept = run_ranks(save_and_go_on, 2)
    assert [type(each["listed"]["state"]) for each in kept] == [list, dict]
    assert kept[0]["listed"]["state"][1].keys() == kept[1]["own"]["state"].keys()
    assert kept[0]["listed"]["_smp_is_partial"] is True
    whole = kept[0]["whole"]["state"]
    assert sorted(whole) == sorted({*kept[0]["own"]["state"], *kept[1]["own"]["state"]})
    assert whole.keys() == kept[1]["whole"]["state"].keys()
    for size in (2, 4):
        for results in run_ranks(load_and_go_on, size, kept, ["listed", "own", "whole"]):
            for (weights,) in results.values():
                for name, value in kept[0]["after"].items():
                    torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def refuse() -> list[str]:
    model = start(True)
    said = []
    with pytest.raises(UnsupportedError) as no_hook:
        model.register_comm_hook(None, lambda _, bucket: bucket)
    with pytest.raises(UnsupportedError) as no_join:
        model.join()
    said += [no_hook.value.message, no_join.value.message]
    tokens, targets = batch(0)
    train_step(model, tokens, targets, 1)
    with pytest.raises(UsageError) as no_optimizer:
        train_step(model, tokens, targets, 1)
    said.append(no_optimizer.value.message)
    optimizer = smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError) as no_lbfgs:
        optimizer.step(lambda: 0.0)
    return [*said, no_lbfgs.value.message]


def test_what_does_not_go_with_sharded_states_is_refused_in_a_sentence() -> None:
    hook, join, optimizer, lbfgs = run_ranks(refuse, 2)[0]
    assert "communication hook" in hook
    assert "join lets a rank stop" in join
    assert "needs smp.DistributedOptimizer" in optimizer
    assert "LBFGS" in lbfgs


class Tied(nn.Module):
    """Two pipeline ranks with a weight on both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        with smp.partition(0):
            self.first = nn.Linear(4, 4).double()
        with smp.partition(1):
            self.second = nn.Linear(4, 4).double()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.second(torch.tanh(self.first(x)))).square().mean()


@smp.step
def tied_step(model: Any, x: Tensor) -> None:
    model.backward(model(x))


def train_tied() -> list[dict[str, Tensor]]:
    results = []
    for sharded in (True, False):
        config = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "shard_optimizer_state": sharded}
        smp.init({**config, "auto_partition": False, "default_partition": 0})
        model = smp.DistributedModel(Tied())
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            tied_step(model, torch.ones(4, 4, dtype=torch.float64) * (step + smp.dp_rank()))
            smp.clip_grad_norm_(model, 0.05)
            optimizer.step()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        results.append({str(n): torch.ones(()) for n in optimizer.orig_state_dict()["state"]})
        smp.shutdown()
    return results


def test_over_a_pipeline_with_a_tied_weight() -> None:
    found = run_ranks(train_tied, 4)
    for sharded, _, whole, _ in found:
        for name, value in whole.items():
            torch.testing.assert_close(sharded[name], value, rtol=1e-12, atol=1e-14)
    # One rank of four keeps the state of the tied weight, one of two those of the biases.
    assert sorted(number for _, states, *_ in found for number in states) == ["0", "1", "2"]
