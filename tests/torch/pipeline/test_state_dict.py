"""State dicts and checkpoints of a model that lies on several pipeline ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.models import MODELS, Case
from tests.ranks import run_ranks
from tests.torch.steps import announced, on_ranks
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


def gather() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    with training(CASE, TWO) as trained:
        for number in range(len(TWO.batches)):
            trained.run(number)
        model = trained.model
        whole, first = model.state_dict(), model.state_dict(gather_to_rank0=True)
        return copy.deepcopy((whole, first, model.local_state_dict(), trained.optimizer.state_dict()))


def test_full_gathered_and_local_state_dicts(plain: dict[str, Tensor]) -> None:
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


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return reference(CASE, TWO)[0].values


@on_ranks(2)
def test_trap_11_a_plain_state_dict_loads_before_and_after_partitioning(plain: dict[str, Tensor]) -> None:
    def is_loaded() -> bool:
        return all(torch.equal(each, plain[name]) for name, each in model.state_dict().items())

    with training(CASE, ONE_BATCH) as trained:
        model = trained.model
        model.load_state_dict(plain)
        assert is_loaded()
        trained.run(0)
        assert not is_loaded()
        model.load_state_dict(plain)
        with pytest.raises(UsageError, match="missing"):
            model.load_state_dict({"head.weight": torch.zeros(6, 6)})
        # Each rank said that all of the others' was missing, and nothing of what does not fit.
        loaded = model.load_state_dict({"head.weight": plain["head.weight"], "old": torch.zeros(1)}, strict=False)
        assert loaded.missing_keys == [name for name in plain if name != "head.weight"]
        assert loaded.unexpected_keys == ["old"]
        partial = model.local_state_dict()
        model.load_state_dict(partial)
        model.load_state_dict(partial, same_partition_load=True)
        assert model.state_dict().keys() == plain.keys()
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
