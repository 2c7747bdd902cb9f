"""State dicts and checkpoints of a model that lies on several pipeline ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
