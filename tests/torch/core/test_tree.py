"""Containers come apart and together again as the type they were."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import describe
from smpkit.torch.core.tree import children, map_leaves, pickled, rebuild


class Pair(NamedTuple):
    left: Any
    right: Any


class Picky(Pair):
    """Like a PackedSequence: looks at what it is called with."""

    def __init__(self, left: Any, right: Any) -> None:
        assert isinstance(left, int)


@dataclass(frozen=True)
class Frozen:
    first: int
    second: tuple[int, ...] = (2, 3)


class Output(OrderedDict[str, Any]):
    """Like a Hugging Face ModelOutput: a dict whose items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Encoding(UserDict[str, Any]):
    """Like a Hugging Face BatchEncoding: a mapping that is no dict and carries more than its items."""

    def __init__(self, data: Any = None, encodings: str = "kept") -> None:
        super().__init__(data)
        self.encodings = encodings


@pytest.mark.parametrize(
    "value",
    [
        [1, [2, 3]],
        (1, (2,)),
        {"a": 1, "b": {"c": 2}},
        OrderedDict(a=1, b=2),
        defaultdict(int, a=1),
        Pair(1, [2]),
        Frozen(1),
        {1, 2},
        frozenset({1, 2}),
        MappingProxyType({"a": 1}),
        Output(loss=1, logits=(2, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mapping_leaves_keeps_type_and_values(value: Any) -> None:
    doubled = map_leaves(lambda leaf: leaf * 2, value)
    assert type(doubled) is type(value)
    assert map_leaves(lambda leaf: leaf // 2, doubled) == value


def test_a_user_dict_keeps_what_it_carries_besides_items() -> None:
    doubled = map_leaves(lambda leaf: leaf * 2, Encoding({"ids": 2}, encodings="special"))
    assert (doubled["ids"], doubled.encodings) == (4, "special")


def test_a_model_output_keeps_items_and_attributes_equal() -> None:
    original = Output(loss=1)
    doubled = map_leaves(lambda leaf: leaf * 2, original)
    assert doubled["loss"] == doubled.loss == 2
    assert original["loss"] == vars(original)["loss"] == 1


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", 1, None, torch.ones(2), torch.Size([1, 2]), torch.nn.Linear(1, 1), Frozen]
)
def test_leaves_have_no_children(leaf: Any) -> None:
    assert children(leaf) is None


def test_nothing_is_copied_when_nothing_changes() -> None:
    value = {"a": [1, 2]}
    assert map_leaves(lambda leaf: leaf, value) is value


def test_a_named_tuple_is_made_again_of_whatever_stands_in_for_its_items() -> None:
    made = rebuild(Picky(1, 2), {"left": "one", "right": "two"})
    assert type(made) is Picky
    again = pickle.loads(pickled([made]))[0]
    assert type(again) is Picky
    assert again == ("one", "two")


def test_a_set_of_tensors_has_no_order_that_ranks_could_share() -> None:
    with pytest.raises(UsageError, match="a set of 2 tensors is an argument"):
        describe({torch.ones(1), torch.ones(2)}, [], lambda tensor: tensor)
    assert describe({torch.ones(1)}, [], lambda tensor: tensor)
    assert describe({1, 2}, [], lambda tensor: tensor) == {1, 2}


def test_a_named_tuple_whose_class_a_function_makes_is_pickled() -> None:
    # As the VGG of torch's example fast_neural_style returns it: over a pipeline the step ended in a PicklingError.
    kind: Any = namedtuple("Features", ["low", "high"])  # type: ignore[name-match]  # noqa: PYI024  as there
    made = kind(1, [2])
    again = pickle.loads(pickled([made]))[0]
    assert (again, again.low, again.high, type(again).__name__) == (made, 1, [2], "Features")
