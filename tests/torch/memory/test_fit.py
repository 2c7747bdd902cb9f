"""What `smpkit.fit` refuses, measures, says and leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit
import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.plan.tune.chain import Choice
from smpkit.testing import EmulatedLink
from smpkit.torch.core.module_call import ModuleCall
from tests.models import Does

WIDTH, BATCH = 8, 4
ROW = BATCH * WIDTH * 4


def masked_sigmoid(own: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Save the input (for the weight's gradient) and the result of the sigmoid: twice the input."""
    return torch.sigmoid(own.linear(x)) * mask


def saving_layer() -> Any:
    return Does(masked_sigmoid, linear=nn.Linear(WIDTH, WIDTH))


class Model(nn.Module):
    """Layers that share a mask; returns what nobody can look into, if asked to."""

    def __init__(self, layers: Iterable[nn.Module] | None = None, *, opaque: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [saving_layer() for _ in range(3)])
        self.opaque = opaque

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(BATCH, WIDTH)
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(sum=x.sum) if self.opaque else x


def run(model: nn.Module, *, updates: nn.Module | None = None) -> None:
    """Train a model, and `updates`, if not None, in its place."""
    optimizer = torch.optim.Adam((updates or model).parameters())
    for _ in range(8):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        if updates is not None:
            updates(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_measures_what_layers_save_and_are_given() -> None:
    model = Model()
    fitted = smpkit.fit(model, device_gib=1)
    run(model)
    found = fitted.report()
    # The mask is there once: it counts for the first layer that is given and saves it.
    assert [each.input_bytes for each in found.layers] == [2 * ROW, ROW, ROW]
    assert [each.saved_bytes for each in found.layers] == [3 * ROW, 2 * ROW, 2 * ROW]
    weights = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    # Weights, their gradients, Adam's two states and its counters of steps.
    assert found.other_bytes == 4 * weights + 6 * 4
    assert found.fits
    assert found.device_bytes == found.other_bytes + 7 * ROW
    assert [each.choice for each in found.layers] == [Choice.KEEP] * 3
    assert "3 layers: 3 kept" in str(found)


class Clock(EmulatedLink):
    """A link without speed, and a clock that stands still while nobody moves it."""

    time = 0

    def stamp(self) -> int:
        return self.time

    def seconds_between(self, first: int, last: int) -> float:
        return last - first


class Timed(nn.Module):
    """A layer that takes 4 s forward, 3 s when it is recomputed, since that ends early, and 7 s backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight, self.clock = nn.Parameter(torch.ones(1)), clock

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        is_again = torch._C._current_graph_task_id() != -1
        self.clock.time += 3 if is_again else 4

        def passed(gradient: Tensor) -> Tensor:
            self.clock.time += 7
            return gradient

        y = torch.tanh(torch.tanh(torch.tanh(x * self.weight)))
        y.register_hook(passed)
        return y


@pytest.mark.parametrize("slow", [None, 0, 1, 2], ids=["even", "first slow", "second slow", "third slow"])
def test_one_slow_step_changes_no_prediction(slow: int | None) -> None:
    clock = Clock()
    model, x = Model(Timed(clock) for _ in range(4)), torch.ones(BATCH, WIDTH)
    weights_and_gradients = 2 * 4 * 4
    # Of two layers the input and three results, which have gone when another is computed again; of those the input.
    kept = 2 * (4 + 1) * ROW
    fitted = smpkit.fit(model, device_gib=(weights_and_gradients + kept) / 2**30, link=clock, lead=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    taken = []
    for step in range(10):
        began = clock.time
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.time += 5  # whatever else a step does
        taken.append(clock.time - began)
        if slow is not None and step == 3 + slow:
            clock.time += 1000
    found = fitted.report()
    assert [each.forward_seconds for each in found.layers] == [4.0] * 4
    assert found.least_seconds == taken[3] == 4 * (4 + 3 + 7) + 5
    assert found.kept_seconds == 4 * (4 + 7) + 5
    assert [each.choice for each in found.layers].count(Choice.KEEP) == 2
    assert found.step_seconds == taken[-1] == taken[3] - 2 * 3


def test_a_report_never_raises_and_says_when_there_is_something_to_report() -> None:
    """`print(fitted.report())` had ended a run of four steps with a traceback."""
    fitted = smpkit.fit(Model(), device_gib=1)
    assert repr(fitted) == "Fitted(Model, 3 layers: not chosen yet)"
    assert str(fitted.report()).splitlines() == [
        "3 layers: 3 recomputed",
        "`fit` decides after about six steps that update; this run had 0",
    ]
    fitted.load_state_dict(fitted.state_dict())
    assert repr(fitted) == "Fitted(Model, 3 layers: 3 recomputed)"
    assert "chosen by an earlier run: this one has measured nothing" in str(fitted.report())


def test_one_sentence_where_it_cannot_fit() -> None:
    model = Model()
    fitted = smpkit.fit(model, device_gib=1e-6)
    with pytest.warns(UserWarning, match=r"does not fit: its layers hold .*, the rest takes .*, and the"):
        run(model)
    found = fitted.report()
    assert not found.fits
    assert "does not fit: " in str(found)
    assert "needed even with every layer holding as little as it can, 1.0 KiB available" in str(found)


def test_the_model_is_as_before_once_it_is_removed() -> None:
    model = Model()
    before = list(model.state_dict())
    fitted = smpkit.fit(model, device_gib=1)
    assert list(model.state_dict()) == before
    assert type(pickle.loads(pickle.dumps(model))) is Model
    assert ModuleCall.of(copy.deepcopy(model).layers[0]).checkpointing is None
    run(model)
    fitted.remove()
    assert ModuleCall.of(model.layers[0]).checkpointing is None
    run(model)
    smpkit.fit(model, device_gib=1).remove()


def test_a_model_that_is_dropped_before_the_choice_goes() -> None:
    """accelerate's `find_executable_batch_size` makes another one when the first step finds no memory."""
    model = Model()
    smpkit.fit(model, device_gib=1)
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_evaluation_is_left_alone() -> None:
    model = Model()
    smpkit.fit(model, device_gib=1)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(BATCH, WIDTH)), copy.deepcopy(model)(torch.ones(BATCH, WIDTH)))


def test_an_optimizer_of_another_model_is_no_update() -> None:
    model = Model()
    fitted = smpkit.fit(model, device_gib=1)
    run(model, updates=nn.Linear(2, 2))
    assert not fitted.has_chosen


def test_without_updates_that_torch_tells_of_it_begins_all_the_same() -> None:
    model = Model()
    fitted = smpkit.fit(model, device_gib=1)
    for _ in range(70):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
    assert fitted.has_chosen


def changed(change: Callable[[Model], object]) -> Callable[[], nn.Module]:
    """Return what makes a model that something has been done to."""

    def make() -> nn.Module:
        model = Model()
        change(model)
        return model

    return make


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no model": (lambda: 3, {}, "fit takes a torch.nn.Module, got int"),
    "no layers": (lambda: nn.Linear(2, 2), {}, "Linear has no list of layers"),
    "checkpointed": (
        changed(lambda model: smp.set_activation_checkpointing(model.layers)),
        {},
        "is checkpointed, or fitted, already",
    ),
    "fitted": (changed(lambda model: smpkit.fit(model, device_gib=1)), {}, "is checkpointed, or fitted, already"),
    "compiled": (changed(lambda model: model.layers[0].compile(backend="eager")), {}, "`layers.0` is compiled"),
    "its own": (
        changed(lambda model: vars(model).update(gradient_checkpointing=True)),
        {},
        "checkpoints its layers itself",
    ),
    "no device_gib": (Model, {"device_gib": None}, "cpu does not tell how much memory it has"),
    "negative": (Model, {"device_gib": -1}, "device_gib is -1; it must be a number of GiB above 0"),
    "no number": (Model, {"device_gib": "24"}, "device_gib is '24'; it must be a number of GiB above 0"),
    "host": (Model, {"host_gib": 0}, "host_gib is 0; it must be a number of GiB above 0"),
    "lead": (Model, {"lead": 0}, "`lead` is 0"),
    "strange layer": (Model, {"layers": [nn.Linear(2, 2)]}, "a layer is no part of Model, or is all of it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects_what_it_cannot_fit(case: str) -> None:
    make, options, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        smpkit.fit(make(), **{"device_gib": 1, **options})


def test_a_trainer_that_switches_on_checkpointing_later_is_refused() -> None:
    model = Model()
    smpkit.fit(model, device_gib=1)
    vars(model).update(gradient_checkpointing=True)
    with pytest.raises(UsageError, match="checkpoints its layers itself"):
        model(torch.ones(BATCH, WIDTH))


def test_layers_inside_each_other_are_refused() -> None:
    model = Model()
    outer, inner = model.get_submodule("layers.0"), model.get_submodule("layers.0.linear")
    with pytest.raises(UsageError, match=r"`layers.0` contains another"):
        smpkit.fit(model, device_gib=1, layers=[outer, inner])


def test_choices_for_other_layers_are_refused() -> None:
    fitted = smpkit.fit(Model(), device_gib=1)
    with pytest.raises(UsageError, match=r"for other layers: h.0, layers.0, layers.1"):
        fitted.load_state_dict({"h.0": "keep"})


def test_it_chooses_where_nobody_can_look_into_the_output() -> None:
    model = Model(opaque=True)
    fitted = smpkit.fit(model, device_gib=1)
    run(model)
    assert fitted.has_chosen
