"""State dicts and checkpoints of a model that lies on several pipeline ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.models import MODELS, Case
from tests.ranks import run_ranks
from tests.torch.steps import announced, in_a_row, on_ranks, train_step, wrap
from tests.train import (
    OPTIMIZERS,
    TOLERANCE,
    Trace,
    Way,
    batch,
    build,
    check_same,
    flat,
    reference,
    same,
    trace_of,
    training,
    world,
)

CASE = MODELS["frozen and unused parameters"]
TWO = Way(pipeline=2, microbatches=2, optimizer="AdamW")
ONE_BATCH = replace(TWO, batches=(8,))


@pytest.fixture(scope="module")
def plain() -> Trace:
    return reference(CASE, TWO)[0]


@on_ranks(2)
def test_full_gathered_and_local_state_dicts(plain: Trace) -> None:
    with training(CASE, TWO) as trained:
        for number in range(len(TWO.batches)):
            trained.run(number)
        whole, first = trained.model.state_dict(), trained.model.state_dict(gather_to_rank0=True)
        local, states = trained.model.local_state_dict(), trained.optimizer.state_dict()["state"]
        assert local.pop("_smp_is_partial") is True
        parts = smp.allgather(set(local))
        for full in (whole, first) if smp.rank() == 0 else (whole,):
            assert list(full) == list(build(CASE).state_dict())
            torch.testing.assert_close(dict(full), plain.values, rtol=TOLERANCE, atol=TOLERANCE)
        assert parts[0] | parts[1] == set(plain.values)
        assert parts[0] != set(plain.values)
        assert not any(value.isnan().any() for value in local.values())
        if smp.rank() == 0:
            assert len(states) == sum(each is not None for each in plain.gradients.values())
        else:
            assert first == {}


class Allocated(TorchDispatchMode):
    """Adds up the storages of numbers that operations make; pickled names and headers are bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        given = {each.untyped_storage()._cdata for each in tensors}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            is_made = isinstance(each, Tensor) and each.untyped_storage()._cdata not in given
            if is_made and each.is_floating_point():
                self.num_bytes += each.untyped_storage().nbytes()
        return result


@on_ranks(2)
def test_gathering_puts_the_whole_model_on_the_first_rank_only() -> None:
    with training(CASE, ONE_BATCH) as trained:
        trained.run(0)
        model = trained.model
        with Allocated() as allocated:
            gathered = model.state_dict(gather_to_rank0=True)
        if smp.pp_rank() > 0:
            assert (allocated.num_bytes, len(gathered)) == (0, 0)
            return
        held = sum(each.nbytes for each in [*model.local_parameters(), *model.local_buffers()])
        whole = sum(each.nbytes for each in gathered.values())
        assert whole - held <= allocated.num_bytes < whole, "the first rank has its own part already"


@on_ranks(2)
def test_trap_11_a_plain_state_dict_loads_before_and_after_partitioning(plain: Trace) -> None:
    weights = plain.values

    def is_loaded() -> bool:
        return all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())

    with training(CASE, ONE_BATCH) as trained:
        model = trained.model
        model.load_state_dict(weights)
        assert is_loaded()
        trained.run(0)
        assert not is_loaded()
        model.load_state_dict(weights)
        with pytest.raises(UsageError, match="missing"):
            model.load_state_dict({"head.weight": torch.zeros(6, 6)})
        # Each rank said that all of the others' was missing, and nothing of what does not fit.
        loaded = model.load_state_dict({"head.weight": weights["head.weight"], "old": torch.zeros(1)}, strict=False)
        assert loaded.missing_keys == [name for name in weights if name != "head.weight"]
        assert loaded.unexpected_keys == ["old"]
        partial = model.local_state_dict()
        model.load_state_dict(partial)
        model.load_state_dict(partial, same_partition_load=True)
        assert model.state_dict().keys() == weights.keys()
        assert is_loaded()


def make_the_optimizer_after_a_step(case: Case, way: Way) -> Trace:
    with world(way):
        model, step, outputs, optimizer = smp.DistributedModel(build(case)), smp.step(case.step), [], None
        for number, size in enumerate(way.batches):
            model.zero_grad()
            outputs.append(flat(step(model, *batch(case, number, size))))
            optimizer = optimizer or smp.DistributedOptimizer(OPTIMIZERS[way.optimizer](model.parameters()))
            optimizer.step()
        return trace_of(outputs, model)


def test_the_optimizer_may_be_made_before_the_model_or_after_its_first_step() -> None:
    same(CASE, replace(TWO, early=True))
    same(CASE, TWO, by=make_the_optimizer_after_a_step)


def save(way: Way) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Train all but the last batch; return what came out, and state dicts."""
    with training(CASE, way) as script:
        outputs = [script.run(number) for number in range(len(way.batches) - 1)]
        return copy.deepcopy((outputs, script.model.state_dict(), script.optimizer.state_dict()))


def load_and_go_on(way: Way, outputs: list[Any], weights: dict[str, Any], states: dict[str, Any]) -> Trace:
    with training(CASE, way) as script:
        script.model.load_state_dict(weights)
        script.optimizer.load_state_dict(states)
        outputs = [*outputs, script.run(len(way.batches) - 1)]
        held = set(map(id, script.model.local_parameters()))
        assert {id(parameter) for parameter in script.optimizer.state} <= held, "states of other ranks"
        return trace_of(outputs, script.model)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 4)])
def test_training_goes_on_with_another_number_of_ranks(old: int, new: int) -> None:
    saved = run_ranks(save, old, replace(TWO, pipeline=old))[0]
    for trace in run_ranks(load_and_go_on, new, replace(TWO, pipeline=new), *saved):
        check_same(trace, reference(CASE, TWO)[0])


@on_ranks(2)
def test_partition_assignments_are_logged_once_as_smp_v1_did() -> None:
    with announced() as lines, training(CASE, ONE_BATCH) as trained:
        trained.run(0)
        trained.run(0)
        is_first = smp.rank() == 0
    if is_first:
        assert lines.count("Partition assignments:") == 1
        assert lines[1] == "  stem.0: 0"
        assert "  head: 1" in lines
    else:
        assert lines == []


@on_ranks(2)
def test_an_optimizer_loads_the_states_of_all_stages_or_none() -> None:
    # Of a job with fewer stages the moments of the others' weights began anew.
    model = in_a_row(nn.Linear(2, 2), nn.Linear(2, 2), microbatches=2)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train_step(model, torch.ones(2, 2))
    optimizer.step()
    first, second = smp.allgather(optimizer.local_state_dict())
    with pytest.raises(UsageError, match="lack those of stage 1: they were saved by 2 stages, and this job has 2"):
        optimizer.load_state_dict(first)
    optimizer.load_state_dict((second, first)[smp.pp_rank()])
    whole = wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ddp=True)
    with pytest.raises(UsageError, match="and this job has 1"):
        smp.DistributedOptimizer(torch.optim.Adam(whole.parameters())).load_state_dict(first)
