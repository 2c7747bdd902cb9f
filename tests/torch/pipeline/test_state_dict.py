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
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.torch.steps import announced
from tests.train import (
    OPTIMIZERS,
    TOLERANCE,
    Trace,
    Training,
    Way,
    batch,
    build,
    check_same,
    reference,
    trace_of,
    world,
)

CASE = MODELS["frozen and unused parameters"]
TWO = Way(pipeline=2, microbatches=2, optimizer="AdamW")
ONE_BATCH = replace(TWO, batches=(8,))


def plain_state(way: Way = TWO) -> dict[str, Tensor]:
    return reference(CASE, way)[0].values


def gather() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    with world(TWO):
        script = Training(CASE, TWO)
        for number in range(len(TWO.batches)):
            script.run(number)
        model = script.model
        whole, first = model.state_dict(), model.state_dict(gather_to_rank0=True)
        return copy.deepcopy((whole, first, model.local_state_dict(), script.optimizer.state_dict()))


def test_full_gathered_and_local_state_dicts() -> None:
    plain = plain_state()
    (full0, first0, local0, optim0), (full1, first1, local1, _) = run_ranks(gather, 2)
    for full in (full0, full1, first0):
        assert list(full) == list(build(CASE).state_dict())
        torch.testing.assert_close(dict(full), plain, rtol=TOLERANCE, atol=TOLERANCE)
    assert first1 == {}
    assert local0.pop("_smp_is_partial") is True
    assert local1.pop("_smp_is_partial") is True
    assert set(local0) | set(local1) == set(plain)
    assert set(local0) != set(plain)
    assert not any(value.isnan().any() for value in [*local0.values(), *local1.values()])
    trained = [each for each in reference(CASE, TWO)[0].gradients.values() if each is not None]
    assert len(optim0["state"]) == len(trained)


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


def count_gathered() -> tuple[int, int, int]:
    """Return what this rank allocates to gather the whole on the first one, what it holds, and what the whole is."""
    with world(ONE_BATCH):
        script = Training(CASE, ONE_BATCH)
        script.run(0)
        model = script.model
        with Allocated() as allocated:
            whole = model.state_dict(gather_to_rank0=True)
        held = sum(each.nbytes for each in [*model.local_parameters(), *model.local_buffers()])
        return allocated.num_bytes, held, sum(each.nbytes for each in whole.values())


def test_gathering_puts_the_whole_model_on_the_first_rank_only() -> None:
    (first, held, whole), second = run_ranks(count_gathered, 2)
    assert whole - held <= first < whole, "the first rank has its own part already"
    assert (second[0], second[2]) == (0, 0)


def load_plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load before the model is partitioned, and after, and return what it is."""
    with world(ONE_BATCH):
        script = Training(CASE, ONE_BATCH)
        model = script.model
        model.load_state_dict(state)
        assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
        script.run(0)
        assert not all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
        model.load_state_dict(state)
        with pytest.raises(UsageError, match="missing"):
            model.load_state_dict({"head.weight": torch.zeros(6, 6)})
        partial = model.local_state_dict()
        model.load_state_dict(partial)
        model.load_state_dict(partial, same_partition_load=True)
        return model.state_dict()


def test_trap_11_a_plain_state_dict_loads_before_and_after_partitioning() -> None:
    state = plain_state()
    for found in run_ranks(load_plain, 2, state):
        assert found.keys() == state.keys()
        assert all(torch.equal(each, state[name]) for name, each in found.items())


def wrap_optimizer(when: str) -> dict[str, Tensor]:
    """Make the optimizer before the model is wrapped, after, or when it has been partitioned."""
    with world(TWO):
        module = build(CASE)
        optimizer = optimizer_of(module) if when == "before" else None
        model: Any = smp.DistributedModel(module)
        optimizer = optimizer_of(model) if when == "after" else optimizer
        step = smp.step(CASE.step)
        for number, size in enumerate(TWO.batches):
            model.zero_grad()
            step(model, *batch(CASE, number, size))
            optimizer = optimizer or optimizer_of(model)
            optimizer.step()
        assert optimizer is not None
        assert all(model.holds(parameter) for parameter in optimizer.state), "states of parameters of other ranks"
        return dict(model.state_dict())


def optimizer_of(module: nn.Module) -> smp.DistributedOptimizer:
    return smp.DistributedOptimizer(OPTIMIZERS["AdamW"](module.parameters()))


@pytest.mark.parametrize("when", ["before", "after", "partitioned"])
def test_the_optimizer_may_be_made_before_or_after_the_model_or_its_first_step(when: str) -> None:
    for state in run_ranks(wrap_optimizer, 2, when):
        torch.testing.assert_close(state, plain_state(), rtol=TOLERANCE, atol=TOLERANCE)


def save(way: Way) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Train all but the last batch; return what came out, and state dicts."""
    with world(way):
        script = Training(CASE, way)
        outputs = [script.run(number) for number in range(len(way.batches) - 1)]
        return copy.deepcopy((outputs, script.model.state_dict(), script.optimizer.state_dict()))


def load_and_go_on(way: Way, outputs: list[Any], weights: dict[str, Any], states: dict[str, Any]) -> Trace:
    with world(way):
        script = Training(CASE, way)
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


def announce_partition() -> list[str]:
    with announced() as lines, world(ONE_BATCH):
        script = Training(CASE, ONE_BATCH)
        script.run(0)
        script.run(0)
    return lines


def test_partition_assignments_are_logged_once_as_smp_v1_did() -> None:
    first, second = run_ranks(announce_partition, 2)
    assert first.count("Partition assignments:") == 1
    assert first[1] == "  stem.0: 0"
    assert "  head: 1" in first
    assert second == []
