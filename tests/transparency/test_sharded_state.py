"""`shard_optimizer_state` changes where optimizer states are, and nothing else."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from tests.models import MODELS, Case
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Trace, Training, Way, batch, build, same, trace_of, training, world

CASE = MODELS["frozen and unused parameters"]
WHOLE = Way(replicas=2, microbatches=2, optimizer="AdamW in groups", model={"bucket_cap_mb": 0.001})
SHARDED = replace(WHOLE, config={"shard_optimizer_state": True})


@pytest.mark.parametrize(("accumulation", "overlap"), [(1, True), (2, True), (2, False)])
def test_two_ranks_equal_those_without_sharding_to_the_bit(accumulation: int, overlap: bool) -> None:
    options = {**WHOLE.model, "overlapping_allreduce": overlap}
    whole = replace(WHOLE, accumulation=accumulation, batches=(8,) * 2 * accumulation, model=options)
    same(CASE, replace(whole, config=SHARDED.config), like=whole, tolerance=0)


# Of four ranks, gloo adds up the values of a buffer in an order that depends on their place.
ROWS = [
    ("frozen and unused parameters", replace(SHARDED, replicas=4, clip=0.3)),
    ("tied neighbours", replace(SHARDED, pipeline=2, clip=0.05)),
]


@pytest.mark.parametrize(("name", "way"), ROWS, ids=str)
def test_training_equals_plain_pytorch(name: str, way: Way) -> None:
    same(MODELS[name], way)


@on_ranks(4)
def test_a_rank_keeps_its_share_of_the_states_and_a_step_moves_each_gradient_and_weight_once() -> None:
    moved = {"reduce": 0, "_broadcast_coalesced": 0, "all_reduce": 0}

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = args[1] if name == "_broadcast_coalesced" else [args[0]]
            moved[name] += sum(each.nbytes for each in tensors)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with training(CASE, replace(SHARDED, replicas=4)) as script:
        script.run(0)
        script.run(1)
        with counted("reduce"), counted("_broadcast_coalesced"), counted("all_reduce"):
            script.run(2)
        owned, optimizer = dict(script.model.virtual_named_parameters()), script.optimizer
        assert set(optimizer.state) <= set(owned.values())
        assert all(each.grad is None for each in set(script.model.parameters()) - set(owned.values()))
        states = [tensor for entry in optimizer.state.values() for tensor in entry.values() if tensor.ndim]
        groups = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        ranks = smp.allgather((list(owned), sum(each.nbytes for each in states)), smp.CommGroup.WORLD)
    named = dict(build(CASE).named_parameters())
    trained = [each for each in named.values() if each.requires_grad]
    num_bytes, largest = sum(each.nbytes for each in trained), max(each.nbytes for each in trained)
    unused = sum(each.nbytes for name, each in named.items() if name.startswith("unused"))
    # Beside a gradient, a number says whether a rank has it.
    assert moved == {"reduce": num_bytes + 8 * len(trained), "_broadcast_coalesced": num_bytes, "all_reduce": 0}
    assert groups == [(sum(each.ndim > 1 for each in trained), 0.05), (sum(each.ndim <= 1 for each in trained), 0.02)]
    assert sorted(name for names, _ in ranks for name in names) == sorted(named)
    assert sum(share for _, share in ranks) == 2 * (num_bytes - unused)
    assert max(share for _, share in ranks) <= 2 * (1.1 * num_bytes / 4 + largest)


@on_ranks(2)
def test_a_gradient_that_the_script_assigns_makes_a_state_on_its_owner_alone() -> None:
    with training(CASE, SHARDED) as script:
        script.run(0)
        parameters = [*script.model.parameters()]
        for each in parameters:
            each.grad = torch.ones_like(each)
        script.optimizer.step()
        assert set(script.optimizer.state) <= {each for _, each in script.model.virtual_named_parameters()}
        assert all(each.grad is not None for each in parameters)


def add_without_clearing(case: Case, way: Way) -> Trace:
    """Reduce twice before clearing, with clipping in between and one weight left out in the second."""
    with world(way):
        model = Training(case, way).model
        step = smp.step(case.step)
        arguments = [batch(case, number, 8, smp.dp_rank()) for number in range(3)]
        step(model, *arguments[0])
        smp.clip_grad_norm_(model, 1e9)
        model.module.get_parameter("head.bias").requires_grad_(False)  # its gradient stays what it was
        step(model, *arguments[1])
        step(model, *arguments[2])  # as planned before: what is reduced lies in the buckets
        return trace_of([], model)


def test_a_second_reduction_adds_to_the_first() -> None:
    same(CASE, SHARDED, like=WHOLE, by=add_without_clearing, tolerance=1e-13)


def freeze_in_between(case: Case, way: Way, set_to_none: bool) -> Trace:
    """Freeze the head for a batch: what is sent is grouped anew then, and a gradient of 0 moves it by its momentum."""
    with world(way):
        script, outputs = Training(case, way), []
        vars(script.optimizer)["zero_grad"] = functools.partial(script.optimizer.zero_grad, set_to_none)
        for number in range(len(way.batches)):
            script.model.module.get_submodule("head").requires_grad_(number != 1)
            outputs.append(script.run(number))
        return trace_of(outputs, script.model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_may_be_frozen_and_unfrozen(set_to_none: bool) -> None:
    same(CASE, SHARDED, like=WHOLE, by=functools.partial(freeze_in_between, set_to_none=set_to_none), tolerance=0)


def save() -> dict[str, Any]:
    """Return copies, as a state dict refers to the states that go on changing."""
    with training(CASE, SHARDED) as script:
        script.run(0)
        optimizer = script.optimizer
        forms = {
            "list": optimizer.local_state_dict(),
            "own": optimizer.local_state_dict(gather_if_shard=False),
            "whole": optimizer.state_dict(),
        }
        return copy.deepcopy(forms)


def load(way: Way, kept: list[dict[str, Any]]) -> list[dict[int, dict[str, Tensor]]]:
    """Return the whole states after loading each form."""
    results = []
    for form in ("list", "own", "whole"):
        with training(CASE, way) as script:
            script.run(0)
            source = kept[smp.rank()][form] if form == "own" else kept[0][form]
            script.optimizer.load_state_dict(copy.deepcopy(source))
            assert set(script.optimizer.state) <= {each for _, each in script.model.virtual_named_parameters()}
            results.append(copy.deepcopy(script.optimizer.state_dict()["state"]))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_states_are_saved_as_a_list_a_shard_or_whole_and_loaded_by_any_number_of_ranks(size: int) -> None:
    kept = run_ranks(save, 2)
    assert [type(each["list"]["state"]) for each in kept] == [list, dict]
    assert kept[0]["list"]["state"][1].keys() == kept[1]["own"]["state"].keys()
    assert kept[0]["list"]["_smp_is_partial"] is True
    whole = kept[0]["whole"]["state"]
    assert sorted(whole) == sorted({*kept[0]["own"]["state"], *kept[1]["own"]["state"]})
    nothing = {"own": {**kept[0]["own"], "state": {}}}
    for results in run_ranks(load, size, replace(SHARDED, replicas=size), [*kept, nothing, nothing]):
        for states in results:
            torch.testing.assert_close(states, whole, rtol=0, atol=0)


def step_counts(first_frozen: bool, kept: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a rank's shard after two updates, which goes on from `kept`; owners are chosen in the first step."""
    with training(CASE, replace(SHARDED, pipeline=2)) as script:
        if kept is not None:
            script.optimizer.load_state_dict(copy.deepcopy(kept[smp.rank()]))
        for number in range(2):
            script.model.module.get_submodule("head").requires_grad_(number > 0 or not first_frozen)
            script.run(number)
        return copy.deepcopy(script.optimizer.local_state_dict(gather_if_shard=False))


def test_a_pipeline_finds_a_shard_whose_parameter_has_another_owner_now() -> None:
    before = run_ranks(step_counts, 4, True)
    after = run_ranks(step_counts, 4, False, before)
    counts = [{n: int(each["step"]) for own in ranks for n, each in own["state"].items()} for ranks in (before, after)]
    assert set(counts[0].values()) == {1, 2}
    assert counts[1] == {number: count + 2 for number, count in counts[0].items()}


@on_ranks(2)
def test_what_does_not_go_with_sharded_states_is_refused_in_a_sentence() -> None:
    with world(SHARDED):
        model, step, arguments = smp.DistributedModel(build(CASE)), smp.step(CASE.step), batch(CASE, 0, 8)
        step(model, *arguments)
        with pytest.raises((UnsupportedError, UsageError)) as caught:
            step(model, *arguments)
        assert "needs smp.DistributedOptimizer" in caught.value.message
        with pytest.raises((UnsupportedError, UsageError)) as caught:
            smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters())).step(lambda: 0.0)
        assert "LBFGS" in caught.value.message
