"""Cut the arguments of a step into microbatches, and scale their gradients so that a step averages over them.

Every tensor found in an argument, however deeply nested, is cut along the argument's batch axis into equal parts;
objects with `smp_slice(num_mb, mb, axis)` cut themselves; every microbatch gets everything else as it is.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.core.tree import children, rebuild

__all__ = ["MicrobatchCall", "Splitter", "StepProgress", "root_gradient"]


class MicrobatchCall(NamedTuple):
    """The arguments of one microbatch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _SplitSpec(NamedTuple):
    """How one argument is cut: into equal `parts` along `axis`; `name` is for messages."""

    name: str
    parts: int
    axis: int
    device: torch.device


class _Source(NamedTuple):
    """Where an argument stands in one form of call, by position or keyword, and how it is cut."""

    name: str
    at: int | str
    axis: int | None
    """None for an argument that every microbatch gets whole."""


@dataclass(frozen=True)
class _Layout:
    """The sources of the arguments for one form of call."""

    positional: Sequence[_Source]
    keywords: Sequence[_Source]


@dataclass(frozen=True)
class Splitter:
    """Cuts the arguments of one step function.

    Args:
        function: the step function; its signature gives positional arguments their names.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 where not named.

    Raises:
        UsageError: a name that the function has no argument for.
    """

    function: Callable[..., Any]
    non_split_inputs: tuple[str, ...] = ()
    input_split_axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = self._signature.parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for option, names in (("non_split_inputs", self.non_split_inputs), ("input_split_axes", self.input_split_axes)):
            for name in names:
                if name not in parameters:
                    close = difflib.get_close_matches(name, parameters, n=1)
                    raise UsageError(
                        f"{option} names `{name}`, but `{self.function.__name__}` has no such argument",
                        hint=f"did you mean `{close[0]}`?" if close else f"its arguments are {_listed(parameters)}",
                    )

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @functools.cached_property
    def _layouts(self) -> dict[tuple[int, tuple[str, ...]], _Layout]:
        """By form of call."""
        return {}

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, device: torch.device
    ) -> list[MicrobatchCall]:
        """Return the arguments of each of `count` microbatches, with cut tensors on `device`.

        Raises:
            UsageError: `count` does not divide a batch, or an argument is a DataLoader.
        """
        layout = self._layout_of(len(args), tuple(kwargs))
        given: Any = {**kwargs, **dict(enumerate(args))}
        split = self._split_argument
        positional = [split(source, given[source.at], count, device) for source in layout.positional]
        named = {source.name: split(source, given[source.at], count, device) for source in layout.keywords}
        return [
            MicrobatchCall(
                tuple([parts[index] for parts in positional]), {name: parts[index] for name, parts in named.items()}
            )
            for index in range(count)
        ]

    def size_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return how many samples and tokens a batch has, by the first tensor that is cut; 0 where it does not tell.

        Integers on two axes are a text: the batch and its positions.
        """
        layout = self._layout_of(len(args), tuple(kwargs))
        given: Any = {**kwargs, **dict(enumerate(args))}
        for source in (*layout.positional, *layout.keywords):
            if source.axis is None:  # every microbatch gets it whole
                continue
            for tensor in tensors_in(given[source.at]):
                if tensor.dim():
                    is_text = tensor.dim() == 2 and tensor.dtype in (torch.int32, torch.int64)
                    return tensor.shape[source.axis], tensor.numel() if is_text else 0
        return 0, 0

    def _split_argument(self, source: _Source, value: Any, count: int, device: torch.device) -> Sequence[Any]:
        if isinstance(value, DataLoader):
            raise UsageError(
                f"argument `{source.name}` of `{self.function.__name__}` is a DataLoader; a step gets one batch of it",
                hint="loop over the loader outside the step and pass each batch in",
            )
        if source.axis is None:
            return [value] * count
        return _split(value, _SplitSpec(source.name, count, source.axis, device))

    def _layout_of(self, num_positional: int, keywords: tuple[str, ...]) -> _Layout:
        """Bind the positions of arguments instead of their values; remember it, since `inspect` is slow.

        Raises:
            TypeError: the function does not take such arguments.
        """
        layout = self._layouts.get((num_positional, keywords))
        if layout is None:
            bound = self._signature.bind(*range(num_positional), **{name: name for name in keywords})
            positional = zip(_positional_names(bound), bound.args, strict=True)
            layout = _Layout(
                [self._source(*each) for each in positional], [self._source(*each) for each in bound.kwargs.items()]
            )
            self._layouts[num_positional, keywords] = layout
        return layout

    def _source(self, name: str, at: int | str) -> _Source:
        plain = name.split("[", maxsplit=1)[0]
        return _Source(name, at, None if plain in self.non_split_inputs else self.input_split_axes.get(plain, 0))


def _positional_names(bound: inspect.BoundArguments) -> list[str]:
    """Name each positional argument: by its parameter, or `rest[2]` for what a `*rest` collects."""
    names: list[str] = []
    count = len(bound.args)
    for name, parameter in bound.signature.parameters.items():
        if len(names) == count:
            break
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{index}]" for index in range(len(bound.arguments.get(name, ())))]
        else:
            names.append(name)
    return names


def _split(value: Any, cut: _SplitSpec) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, cut)
    if isinstance(value, torch.nn.Module):  # most steps are given the model, whose `__getattr__` is slow
        return [value] * cut.parts
    if callable(getattr(value, "smp_slice", None)):
        return [value.smp_slice(cut.parts, index, cut.axis) for index in range(cut.parts)]
    parts = children(value)
    if parts is None:
        return [value] * cut.parts
    inside = {key: _split(part, cut) for key, part in parts.items()}
    return [rebuild(value, {key: parts[index] for key, parts in inside.items()}) for index in range(cut.parts)]


def _split_tensor(value: torch.Tensor, cut: _SplitSpec) -> list[torch.Tensor]:
    whole = devices.to_device(value, cut.device)
    if value.dim() == 0:
        return [whole] * cut.parts  # a scalar has no batch axis: every microbatch gets it
    if not -value.dim() <= cut.axis < value.dim():
        raise UsageError(
            f"argument `{cut.name}` has shape {tuple(value.shape)} and no axis {cut.axis} to split",
            hint="name its batch axis in input_split_axes, or the argument in non_split_inputs",
        )
    if cut.parts == 1:
        return [whole]
    size = value.shape[cut.axis]
    if size % cut.parts:
        raise UsageError(
            f"batch size {size} (argument `{cut.name}`, axis {cut.axis}) is not divisible by {cut.parts} microbatches",
            hint="use DataLoader(drop_last=True) and a batch size that is a multiple of `microbatches`,"
            " or name the argument in non_split_inputs",
        )
    part = size // cut.parts
    # `narrow`, not `chunk`: autograd refuses in-place changes of the results of a view with several outputs.
    return [whole.narrow(cut.axis, index * part, part) for index in range(cut.parts)]


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


@dataclass
class StepProgress:
    """One call of a step function, while it runs.

    `backwards` counts the calls of `model.backward` in the current microbatch. `expected_backwards` is how many the
    microbatch before has made, so that the last one of the step is known, and gradients are reduced while it runs.
    """

    num_microbatches: int
    microbatch: int = 0
    backwards: int = 0
    total_backwards: int = 0
    expected_backwards: int | None = None
    training: bool = False
    """Whether the model is in training mode."""
    detach_outputs: bool = True
    """Whether returned tensors are cut off their graph; over a pipeline they always are."""

    @property
    def is_last_backward(self) -> bool:
        last_microbatch = self.microbatch == self.num_microbatches - 1
        return last_microbatch and self.backwards + 1 == self.expected_backwards

    def end_microbatch(self) -> None:
        self.expected_backwards = self.backwards
        self.total_backwards += self.backwards
        self.backwards = 0


def root_gradient(root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Return the gradient that backward starts with at `root`: `grad`, or 1, times `scale`.

    None where torch has to raise: of other roots than real scalars the gradient must be given.
    """
    if grad is not None:
        return grad if scale == 1.0 else grad * scale
    return torch.full_like(root, scale) if root.numel() == 1 and root.is_floating_point() else None
