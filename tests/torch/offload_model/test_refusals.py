"""What cannot work, each refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel
from smpkit.errors import UnsupportedError, UsageError

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def wrap(module: nn.Module | None = None, **options: Any) -> OffloadModel:
    return OffloadModel(module or layers(), CPU, **options)


class Clamps(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(value)


class Renorms(nn.Linear):
    """As EEGNet's layers do, and braindecode's."""

    def forward(self, value: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
        return super().forward(value)


def move(model: OffloadModel) -> None:
    parameter = next(model.parameters())
    parameter.data = parameter.data * 2
    model(torch.ones(1, 4))


class Backwards(torch.autograd.Function):
    """Calls the model in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, model: OffloadModel) -> Tensor:
        ctx.model = model
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.model(torch.ones(1, 4))
        return gradient, None


def call_in_backward(model: OffloadModel) -> None:
    value = torch.ones(1, 4, requires_grad=True)
    model(Backwards.apply(value, model)).sum().backward()


class Wraps(nn.Linear):
    def forward(self, value: Tensor) -> Any:
        return SimpleNamespace(value=super().forward(value))


def step_in_backward(model: OffloadModel) -> None:
    """Update each weight when its gradient is there, as PyTorch's tutorial and torchtune do."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(torch.ones(1, 4)).sum().backward()


NARROW = torch.ones(1, 4, dtype=torch.bfloat16)


def changing() -> OffloadModel:
    """Return a model whose parameters are of another type on the device, as all are on a GPU."""
    return wrap(dtype=torch.bfloat16)


def penalise(model: OffloadModel) -> None:
    loss = model(NARROW).sum()
    (loss + torch.stack([each.abs().sum() for each in model.parameters()]).sum()).backward()


def call_in_a_thread(model: OffloadModel) -> None:
    def call(*_: Any) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, NARROW).result()

    handle = next(iter(model.model_slices)).register_forward_hook(call)
    model(NARROW)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a lazy layer": (
        lambda: wrap(nn.Sequential(nn.LazyLinear(3))),
        UsageError,
        "`weight` of a LazyLinear has no shape",
    ),
    "an OffloadModel inside": (lambda: wrap(nn.Sequential(wrap())), UsageError, "a slice of another OffloadModel"),
    "max_norm": (
        lambda: wrap(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))),
        UnsupportedError,
        "max_norm=1, which writes to its weight in forward",
    ),
    "a forward that writes": (
        lambda: wrap(nn.Sequential(Clamps(4, 4)))(torch.ones(1, 4)),
        UsageError,
        "a forward of slice 0 writes to a weight",
    ),
    "a forward that sets a weight": (
        lambda: wrap(nn.Sequential(Renorms(4, 4)))(torch.ones(1, 4)),
        UsageError,
        "a forward of slice 0 writes to a weight",
    ),
    "an object of the script's": (
        lambda: wrap(nn.Sequential(Wraps(4, 4)))(torch.ones(1, 4)),
        UnsupportedError,
        "returned an object of type `SimpleNamespace`, in which an OffloadModel sees no tensors",
    ),
    "an optimizer in hooks": (
        lambda: step_in_backward(wrap()),
        UsageError,
        "a backward of slice 1 writes to a weight.*\n.*overlap",
    ),
    "memory of its own": (lambda: move(wrap()), UsageError, r"shape \(4, 4\) has been moved out of its OffloadModel"),
    "a penalty on weights": (lambda: penalise(changing()), UnsupportedError, "a penalty.*\n.*`penalty.backward\\(\\)`"),
    "inputs of a backward": (
        lambda: (model := changing())(NARROW).sum().backward(inputs=[*model.parameters()]),
        UnsupportedError,
        "parameters of an OffloadModel are `inputs`",
    ),
    "torch.autograd.grad": (
        lambda: torch.autograd.grad((model := changing())(NARROW).sum(), [*model.parameters()], allow_unused=True),
        UnsupportedError,
        "parameters of an OffloadModel are `inputs`",
    ),
    "torch.func": (lambda: torch.func.vmap(changing())(NARROW), UnsupportedError, "does not run under torch.func"),
    "two threads": (lambda: call_in_a_thread(changing()), UsageError, "while another thread runs its forward"),
    "a call in its backward": (lambda: call_in_backward(wrap()), UsageError, "was called in its own backward"),
    "a copy": (lambda: copy.deepcopy(wrap()), UsageError, "is not copied or pickled"),
    "an average": (lambda: torch.optim.swa_utils.AveragedModel(wrap()), UsageError, "is not copied or pickled"),
    "a pickle": (lambda: pickle.dumps(wrap()), UsageError, "is not copied or pickled"),
    "another type": (lambda: wrap().half(), UsageError, "cannot be converted to another type"),
    "another device": (lambda: wrap().to("meta"), UsageError, "cannot be moved to meta"),
    "other parameters": (
        lambda: wrap().load_state_dict(wrap().state_dict(), assign=True),
        UsageError,
        r"load_state_dict\(assign=True\) would take the parameters",
    ),
    "no blocks": (
        lambda: wrap(nn.Bilinear(2, 2, 2)),
        TypeError,
        r"a Bilinear in which no list repeats blocks.*layers=",
    ),
    "no such path": (
        lambda: wrap(layers(), layers=["0", "block"]),
        UsageError,
        "layers names `block`.*\n.*children are 0, 1",
    ),
    "a path that is no list": (lambda: wrap(layers(), layers="0"), UsageError, "must be a list of module paths"),
    "no paths": (lambda: wrap(layers(), layers=[]), UsageError, "must be a list of module paths"),
    "no slices": (
        lambda: wrap(num_slices=0),
        UsageError,
        "num_slices of OffloadModel must be an integer of at least 1, got 0",
    ),
    "True slices": (lambda: wrap(num_slices=True), UsageError, "num_slices .* at least 1, got True"),
    "half a microbatch": (lambda: wrap(num_microbatches=0.5), UsageError, r"num_microbatches .*, got 0\.5"),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", REFUSED)
def test_rejects_what_cannot_work(name: str) -> None:
    run, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run()


@pytest.mark.usefixtures("place")
def test_after_a_refused_forward_the_next_one_runs() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    model = wrap(nn.Sequential(one, other), dtype=torch.bfloat16)
    memory = one.weight.data
    one.weight.data = memory.clone()
    with pytest.raises(UsageError, match="has been moved out of its OffloadModel"):
        model(NARROW)
    one.weight.data = memory
    model(NARROW)


@pytest.mark.usefixtures("place")
def test_it_stays_where_it_is() -> None:
    model = wrap()
    assert model.to(CPU) is model
    assert model.float() is model


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"balance": None},
        {"balance": [1.0, 2.0]},
        {"device": "nowhere"},
        {"device": "cpu:1"},
        {"offload_device": "nowhere"},
        {"host_budget_bytes": -1},
        {"host_budget_bytes": "1"},
        {"host_budget_bytes": 1.5},
        {"host_budget_bytes": True},
        {"checkpoint_activation": "yes"},
        {"checkpoint_activation": None},
        {"prefetch": "no"},
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        OffloadModel(layers(), **{"device": "cpu", **given})
    assert str(caught.value).startswith(name)
    assert value is None or str(value).strip("[]") in str(caught.value)
