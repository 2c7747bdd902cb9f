"""State dicts and checkpoints of a model that lies on several pipeline ranks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.ranks import run_ranks
from tests.transparency.models import batch, build, loss_of, optimizer_of


@smp.step
def train_step(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss)
    return loss


def start(degree: int = 2) -> tuple[smp.DistributedModel, smp.DistributedOptimizer]:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(build())
    return model, smp.DistributedOptimizer(optimizer_of(model))


def train(model: smp.DistributedModel, optimizer: smp.DistributedOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(train_step(model, *batch(step)).reduce_mean().item())
        optimizer.step()
    return losses


def plain_state() -> dict[str, torch.Tensor]:
    module = build()
    optimizer = optimizer_of(module)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(module, *batch(step)).backward()
        optimizer.step()
    return module.state_dict()


def gather() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    model, optimizer = start()
    train(model, optimizer, range(2))
    return model.state_dict(), model.state_dict(gather_to_rank0=True), model.local_state_dict(), optimizer.state_dict()


def test_full_gathered_and_local_state_dicts() -> None:
    plain = plain_state()
    (full0, first0, local0, optim0), (full1, first1, local1, _) = run_ranks(gather, 2)
    for full in (full0, full1, first0):
        assert list(full) == list(plain)
        for name, value in plain.items():
            torch.testing.assert_close(full[name], value, rtol=1e-11, atol=1e-11)
    assert first1 == {}
    assert local0.pop("_smp_is_partial") is True
    assert local1.pop("_smp_is_partial") is True
    assert set(local0) | set(local1) == set(plain)
    assert set(local0) != set(plain)
    assert not any(value.isnan().any() for value in [*local0.values(), *local1.values()])
    trained = [name for name, p in build().named_parameters() if p.requires_grad and name != "unused"]
    assert len(optim0["state"]) == len(trained)


class Allocated(TorchDispatchMode):
    """Adds up the storages of numbers that operations make; pickled names and headers are bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = {each.untyped_storage()._cdata for each in tensors}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            is_made = isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given
            if is_made and each.is_floating_point():
                self.num_bytes += each.untyped_storage().nbytes()
        return result


def count_gathered() -> tuple[int, int, int]:
    """Return what this rank allocates to gather the whole on the first one, what it holds, and what the whole is."""
    model, optimizer = start(4)
    train(model, optimizer, range(1))
    with Allocated() as allocated:
        whole = model.state_dict(gather_to_rank0=True)
    held = sum(each.nbytes for each in [*model.local_parameters(), *model.local_buffers()])
    return allocated.num_bytes, held, sum(each.nbytes for each in whole.values())


def test_gathering_puts_the_whole_model_on_the_first_rank_only() -> None:
    (first, held, whole), *others = run_ranks(count_gathered, 4)
    assert whole - held <= first < whole, "the first rank has its own part already"
    for allocated, _, gathered in others:
        assert allocated == 0
        assert gathered == 0


def load_plain_and_train() -> list[float]:
    model, optimizer = start()
    model.load_state_dict(plain_state())
    return train(model, optimizer, range(2, 3))


def load_after_partition() -> list[float]:
    model, optimizer = start()
    train(model, optimizer, range(1))
    model.load_state_dict(plain_state())
    with pytest.raises(UsageError, match="missing"):
        model.load_state_dict({"norm.weight": torch.zeros(8)})
    partial = model.local_state_dict()
    model.load_state_dict(partial)
    model.load_state_dict(partial, same_partition_load=True)
    return train(model, smp.DistributedOptimizer(optimizer_of(model)), range(2, 3))


def test_trap_11_a_plain_state_dict_loads_before_and_after_partitioning() -> None:
    module = build()
    module.load_state_dict(plain_state())
    expected = loss_of(module, *batch(2)).item()
    for losses in [*run_ranks(load_plain_and_train, 2), *run_ranks(load_after_partition, 2)]:
        assert losses[0] == pytest.approx(expected, abs=1e-10)


def wrap_optimizer(when: str) -> dict[str, torch.Tensor]:
    """Make the optimizer before the model is wrapped, after, or when it has been partitioned."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    module = build()
    early = optimizer_of(module) if when == "before" else None
    optimizer = None if early is None else smp.DistributedOptimizer(early)
    model = smp.DistributedModel(module)
    if when == "after":
        optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for step in range(3):
        model.zero_grad()
        train_step(model, *batch(step))
        if optimizer is None:
            optimizer = smp.DistributedOptimizer(optimizer_of(model))
        optimizer.step()
    assert optimizer is not None
    held = {id(parameter) for parameter in model.local_parameters()}
    assert {id(parameter) for parameter in optimizer.state} <= held, "states of parameters of other ranks"
    return model.state_dict()


def test_the_optimizer_may_be_made_before_or_after_the_model_or_its_first_step() -> None:
    first = run_ranks(wrap_optimizer, 2, "before")[0]
    for when in ("after", "partitioned"):
        for state in run_ranks(wrap_optimizer, 2, when):
            assert all(torch.equal(value, first[name]) for name, value in state.items()), when


def interrupt_plain(degree: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    model, optimizer = start(degree)
    train(model, optimizer, range(2))
    # As torch's, they hold the tensors themselves, which training goes on to change.
    model_state, optimizer_state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return train(model, optimizer, range(2, 4)), model_state, optimizer_state


def go_on(degree: int, model_state: dict[str, Any], optimizer_state: dict[str, Any]) -> list[float]:
    model, optimizer = start(degree)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    losses = train(model, optimizer, range(2, 4))
    assert all(model.holds(parameter) for parameter in optimizer.state), "states of parameters of other ranks"
    return losses


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_training_goes_on_with_another_number_of_ranks(old: int, new: int) -> None:
    losses, model_state, optimizer_state = run_ranks(interrupt_plain, old, old)[0]
    for resumed in run_ranks(go_on, new, new, model_state, optimizer_state):
        assert resumed == pytest.approx(losses, abs=1e-12)


def save(path: Path) -> list[float]:
    model, optimizer = start()
    train(model, optimizer, range(2))
    smp.save_checkpoint(path, "two", model=model, optimizer=optimizer, user_content={"step": 2})
    smp.save_checkpoint(path, "whole", partial=False, model=model, optimizer=optimizer)
    return train(model, optimizer, range(2, 5))


def resume(path: Path) -> list[float]:
    model, optimizer = start()
    content = smp.resume_from_checkpoint(path, "two")
    return train(model, optimizer, range(content["step"], 5))


def test_a_resumed_pipeline_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    (expected, _), (losses, other) = run_ranks(save, 2, tmp_path), run_ranks(resume, 2, tmp_path)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert other == losses


def test_a_full_checkpoint_of_a_pipeline_loads_into_the_plain_model(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    stored = torch.load(tmp_path / "whole", weights_only=True)
    module = build()
    module.load_state_dict(stored.get("model", stored))
    torch.testing.assert_close(module.norm.weight, plain_state()["norm.weight"], rtol=1e-11, atol=1e-11)
    assert isinstance(module, nn.Module)


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def announce_partition() -> list[str]:
    kept = Kept()
    logger = logging.getLogger("smpkit.announce")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    model, optimizer = start()
    train(model, optimizer, range(2))
    return kept.lines


def test_partition_assignments_are_logged_once_as_smp_v1_did() -> None:
    first, second = run_ranks(announce_partition, 2)
    assert first.count("Partition assignments:") == 1
    assert first[1] == "  embedding: 0"
    assert "  shrink: 1" in first
    assert second == []
