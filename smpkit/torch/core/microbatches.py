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
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import tensors_in
from smpkit.torch.core.tree import children, rebuild


class MicrobatchCall(NamedTuple):
    """The arguments of one microbatch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Argument(NamedTuple):
    """One argument of a step."""

    name: str
    """For messages: `rest[2]` where `*rest` collects it."""
    value: Any
    axis: int | None
    """Its batch axis; None: every microbatch gets it whole."""


@dataclass(frozen=True)
class Splitter:
    """Cuts the arguments of one step function, whose signature gives positional arguments their names.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 where not named.
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
                    known = ", ".join(f"`{name}`" for name in parameters) or "none"
                    raise UsageError(
                        f"{option} names `{name}`, but `{self.function.__name__}` has no such argument",
                        hint=f"did you mean `{close[0]}`?" if close else f"its arguments are {known}",
                    )

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, device: torch.device
    ) -> list[MicrobatchCall]:
        """Return the arguments of each of `count` microbatches, with cut tensors on `device`."""
        positional, named = self._arguments(args, kwargs)
        for argument in (*positional, *named):
            if isinstance(argument.value, DataLoader):
                raise UsageError(
                    f"argument `{argument.name}` of `{self.function.__name__}` is a DataLoader",
                    hint="a step gets one batch: loop over the loader outside it, and pass each batch in",
                )
        by_position = [_split(argument, argument.value, count, device) for argument in positional]
        by_name = {argument.name: _split(argument, argument.value, count, device) for argument in named}
        args_of = list(zip(*by_position, strict=True)) or [()] * count
        kwargs_of = [dict(zip(by_name, parts, strict=True)) for parts in zip(*by_name.values(), strict=True)]
        return list(map(MicrobatchCall, args_of, kwargs_of or [{} for _ in range(count)]))

    def size_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return how many samples and tokens a batch has, by the first tensor that is cut; 0 where it does not tell.

        A tensor of integers with two axes is taken for text: samples and positions.
        """
        positional, named = self._arguments(args, kwargs)
        for argument in (*positional, *named):
            if argument.axis is None:  # every microbatch gets it whole
                continue
            for tensor in tensors_in(argument.value):
                if tensor.dim():
                    is_text = tensor.dim() == 2 and tensor.dtype in (torch.int32, torch.int64)
                    return tensor.shape[argument.axis], tensor.numel() if is_text else 0
        return 0, 0

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[_Argument], list[_Argument]]:
        """Return the arguments that the function gets by position, and those by name."""
        bound = self._signature.bind(*args, **kwargs)
        names: list[str] = []
        for name, value in bound.arguments.items():
            collects = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            names += [f"{name}[{index}]" for index in range(len(value))] if collects else [name]
        positional = [self._argument(*pair) for pair in zip(names, bound.args, strict=False)]
        return positional, [self._argument(*pair) for pair in bound.kwargs.items()]

    def _argument(self, name: str, value: Any) -> _Argument:
        plain = name.partition("[")[0]
        return _Argument(name, value, None if plain in self.non_split_inputs else self.input_split_axes.get(plain, 0))


def _split(argument: _Argument, value: Any, count: int, device: torch.device) -> Sequence[Any]:
    """Return the parts of an argument, or of a `value` in it."""
    if isinstance(value, torch.Tensor) and argument.axis is not None:
        return _split_tensor(argument.name, value, argument.axis, count, device)
    if argument.axis is None or isinstance(value, torch.nn.Module):  # whose `__getattr__` is slow
        return [value] * count
    if callable(getattr(value, "smp_slice", None)):
        return [value.smp_slice(count, index, argument.axis) for index in range(count)]
    inside = children(value)
    if inside is None:
        return [value] * count
    if isinstance(value, list) and count > 1:
        _refuse_samples(argument, value)
    parts = {
        key: _split(argument._replace(name=f"{argument.name}[{key!r}]"), child, count, device)
        for key, child in inside.items()
    }
    return [rebuild(value, {key: part[index] for key, part in parts.items()}) for index in range(count)]


def _refuse_samples(argument: _Argument, value: list[Any]) -> None:
    """Refuse a list of samples, each with its own number of boxes, say: a part of each would go to each microbatch."""
    axis = argument.axis or 0
    sizes = {tensor.shape[axis]: None for tensor in tensors_in(value) if -tensor.dim() <= axis < tensor.dim()}
    if len(sizes) > 1:
        first, second, *_ = sizes
        raise UsageError(
            f"`{argument.name}` is a list with tensors of {first} and of {second} elements along axis {axis}, along"
            " which each tensor is cut into microbatches: it looks like a list of samples",
            hint=f"{_SAMPLES}; or pass tensors that belong to no sample in arguments of their own",
        )


_SAMPLES: Final = "a list of samples cuts itself, if its class has a method `smp_slice(num_mb, mb, axis)`"


def _split_tensor(
    name: str, tensor: torch.Tensor, axis: int, count: int, device: torch.device
) -> Sequence[torch.Tensor]:
    whole = devices.to_device(tensor, device)
    if tensor.dim() == 0:
        return [whole] * count  # a scalar has no batch axis: every microbatch gets it
    if not -tensor.dim() <= axis < tensor.dim():
        raise UsageError(
            f"argument `{name}` has shape {tuple(tensor.shape)} and no axis {axis} to split",
            hint="name its batch axis in input_split_axes, or the argument in non_split_inputs",
        )
    if count == 1:
        return [whole]
    size = tensor.shape[axis]
    if size % count:
        raise UsageError(
            f"batch size {size} (argument `{name}`, axis {axis}) is not divisible by {count} microbatches",
            hint="use DataLoader(drop_last=True) and a batch size that is a multiple of `microbatches`,"
            f" or name the argument in non_split_inputs; {_SAMPLES}",
        )
    part = size // count
    # `narrow`, not `chunk`: autograd refuses in-place changes of the results of a view with several outputs.
    parts = [whole.narrow(axis, index * part, part) for index in range(count)]
    # Views of one tensor count their changes in place together: backward would refuse what a microbatch has kept of its
    # part, because a later one has changed another. `.data` counts on its own.
    return parts if whole.requires_grad else [part.data for part in parts]


@dataclass
class StepProgress:
    """One call of a step function, while it runs.

    `backwards` counts the calls of `model.backward` in the current microbatch, `expected_backwards` those that the one
    before has made: so the last backward of the step is known when it begins, and gradients are reduced while it runs.
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

    Without `grad` that is None for a root that is no real scalar: torch then raises.
    """
    if grad is not None:
        return grad if scale == 1.0 else grad * scale
    return torch.full_like(root, scale) if root.numel() == 1 and root.is_floating_point() else None
