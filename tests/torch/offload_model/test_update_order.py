"""What waits for updates that still run: kernels here end only when somebody is seen to wait for them.

Nothing depends on time: where nobody waits, the other order is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload_model import kernels
from smpkit.torch.offload_model.kernels import FlatRange, Rule, tiled

GROUPS = torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=0.5).state_dict()["param_groups"]
GROUPS[0]["params"] = [0, 1]
ZEROS = {f"_model.{index}.model_shard.0.weight": torch.zeros(6, 6) for index in range(2)}
SECONDS = 60.0
"""After which a test fails that would else hang."""


def make(num_slices: int) -> tuple[OffloadModel, OffloadOptimizer]:
    """Return a model whose last layer has the first one's weight, one layer a slice, and its optimizer."""
    layers = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(num_slices)])
    layers[-1].weight = layers[0].weight
    model = OffloadModel(layers, torch.device("cpu"), num_slices=num_slices)
    # A thread more than what is held up.
    return model, OffloadOptimizer(model, torch.optim.SGD, lr=0.5, num_threads=2)


@pytest.mark.usefixtures("place")
def test_a_slice_waits_for_the_update_of_the_slice_that_owns_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(4)
    workers, tied = optimizer._workers, model._engine.slices[0].weights.layout.parameters[0]
    somebody_waits, updated = Event(), Event()

    def held_up(rule: Rule, span: FlatRange) -> None:
        is_held_up = is_tied(span)
        assert not is_held_up or somebody_waits.wait(SECONDS)
        tiled(rule, span)
        if is_held_up:
            updated.set()

    def is_tied(span: FlatRange) -> bool:
        return span.master.untyped_storage().data_ptr() == tied.untyped_storage().data_ptr()

    wait: Callable[[Future[None], str], None] = workers.wait

    def seen(work: Future[None], what: str) -> None:
        if work in optimizer._updates[0]:
            somebody_waits.set()
        wait(work, what)

    monkeypatch.setattr(kernels, "one_pass", held_up)
    monkeypatch.setattr(workers, "wait", seen)
    before = tied.detach().clone()
    try:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert len(optimizer._updates[0]) == 1
        assert not updated.is_set()
        with model._engine.on_device(3, fresh=True, next_index=None) as weights:
            assert updated.is_set()
            assert not torch.equal(weights[0], before)
            assert torch.equal(weights[0], tied)
    finally:
        somebody_waits.set()


def _another(model: OffloadModel, optimizer: OffloadOptimizer, held: list[nn.Parameter]) -> OffloadOptimizer:
    return OffloadOptimizer(model, torch.optim.SGD, [{"params": held}], lr=0.5, num_threads=1)


@pytest.mark.parametrize(
    "look",
    [
        lambda model, optimizer, held: model.synchronize(),
        lambda model, optimizer, held: list(model.parameters()),
        lambda model, optimizer, held: model.state_dict(),
        lambda model, optimizer, held: model.load_state_dict(ZEROS),
        lambda model, optimizer, held: model.eval(),
        lambda model, optimizer, held: optimizer.state_dict(),
        lambda model, optimizer, held: optimizer.load_state_dict({"state": {}, "param_groups": GROUPS}),
        lambda model, optimizer, held: optimizer.__del__(),
        _another,
    ],
    ids=["synchronize", "parameters", "state", "load", "eval", "optimizer-state", "optimizer-load", "end", "another"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_looks_at_weights_waits_for_their_updates(
    look: Callable[..., object], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also another optimizer, which copies them: it would go on with those from before the step."""
    layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model = OffloadModel(layers, torch.device("cpu"), num_slices=2, dtype=dtype)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.5, num_threads=1)
    held = list(model.parameters())
    somebody_waits, updated = Event(), list[FlatRange]()
    wait: Callable[[Future[None], str], None] = optimizer._workers.wait

    def held_up(rule: Rule, span: FlatRange) -> None:
        assert somebody_waits.wait(SECONDS)
        tiled(rule, span)
        updated.append(span)

    def seen(work: Future[None], what: str) -> None:
        somebody_waits.set()
        wait(work, what)

    monkeypatch.setattr(kernels, "one_pass", held_up)
    monkeypatch.setattr(optimizer._workers, "wait", seen)
    before = [parameter.detach().clone() for parameter in held]
    try:
        model(torch.ones(2, 6, dtype=dtype)).sum().backward()
        optimizer.step()
        assert not updated
        made = look(model, optimizer, held)
        assert len(updated) == 2
    finally:
        somebody_waits.set()
    assert not any(torch.equal(parameter, old) for parameter, old in zip(held, before, strict=True))
    del made
