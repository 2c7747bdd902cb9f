"""What waits for updates that still run: they end only when somebody is seen to wait for them.

Nothing depends on time: where nobody waits, the other order is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import _update_param_group_val

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload_model import optimizer as module
from smpkit.torch.offload_model.slices import Slice

GROUPS = torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=0.5).state_dict()["param_groups"]
GROUPS[0]["params"] = [0, 1]
ZEROS = {f"_model.{index}.model_shard.0.weight": torch.zeros(6, 6) for index in range(2)}
SECONDS = 60.0
"""After which a test fails that would else hang."""


def _another(model: OffloadModel, optimizer: OffloadOptimizer, held: list[nn.Parameter]) -> OffloadOptimizer:
    return OffloadOptimizer(model, torch.optim.SGD, [{"params": held}], lr=0.5, num_threads=1)


LOOKS: dict[str, Callable[..., object]] = {
    "synchronize": lambda model, optimizer, held: model.synchronize(),
    "parameters": lambda model, optimizer, held: list(model.parameters()),
    "state": lambda model, optimizer, held: model.state_dict(),
    "inner-state": lambda model, optimizer, held: model._model[0].state_dict(),
    "load": lambda model, optimizer, held: model.load_state_dict(ZEROS),
    "eval": lambda model, optimizer, held: model.eval(),
    "optimizer-state": lambda model, optimizer, held: optimizer.state_dict(),
    "optimizer-load": lambda model, optimizer, held: optimizer.load_state_dict({"state": {}, "param_groups": GROUPS}),
    "forward": lambda model, optimizer, held: model(torch.ones(2, 6, dtype=model.model_slices[0].dtype)),
    "another": _another,
}


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let updates wait until somebody is seen to wait for them; return the slices that are updated."""
    somebody_waits, updated = Event(), list[int]()
    update, wait = module._update, Slice.wait_for_updates

    def held_up(link: Any, part: Any, *others: Any) -> None:
        assert somebody_waits.wait(SECONDS)
        update(link, part, *others)
        updated.append(part.piece.index)

    def seen(piece: Slice) -> None:
        if piece.updates:
            somebody_waits.set()
        wait(piece)

    monkeypatch.setattr(module, "_update", held_up)
    monkeypatch.setattr(Slice, "wait_for_updates", seen)
    yield updated
    somebody_waits.set()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_looks_at_weights_waits_for_their_updates(look: str, dtype: torch.dtype | None, updated: list[int]) -> None:
    """Also another optimizer, which would go on with those from before the step."""
    layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model = OffloadModel(layers, torch.device("cpu"), num_slices=2, dtype=dtype)
    model.model_slices[0].dtype = dtype or torch.float32  # type: ignore[assignment]
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.5, num_threads=1)
    held = list(model.parameters())
    before = [parameter.detach().clone() for parameter in held]
    model(torch.ones(2, 6, dtype=dtype)).sum().backward()
    optimizer.step()
    assert not updated
    kept = LOOKS[look](model, optimizer, held)
    assert len(updated) == 2
    assert not any(torch.equal(parameter, old) for parameter, old in zip(held, before, strict=True))
    del kept


class Interrupted(Future[None]):
    """Ctrl-C ends each wait for it."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            raise KeyboardInterrupt
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            raise KeyboardInterrupt
        super().result(timeout)


def test_after_an_interrupt_the_next_one_waits_for_the_update() -> None:
    """In a notebook, Ctrl-C ends the wait and not the update: the next forward would read weights half updated."""
    model = OffloadModel([nn.Linear(1, 1)], "cpu")
    piece, update = model._engine.slices[0], Interrupted()
    piece.updates.append(update)
    with pytest.raises(KeyboardInterrupt):
        model.synchronize()
    assert piece.updates == [update]
    update.set_result(None)
    model.synchronize()
    assert not piece.updates


@pytest.mark.parametrize("is_tensor", [False, True])
def test_an_update_keeps_the_learning_rate_of_its_step(is_tensor: bool, updated: list[int]) -> None:
    """Also where no forward comes before the next step, as with gradients from elsewhere."""
    layer = nn.Linear(1, 1, bias=False)
    lr = torch.tensor(0.5) if is_tensor else 0.5
    optimizer = OffloadOptimizer(OffloadModel([layer], "cpu"), torch.optim.SGD, lr=lr, num_threads=1)
    nn.init.zeros_(layer.weight)
    for rate in (0.5, 0.25):
        _update_param_group_val(optimizer.param_groups[0], "lr", rate)  # as schedulers do: a tensor in place
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()
    optimizer.state_dict()  # waits
    assert (updated, layer.weight.item()) == ([0, 0], -0.75)
