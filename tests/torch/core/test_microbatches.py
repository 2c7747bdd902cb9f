"""Arguments of a step are cut into microbatches."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from smpkit.errors import UsageError
from smpkit.torch.core.microbatches import Splitter

CPU = torch.device("cpu")


def body(model: Any, x: Any, *rest: Any, scale: Any = 1, **more: Any) -> None:
    """A step function with every kind of parameter."""


def plain(x: Any, y: Any = None) -> None:
    """A step function with names only."""


def pieces(value: Any, count: int = 2, **options: Any) -> list[Any]:
    return [call.args[0] for call in Splitter(plain, **options).split((value,), {}, count, CPU)]


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (torch.arange(4), {}, [[0, 1], [2, 3]]),
        (torch.arange(8).view(2, 4), {"input_split_axes": {"x": 1}}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (torch.arange(8).view(2, 4), {"input_split_axes": {"x": -1}}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (torch.tensor(3.0), {}, [3.0, 3.0]),
        (torch.zeros(0), {}, [[], []]),
    ],
    ids=["axis 0", "axis 1", "last axis", "a scalar goes to all", "empty"],
)
def test_a_tensor_is_cut_into_equal_parts(value: torch.Tensor, options: dict[str, Any], expected: list[Any]) -> None:
    assert [piece.tolist() for piece in pieces(value, **options)] == expected


def test_nested_tensors_are_cut_and_other_leaves_pass_through() -> None:
    namespace = Namespace(lr=1)
    value = {"ids": torch.arange(4), "pair": (torch.zeros(4, 3), [None, "text", 7]), "args": namespace}
    first, _ = pieces(value)
    assert first["ids"].tolist() == [0, 1]
    assert first["pair"][0].shape == (2, 3)
    assert first["pair"][1] == [None, "text", 7]
    assert first["args"] is namespace


def test_a_microbatch_may_be_changed_in_place_and_sends_gradients_to_the_batch() -> None:
    batch: Any = torch.ones(4, requires_grad=True)
    first, second = pieces(batch * 1)
    first.mul_(2)  # autograd forbids it for what `chunk` returns
    (first + second).sum().backward()
    assert batch.grad.tolist() == [2, 2, 1, 1]


def test_non_split_inputs_stay_whole_and_where_they_are() -> None:
    value = torch.arange(3)
    assert all(piece is value for piece in pieces(value, non_split_inputs=("x",)))


def test_objects_with_smp_slice_cut_themselves() -> None:
    class Ragged:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> tuple[int, int, int]:
            return num_mb, mb, axis

    assert pieces(Ragged(), input_split_axes={"x": 1}) == [(2, 0, 1), (2, 1, 1)]


def test_positional_keyword_and_variadic_arguments_find_their_names() -> None:
    splitter = Splitter(body, non_split_inputs=("scale",), input_split_axes={"rest": 1, "mask": 1})
    rows, columns = torch.zeros(4, 2), torch.zeros(2, 4)
    calls = splitter.split(("model", rows, columns), {"mask": columns, "scale": rows}, 2, CPU)
    assert calls[1].args[0] == "model"
    assert calls[1].args[1].shape == (2, 2)
    assert calls[1].args[2].shape == (2, 2)
    assert calls[1].kwargs["mask"].shape == (2, 2)
    assert calls[1].kwargs["scale"] is rows


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.zeros(5), {}, r"batch size 5 \(argument `x`, axis 0\) is not divisible by 2 microbatches"),
        # As DETRs of transformers take them; each microbatch would get a half of the boxes of each picture.
        (
            [{"boxes": torch.zeros(4, 4)}, {"boxes": torch.zeros(2, 4)}],
            {},
            r"`x` is a list with tensors of 4 and of 2 elements along axis 0(.|\n)*`smp_slice\(",
        ),
        ([torch.zeros(3, 8), torch.zeros(3, 8)], {}, r"batch size 3 \(argument `x\[0\]`, axis 0\)(.|\n)*`smp_slice\("),
        (torch.zeros(4), {"input_split_axes": {"x": 1}}, r"`x` has shape \(4,\) and no axis 1 to split"),
        (torch.zeros(2, 4), {"input_split_axes": {"x": -3}}, r"shape \(2, 4\) and no axis -3 to split"),
        (DataLoader([1]), {}, "`x` of `plain` is a DataLoader"),  # type: ignore[arg-type]
    ],
    ids=["indivisible", "samples", "pictures", "axis", "negative axis", "loader"],
)
def test_what_cannot_be_cut_is_named(value: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pieces(value, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"non_split_inputs": ("z",)}, "non_split_inputs names `z`, but `plain` has no such argument"),
        ({"input_split_axes": {"xx": 0}}, "did you mean `x`"),
    ],
    ids=["unknown", "misspelt"],
)
def test_unknown_argument_names_are_refused_when_decorating(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Splitter(plain, **options)


def test_samples_and_tokens_are_those_of_the_first_tensor_that_is_cut() -> None:
    def step(table: Any, batch: Any, labels: Any) -> None: ...

    splitter = Splitter(step, ("table",), {"labels": 1})
    table, labels = torch.zeros(99, 7, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int64)
    texts, images = torch.zeros(6, 20, dtype=torch.int64), torch.zeros(6, 3, 8, 8)
    assert splitter.size_of((table, {"ids": texts, "mask": texts.bool()}), {"labels": labels}) == (6, 120)
    assert splitter.size_of((table, images, labels), {}) == (6, 0)
    assert splitter.size_of((table, 1.0, labels), {}) == (6, 18)
    assert splitter.size_of((table, torch.tensor(3), "x"), {}) == (0, 0)
