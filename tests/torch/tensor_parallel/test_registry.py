from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.tensor_parallel import registry
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


def test_a_decorated_class_is_replaced_with_the_arguments_its_hook_makes() -> None:
    def init_hook(width: int, name: str = "x") -> tuple[tuple[int], dict[str, int]]:
        return (width,), {"depth": len(name)}

    kind = tp_register(Split, init_hook)(plain_class())
    module = kind(4, name="abc")
    entry = rule_for(module)
    assert entry is not None
    assert entry.distributed is Split
    assert arguments_of(module, entry) == ((4,), {"depth": 3})


def test_without_a_hook_the_arguments_are_the_same() -> None:
    kind = plain_class()
    tp_register_with_module(kind, Split)
    module = kind(4)
    entry = rule_for(module)
    assert entry is not None
    assert arguments_of(module, entry) == ((4,), {})


def test_a_module_argument_does_not_become_a_child() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()

    tp_register_with_module(Around, Split)
    assert list(Around(nn.Linear(2, 2)).parameters()) == []


def test_a_subclass_is_not_replaced() -> None:
    kind = plain_class()
    tp_register_with_module(kind, Split)
    other = type("Other", (kind,), {})
    assert rule_for(other(3)) is None


def test_an_instance_made_before_its_registration_is_refused() -> None:
    kind = plain_class()
    early = kind(4)
    tp_register_with_module(kind, Split)
    entry = rule_for(early)
    assert entry is not None
    with pytest.raises(UsageError, match="nothing is known about how this Plain was made"):
        arguments_of(early, entry)


def test_registering_twice_records_once_and_the_last_counts() -> None:
    kind = plain_class()
    tp_register_with_module(kind, nn.Identity)
    recording = kind.__init__
    tp_register_with_module(kind, Split)
    assert kind.__init__ is recording
    entry = rule_for(kind(1))
    assert entry is not None
    assert entry.distributed is Split


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


def test_arguments_of_torchs_own_are_read_from_the_instance() -> None:
    linear, embedding = nn.Linear(2, 3, bias=False), nn.Embedding(5, 4, padding_idx=1)
    entry = rule_for(linear)
    assert entry is not None
    assert arguments_of(linear, entry) == ((2, 3), {"bias": False})
    entry = rule_for(embedding)
    assert entry is not None
    args, kwargs = arguments_of(embedding, entry)
    assert args == (5, 4)
    assert kwargs["padding_idx"] == 1


def test_the_input_of_linear_translates_name_by_name() -> None:
    entry = rule_for(nn.Linear(2, 3))
    assert entry is not None
    assert entry.to_distributed is not None
    state = {"weight": torch.ones(3, 2)}
    made = dict(entry.to_distributed(state, nn.Identity()))["weight"]
    assert callable(made)
    assert made() is state["weight"]
