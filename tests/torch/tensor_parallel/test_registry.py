"""Which modules tensor parallelism replaces: classes that are registered, and modules that are marked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.tensor_parallel import registry
from smpkit.torch.tensor_parallel.marking import marking_of
from smpkit.torch.tensor_parallel.registry import (
    arguments_of,
    rule_for,
    tp_register,
    tp_register_with_module,
    with_overrides,
)


@pytest.fixture(autouse=True)
def _own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


class Split(nn.Module):
    def __init__(self, width: int, depth: int = 1, *, scale: float = 1.0) -> None:
        super().__init__()


def plain_class() -> type[nn.Module]:
    class Plain(nn.Module):
        def __init__(self, width: int, name: str = "x") -> None:
            super().__init__()
            self.name = name

    return Plain


def rule_of(module: nn.Module) -> Any:
    return rule_for(module)


def test_a_class_is_replaced_with_the_arguments_its_hook_makes_or_without_one_with_its_own() -> None:
    def init_hook(width: int, name: str = "x") -> tuple[tuple[int], dict[str, int]]:
        return (width,), {"depth": len(name)}

    cases: list[tuple[Any, Any]] = [(init_hook, ((4,), {"depth": 3})), (None, ((4,), {"name": "abc"}))]
    for hook, expected in cases:
        module = tp_register(Split, hook)(plain_class())(4, name="abc")
        assert rule_of(module).distributed is Split
        assert arguments_of(module, rule_of(module)) == expected


def test_a_module_argument_does_not_become_a_child() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()

    tp_register_with_module(Around, Split)
    assert list(Around(nn.Linear(2, 2)).parameters()) == []


def test_an_instance_made_before_its_registration_is_refused() -> None:
    kind = plain_class()
    early = kind(4)
    tp_register_with_module(kind, Split)
    with pytest.raises(UsageError, match="nothing is known about how this Plain was made"):
        arguments_of(early, rule_of(early))


def test_what_is_no_module_class_is_refused() -> None:
    not_a_class: Any = 3
    with pytest.raises(UsageError, match="dist_module must be a class"):
        tp_register(not_a_class)


@pytest.mark.parametrize(
    ("arguments", "overrides", "expected"),
    [
        (((4,), {}), {"depth": 2}, ((4, 2), {})),
        (((4, 7), {}), {"depth": 2}, ((4, 2), {})),
        (((4,), {"scale": 2.0}), {"scale": 3.0}, ((4,), {"scale": 3.0})),
        (((4,), {}), {"fused_softmax": True}, ((4,), {})),
    ],
    ids=["added", "given by position", "keyword only", "unknown"],
)
def test_overrides_by_name(arguments: Any, overrides: Any, expected: Any) -> None:
    assert with_overrides(Split, arguments, overrides) == expected


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="Split cannot be made with the arguments"):
        with_overrides(Split, ((), {}), {})


def enabled(module: nn.Module) -> bool | None:
    marking = marking_of(module)
    return None if marking is None else marking.enabled


def test_what_is_created_in_the_block_is_marked_and_nothing_else() -> None:
    before = nn.Linear(2, 2)
    with smp.tensor_parallelism(fused_softmax=False):
        inside = nn.Sequential(nn.Linear(2, 2))
    after = nn.Linear(2, 2)
    assert [enabled(each) for each in (before, inside, inside[0], after)] == [None, True, True, None]
    marking: Any = marking_of(inside[0])
    assert marking.config == {"fused_softmax": False}
    assert set(inside.state_dict()) == {"0.weight", "0.bias"}, "marks are no part of the state"


def test_the_innermost_block_wins() -> None:
    with smp.tensor_parallelism():
        with smp.tensor_parallelism(enabled=False):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert (enabled(inner), enabled(outer)) == (False, True)


def test_it_decorates_functions_and_a_call_that_fails_leaves_nothing_behind() -> None:
    @smp.tensor_parallelism()
    def build(width: int) -> nn.Linear:
        return nn.Linear(1 // width, 2)

    assert enabled(build(1))
    assert enabled(build(1)), "each call is a block of its own"
    with pytest.raises(ZeroDivisionError):
        build(0)
    assert enabled(nn.Linear(2, 2)) is None


# --- model_creation ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_model_creation_takes_the_delay_from_the_configuration() -> None:
    smp.init({"delayed_parameter_initialization": True})
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16, fused_softmax=False):
        linear = nn.Linear(2, 3)
    assert linear.weight.dtype == torch.bfloat16
    assert is_delayed(linear.weight)
    marking: Any = marking_of(linear)
    assert marking.enabled
    assert marking.config == {"fused_softmax": False}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["delayed_parameter_initialization", "delay_param_initialization"])
def test_both_names_of_the_delay_work(name: str) -> None:
    smp.init()
    with smp.model_creation(**{name: True}):  # type: ignore[arg-type]
        delayed = nn.Linear(2, 3)
    with smp.model_creation(**{name: False}):  # type: ignore[arg-type]
        made = nn.Linear(2, 3)
    assert is_delayed(delayed.weight)
    assert not is_delayed(made.weight)


def test_contradicting_names_are_refused() -> None:
    smp.init()
    arguments: Any = {"delayed_parameter_initialization": True, "delay_param_initialization": False}
    with pytest.raises(UsageError, match="are one argument"), smp.model_creation(**arguments):
        pass
