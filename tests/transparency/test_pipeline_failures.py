"""What goes wrong on one pipeline rank ends every rank within seconds, with an error that names rank and cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import RemoteError, UsageError
from tests.deadlines import facts, wait_shortly
from tests.models import WIDTH, Stack, block, mse_step, vectors
from tests.ranks import run_ranks
from tests.torch.steps import MANY_SECONDS, error_of, in_a_row, on_ranks


class Switch(nn.Linear):
    """Does what it is told, where it lies."""

    trouble: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.trouble is not None:
            self.trouble()
        return super().forward(x)


def begin(*layers: nn.Module, around: nn.Module | None = None) -> Any:
    """Return a model in float64, of one or the usual two layers on each rank."""
    layers = layers or (block(), Switch(WIDTH, WIDTH))
    options = {"microbatches": 4, "timeout_seconds": MANY_SECONDS, "skip_tracing": True}
    return in_a_row(*(layer.double() for layer in layers), around=around, **options)


def data() -> tuple[Tensor, Tensor]:
    x, y = vectors(8, torch.Generator().manual_seed(1))
    return x, y


@smp.step
def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_step(model, x, y)


def switched() -> Any:
    """Return a model whose second layer raises from its second step on."""
    model = begin()
    train_step(model, *data())
    model.module[1].trouble = lambda: dict[str, int]()["nothing"]
    return model


class Refusing(torch.autograd.Function):
    """Passes its input, and raises in the backward of the third microbatch."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Refusing.calls += 1
        if Refusing.calls == 3:
            raise ValueError("no gradient here")
        return grad


class Refuser(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Refusing.apply(super().forward(x))


def refusing() -> Any:
    return begin(Refuser(WIDTH, WIDTH), block(), block())


class Branching(Stack):
    """Lies on several ranks, and raises between them on one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if smp.pp_rank() == 0:
            raise KeyError("only here")
        return self.layers[1](x)


def branching() -> Any:
    module = Branching(2)
    return begin(*module.layers, around=nn.Sequential(module))


RAISES: dict[str, tuple[Callable[[], Any], int, int, str, str]] = {
    "a layer": (switched, 2, 1, "KeyError: 'nothing'", "forward of microbatch 0, module `1`"),
    "a backward": (refusing, 3, 0, "ValueError: no gradient here", "backward of microbatch 2, module `0`"),
    "the module around layers": (branching, 2, 0, "KeyError: 'only here'", "forward of microbatch 0, module `0`"),
}
"""By what raises: a model, its ranks, the rank that fails, with which error, and where."""


def fail(build: Callable[[], Any], size: int) -> list[str]:
    """Catch what a step raises, and call the next one."""
    model, found = build(), list[str]()
    for number in range(1 if build is branching else 2):  # others hear of code around layers when the script ends
        found.append(error_of(lambda: train_step(model, *data())))
        if build is not branching:
            facts().set(f"rank {smp.rank()} has step {number}", "")
            facts().wait([f"rank {rank} has step {number}" for rank in range(size)])  # an end would close connections
    return found


@pytest.mark.parametrize("what", RAISES)
def test_what_raises_ends_all_ranks_with_its_reason_and_place(what: str) -> None:
    # The others waited for their deadline: this rank had told nobody, and waited for them in the next step.
    build, size, rank, reason, place = RAISES[what]
    found = run_ranks(fail, size, build, size)
    assert found[rank][0] == f"{reason}\nraised in {place}"
    for number, (first, *others) in enumerate(found):
        assert number == rank or f"rank {rank} failed: {reason} ({place})" in first
        assert all("a step was called after one that an exception had ended" in each for each in others)


@pytest.mark.parametrize("calls", [True, False], ids=["takes too long", "misses a call"])
@on_ranks(2)
def test_a_rank_that_others_wait_for_is_named(calls: bool) -> None:
    """Let rank 1 call its second step too late, or not at all, while rank 0 waits for a second."""
    model = begin()
    train_step(model, *data())
    if smp.pp_rank() == 0:
        wait_shortly()
        message = error_of(lambda: train_step(model, *data()))
        facts().set("given up", "")
        assert message.startswith("DeadlineError: rank 0 waited")
        assert "for rank 1" in message or not calls
    elif calls:
        model.module[1].trouble = lambda: facts().wait(["given up"])
        error_of(lambda: train_step(model, *data()))
    else:
        facts().wait(["given up"])
    smp.shutdown()


@smp.step
def late_step(model: Any, x: Tensor, y: Tensor, bad: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y)
    if bad.any():
        raise ValueError("a bad batch")
    model.backward(loss)
    return loss


@on_ranks(2)
def test_after_an_exception_the_next_step_is_refused() -> None:
    """A batch is bad in the third microbatch, where ranks have got differently far."""
    model = begin()
    bad = torch.tensor([False, False, False, False, True, True, True, True])
    for _ in range(2):
        late_step(model, *data(), bad & False)
    with pytest.raises((ValueError, RemoteError), match=r"a bad batch|lost rank \d"):
        late_step(model, *data(), bad)
    with pytest.raises(UsageError) as caught:
        late_step(model, *data(), bad & False)
    assert "a step was called after one that an exception had ended, on this rank " in str(caught.value)
    assert "resume from a checkpoint" in str(caught.value)


# --- ranks that do not do the same ------------------------------------------------------------------------------------


@smp.step
def other_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x), y)


@smp.step
def forgetful_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y)
    if smp.pp_rank() == 0:
        model.backward(loss)
    return loss


@smp.step
def slicing_step(model: Any, x: Tensor, longer: Tensor) -> Tensor:
    """Take other rows of a value between layers on each rank, if told."""
    first, second = model.module
    hidden = first(x)[: 1 + int(longer.any()) * smp.pp_rank()]
    loss: Tensor = second(hidden).square().mean()
    model.backward(loss)
    return loss


DIFFERENT: dict[str, tuple[Callable[[Any, Tensor, Tensor], object], list[str]]] = {
    "steps": (
        lambda model, x, _: (train_step if smp.pp_rank() == 0 else other_step)(model, x, x),
        [
            "pipeline rank 1 called the step `other_step` (training, with gradients)",
            "and pipeline rank 0 the step `train_step` (training, with gradients)",
        ],
    ),
    "backwards": (forgetful_step, ["pipeline rank 1 took another way through microbatch 0", "`model.backward`"]),
    # Gloo ended the process, and named neither a rank nor a value; a value that was too short was taken as it was.
    "shapes, from the beginning": (
        lambda model, x, _: slicing_step(model, x, torch.ones(8)),
        ["rank 0 sends float64[1, 6] for `1` in microbatch 0, where pipeline rank 1 expects float64[2, 6]"],
    ),
    "shapes, after the record": (
        lambda model, x, _: [slicing_step(model, x, each) for each in (torch.zeros(8), torch.ones(8))],
        ["`a transfer of float64[2, 6] from rank 0 to rank 1`, not `a transfer of float64[1, 6] from rank 0 to"],
    ),
}


def differ(what: str) -> str:
    model = begin()
    return error_of(lambda: DIFFERENT[what][0](model, *data()))


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_do_not_do_the_same_are_named_with_what_each_does(what: str) -> None:
    for message in run_ranks(differ, 2, what):
        assert all(text in message for text in DIFFERENT[what][1]), message


# --- what may not be done at all --------------------------------------------------------------------------------------


def average_weights(model: Any, x: Tensor) -> Any:
    query, key = model.module[0][2].bias, model.module[1].bias
    key.data = key.data * 0.9 + query.data * 0.1
    return model(x)


def assign_data_of_a_plain_tensor(model: Any, x: Tensor) -> Any:
    mean = torch.zeros(WIDTH)
    mean.data = model(x).detach().mean(0)
    return mean


@pytest.mark.parametrize("body", [average_weights, assign_data_of_a_plain_tensor])
@on_ranks(2)
def test_data_cannot_be_assigned(body: Callable[..., Any]) -> None:
    # Where it was that of a weight, the process ended with SIGSEGV, and no rank was named.
    model = begin()
    with pytest.raises(UsageError, match=r"`\.data` of a tensor of shape \[6\] was assigned"):
        smp.step(body)(model, data()[0])
