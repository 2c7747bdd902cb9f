"""What modules and operations do to their inputs over a pipeline, they do as in one process, or it is refused.

A module may change its input in place, and what it returns may be its input or a view of it. Another rank than the one
that runs it may hold the value, an older copy of it, or a view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import WIDTH, Case, mse_step, vectors
from tests.ranks import RankFailed, run_ranks
from tests.torch.pipeline.training import Setup, run_all

EVENLY = Setup(2, "interleaved", -1, (4, 4))
"""The first half of a model's units on the first rank, the other on the second."""
ANYWHERE = [EVENLY, Setup(2, "interleaved", 3, (4, 4)), Setup(2, "zero_bubble", 5, (4, 4))]


def train(name: str, setups: list[Setup], degree: int) -> int:
    return len(run_all({name: CASES[name]}, setups, degree))


class Changes(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)  # which needs no input for its gradient, so that others may change it again
        return x + self.weight


class HandsOn(nn.Module):
    """Returns its input, or what `function` makes of it, and looks at its weight only in passing."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Shifts(nn.Module):
    """Leaves its input alone, and keeps nothing of it, so that it may be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Between(nn.Module):
    """Lets `function` do something with what the first unit has made, with the others at hand, and goes on with it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.near = Changes()
        self.far = middle
        self.last = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.function(self, self.first(x)))
        return result


def between(function: Callable[[Any, Tensor], Tensor], middle: Callable[[], nn.Module] = Changes) -> Case:
    return Case(lambda: Between(function, middle()), vectors, mse_step)


class Tail(nn.Module):
    """One unit that begins with a module which changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x) * self.weight
        return result


class Keyword(Changes):
    def forward(self, *, hidden: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(hidden["x"])


def then_added(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    y += 1
    return x * 2 + y


def then_assigned(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    y[:, 0] = 0
    return x * 2 + y


def nested(x: Tensor) -> Any:
    return {"same": x, "more": (x[:, 1:], x * 2)}


def nested_changed(model: Any, x: Tensor) -> Tensor:
    out = model.far(x)
    out["more"][0].mul_(3)
    return x + out["same"] + out["more"][1]


def sent_before(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    near = model.near(x)
    return model.far(x) + y + near + x


def viewed_after(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    return y + x.view(-1).view_as(y)


def changed_there(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    y = y + 1
    near = model.near(x)
    x += 1
    return model.far(x) + near + y + x


def written_out(model: Any, x: Tensor) -> Tensor:
    scale, best, where = x.detach() * 1, x.detach()[0] * 1, x[0].long()
    y = model.far(scale) + model.far(best)
    with torch.no_grad():
        torch.add(scale, 1.0, out=scale)
        torch.max(scale, dim=0, out=(best, where))
    return x + model.far(scale) + model.far(best) + y * where


def statistics_changed(model: Any, x: Tensor) -> Tensor:
    statistics = x.detach() * 1
    with torch.no_grad():
        y = model.far(statistics)
    return x * statistics + y


def viewed_later(model: Any, x: Tensor) -> Tensor:
    back = model.near(model.far(x * 1))  # where this comes back, `x` is cut off its graph
    x[:, 0].zero_()
    return x * 2 + back


def sliced(model: Any, x: Tensor) -> Tensor:
    wide = torch.cat([x, x + 1], dim=1)
    left, right = wide[:, :WIDTH], wide[:, WIDTH:]
    return model.far(left) + right + left


def read_by_inference_step(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.inference_mode():
        guess = model(x)
        loss = functional.mse_loss(guess, y)
    return guess, loss


def guarded_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Look once in inference mode, where changes are not counted, before any other call has told what changes."""
    guess, _ = read_by_inference_step(model, x, y)
    return guess, mse_step(model, x, y)


def changed_input_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y) + x.sum()
    model.backward(loss)
    return loss


class ChangesFirst(nn.Module):
    """Changes what every rank holds."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y.sum()
        result: Tensor = self.last(y * 2 + x)
        return result


def added_after(model: Any, x: Tensor) -> Tensor:
    y = model.far(x) + 1
    return y + x


CASES = {
    "a layer that is left out now and then": between(added_after, lambda: NowAndThen(lambda x: x)),
    "a residual around a unit that changes its input": between(lambda model, x: x + model.far(x)),
    "on the other side": between(lambda model, x: model.far(x) + x),
    "on the owner": between(lambda model, x: x + model.near(x)),
    "on the owner, after it was sent": between(sent_before),
    "on both": between(lambda model, x: model.near(x) + model.far(x) + x),
    "changed there, here and between": between(changed_there),
    "a Sequential in a unit": between(lambda model, x: x + model.far(x), Tail),
    "keyword and dict": between(lambda model, x: x + model.far(hidden={"x": x}), Keyword),
    "viewed after it was changed": between(viewed_after),
    "an input handed on, then added to": between(then_added, HandsOn),
    "an input handed on, then assigned to": between(then_assigned, HandsOn),
    "a view of it, then added to": between(then_added, lambda: HandsOn(lambda x: x.view(-1, WIDTH))),
    "a view of it, then assigned to": between(then_assigned, lambda: HandsOn(lambda x: x.view(-1, WIDTH))),
    "nested results": between(nested_changed, lambda: HandsOn(nested)),
    "out": between(written_out, Shifts),
    "without gradients": between(statistics_changed),
    "through a view, in a later segment": between(viewed_later),
    "the other half of it": between(sliced),
    "in inference mode": Case(lambda: Between(changed_there, Changes()), vectors, guarded_step),
    "what every rank holds": Case(lambda: ChangesFirst(Changes()), vectors, changed_input_step),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_change_as_in_one_process(name: str) -> None:
    run_ranks(train, 2, name, ANYWHERE, 2, timeout=120)


# --- models for images, which change nearly everything in place -------------------------------------------------------


class Residual(nn.Module):
    """The basic block of a ResNet: one ReLU, used twice, of which the second changes the sum."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.norm2 = nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)
        self.shortcut = None if given == made else nn.Sequential(nn.Conv2d(given, made, 1), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class Preactivated(nn.Module):
    """A block whose branch begins with a change of what goes past it too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
        self.norm, self.join = nn.BatchNorm2d(width), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        result: Tensor = self.join(torch.cat([x, self.branch(x)], dim=1))
        return result


class ImageNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Preactivated(6))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.pool(self.stem(x))))
        result: Tensor = self.head(functional.dropout(torch.flatten(x.mean((2, 3)), 1), 0.0, self.training, True))
        return result


def images(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    shape = (2 * size, 3, 8, 8)
    targets = torch.randint(6, (2 * size,), generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64), targets


def classes_step(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = functional.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def train_images(setups: list[Setup], degree: int) -> int:
    return len(run_all({"images": Case(ImageNet, images, classes_step)}, setups, degree))


@pytest.mark.parametrize("degree", [2, 4])
def test_models_for_images_train_as_in_one_process(degree: int) -> None:
    setups = [EVENLY, Setup(4, "interleaved", 3, (8, 8)), Setup(2, "zero_bubble", None, (4, 4))]
    run_ranks(train_images, degree, setups, degree, timeout=120)


# --- what cannot be as in one process ---------------------------------------------------------------------------------


class NowAndThen(nn.Module):
    """Does something else with its input each second time."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.weight if self.count % 2 else self.function(x)


class Multiplies(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.weight).sin()


class ChangesCopy(ChangesFirst):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class Detaches(Shifts):
    """Lets `function` cut its input off, after using it, in one of the microbatches."""

    def __init__(self, function: Callable[[Tensor], Any], number: int) -> None:
        super().__init__()
        self.function = function
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.number -= 1
        if self.number == 0:
            self.function(x)
        return result


class Averages(nn.Module):
    """Keeps a mean of its inputs in a parameter that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        with torch.no_grad():
            mean.mul_(0.9).add_(x.mean(0))
        return x * self.weight


def averaged(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.far(x, model.first.bias)
    return result


def seen_before(model: Any, x: Tensor) -> Tensor:
    row = x[0]
    return model.far(x) + row


REFUSED = {
    "a view that lies elsewhere": (between(seen_before), r"shares its memory.*take views of it after that"),
    "a parameter of another rank": (
        between(averaged, Averages),
        r"`far` changed in place a parameter of shape \[6\] that pipeline rank 1.*put both on one rank",
    ),
    "now and then": (
        between(added_after, lambda: NowAndThen(lambda x: x.add_(1))),
        r"`far` changed in place what it was given as tensor 0, float64\[2, 6\], which it did not do the first time",
    ),
    # Without a word, the first rank got no gradient from a later microbatch: what arrives is a leaf there.
    **{
        f"{name}, in microbatch {number}": (
            between(added_after, functools.partial(Detaches, function, number)),
            r"float64\[2, 6\], which pipeline rank 0 made for `far`, was detached in place or frozen there",
        )
        for name, function, number in [
            ("detached", lambda x: x.detach_(), 1),
            ("detached", lambda x: x.detach_(), 2),
            ("frozen", lambda x: x.requires_grad_(not x.is_leaf), 2),  # torch itself refuses it for no leaf
        ]
    },
    "by what needs gradients": (
        Case(lambda: ChangesCopy(Multiplies()), vectors, mse_step),
        r"`first` changed in place a tensor that every pipeline rank holds.*`x.clone\(\)`",
    ),
}


def refused(name: str) -> None:
    run_all({name: REFUSED[name][0]}, [EVENLY], 2)


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_ranks_cannot_follow_are_refused(name: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){REFUSED[name][1]}") as caught:
        run_ranks(refused, 2, name)
    assert "was used outside it" not in str(caught.value), "no rank may take the change for a tensor that leaked"
