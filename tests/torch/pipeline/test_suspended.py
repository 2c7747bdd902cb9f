"""A microbatch that may be suspended runs in a thread of its own, in the modes and hooks of the one that starts it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smpkit.torch.pipeline.coroutine import MicrobatchCoroutine
from smpkit.torch.pipeline.random_streams import RandomStreams

CPU = torch.device("cpu")


class Functions(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def in_thread(body: Callable[[], Any]) -> Any:
    """Return what a body returns that runs as a microbatch which may be suspended."""

    def checked() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return body()

    coroutine = MicrobatchCoroutine(checked, RandomStreams(1, CPU), CPU, seed=1)
    coroutine.resume()
    return coroutine.output


def autocast_state() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.mm(torch.eye(2), torch.eye(2)).dtype,
    )


@pytest.mark.parametrize(
    ("around", "asked"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), autocast_state),
        (lambda: torch.autocast("cpu", torch.float16, cache_enabled=False), autocast_state),
        (torch.no_grad, torch.is_grad_enabled),
        (lambda: torch.device("meta"), lambda: (torch.get_default_device(), torch.zeros(1).device)),
    ],
    ids=["autocast", "autocast without its cache", "no gradients", "default device"],
)
def test_modes_of_the_caller_hold(
    around: Callable[[], contextlib.AbstractContextManager[Any]], asked: Callable[[], object]
) -> None:
    plain = asked()
    with around():
        here, there = asked(), in_thread(asked)
        assert here != plain
        assert there == here
    assert asked() == in_thread(asked) == plain


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_of_torch_s_see_what_runs_and_nothing_of_the_engine_s(kind: type[Functions | Operators]) -> None:
    with kind() as mode:
        in_thread(lambda: torch.ones(2).sin())
        assert mode.seen == ["ones", "sin"]
        torch.ones(2)
    assert mode.seen[2:] == ["ones"]


def test_saved_tensors_go_through_the_caller_s_hooks() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(threading.current_thread())
        return tensor

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        in_thread(lambda: x.square().sum()).backward()
    assert len(packed) == 1
    assert packed[0] is not threading.main_thread()


def test_the_end_of_autocast_inside_leaves_the_caller_s_cache() -> None:
    weight, x = torch.eye(2, requires_grad=True), torch.eye(2)

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(x, weight)

    with torch.autocast("cpu", torch.bfloat16):
        torch.mm(x, weight)  # the cast weight is kept
        in_thread(body)
        with Operators() as mode:
            torch.mm(x, weight)
    assert mode.seen.count("_to_copy") == 1  # that of x, which needs no gradients
