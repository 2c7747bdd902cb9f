"""Cut the arguments of a step into microbatches.

Every tensor found in an argument, however deeply nested, is cut along the argument's batch axis into equal parts;
objects with `smp_slice(num_mb, mb, axis)` cut themselves; everything else is handed to each microbatch as it is.
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
from smpkit.torch.core.tree import children, rebuild

__all__ = ["MicrobatchCall", "MicrobatchCalls", "RootGradients", "Splitter", "StepProgress", "scaled_root_gradient"]


class MicrobatchCall(NamedTuple):
    """The arguments of one microbatch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_GetPiece = Callable[[int], Any]
"""Returns a microbatch's piece of an argument."""


class MicrobatchCalls(Sequence[MicrobatchCall]):
    """The arguments of all microbatches; the first can begin before those of the others are cut.

    Args:
        count: of microbatches.
        positional, named: cut each argument.
    """

    def __init__(self, count: int, positional: Sequence[_GetPiece], named: Mapping[str, _GetPiece]) -> None:
        self._count = count
        self._positional = positional
        self._named = named
        self._made: list[MicrobatchCall] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not self._made:
            self._split(1)
        if index != 0:
            self.split_all()
        return self._made[index]

    def split_all(self) -> None:
        """Cut what has not been cut yet."""
        if len(self._made) < self._count:
            self._split(self._count)

    def _split(self, count: int) -> None:
        for index in range(len(self._made), count):
            args = tuple([pieces(index) for pieces in self._positional])
            self._made.append(MicrobatchCall(args, {name: pieces(index) for name, pieces in self._named.items()}))


@dataclass(frozen=True)
class _SplitSpec:
    """How one argument is cut: into `count` parts along `axis`; `name` is for messages."""

    name: str
    count: int
    axis: int
    device: torch.device


@dataclass(frozen=True)
class _Layout:
    """Where the arguments of one form of call come from, by name: the place of a positional one, or a keyword."""

    positional: dict[str, int | str]
    keywords: dict[str, int | str]


@dataclass(frozen=True)
class Splitter:
    """What `@smp.step(...)` was told about its arguments.

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
        """Made once for each form of call: `inspect` takes its time."""
        return {}

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, device: torch.device
    ) -> MicrobatchCalls:
        """Return the arguments of each of `count` microbatches, with cut tensors on `device`.

        Raises:
            UsageError: a batch that `count` does not divide, or an argument that cannot work inside a step.
        """
        form = len(args), tuple(kwargs)
        layout = self._layouts.get(form)
        if layout is None:
            layout = self._layouts[form] = _layout_of(self._signature, *form)

        def cut(sources: Mapping[str, int | str]) -> dict[str, _GetPiece]:
            values = {name: args[at] if isinstance(at, int) else kwargs[at] for name, at in sources.items()}
            return {name: self._split_argument(name, value, count, device) for name, value in values.items()}

        return MicrobatchCalls(count, list(cut(layout.positional).values()), cut(layout.keywords))

    def _split_argument(self, name: str, value: Any, count: int, device: torch.device) -> _GetPiece:
        plain = name.split("[", maxsplit=1)[0]
        if isinstance(value, DataLoader):
            raise UsageError(
                f"argument `{name}` of `{self.function.__name__}` is a DataLoader; a step gets one batch of it",
                hint="loop over the loader outside the step and pass each batch in",
            )
        if plain in self.non_split_inputs:
            return lambda _: value
        return _split(value, _SplitSpec(name, count, self.input_split_axes.get(plain, 0), device))


def _layout_of(signature: inspect.Signature, num_positional: int, keywords: tuple[str, ...]) -> _Layout:
    """Bind the places of arguments instead of the arguments.

    Raises:
        TypeError: the function cannot be called so.
    """
    bound = signature.bind(*range(num_positional), **{name: name for name in keywords})
    return _Layout(dict(zip(_positional_names(bound), bound.args, strict=True)), bound.kwargs)


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


def _split(value: Any, cut: _SplitSpec) -> _GetPiece:
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, cut)
    if callable(getattr(value, "smp_slice", None)):
        return [value.smp_slice(cut.count, index, cut.axis) for index in range(cut.count)].__getitem__
    parts = children(value)
    if parts is None:
        return lambda _: value
    pieces = {key: _split(part, cut) for key, part in parts.items()}
    return lambda index: rebuild(value, {key: piece(index) for key, piece in pieces.items()})


def _split_tensor(value: torch.Tensor, cut: _SplitSpec) -> _GetPiece:
    whole = devices.to_device(value, cut.device)
    if value.dim() == 0:
        return lambda _: whole  # a scalar has no batch axis, so it can only be meant for every microbatch
    if not -value.dim() <= cut.axis < value.dim():
        raise UsageError(
            f"argument `{cut.name}` has shape {tuple(value.shape)} and no axis {cut.axis} to split",
            hint="name its batch axis in input_split_axes, or the argument in non_split_inputs",
        )
    size = value.shape[cut.axis]
    if size % cut.count:
        raise UsageError(
            f"argument `{cut.name}` has a batch of {size} on axis {cut.axis}, "
            f"which {cut.count} microbatches do not divide",
            hint="use DataLoader(drop_last=True) and a batch size that `microbatches` divides,"
            " or name the argument in non_split_inputs",
        )
    part = size // cut.count
    # `narrow`, not `chunk`: autograd refuses in-place changes of a tensor that came from a many-output view.
    return lambda index: whole.narrow(cut.axis, index * part, part)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


# --- One call of a step function, while it runs: which microbatch, and how many backwards are still to come -----------


@dataclass
class StepProgress:
    """One call of a step function, while it runs.

    `backwards` counts the calls of `model.backward` in the current microbatch. `expected_backwards` is how many a
    microbatch of this function makes (learnt from the one before), so that the last one is known when it comes and
    gradients can be reduced while it runs.
    """

    num_microbatches: int
    microbatch: int = 0
    backwards: int = 0
    total_backwards: int = 0
    expected_backwards: int | None = None

    @property
    def is_last_backward(self) -> bool:
        last_microbatch = self.microbatch == self.num_microbatches - 1
        return last_microbatch and self.backwards + 1 == self.expected_backwards

    def end_microbatch(self) -> None:
        self.expected_backwards = self.backwards
        self.total_backwards += self.backwards
        self.backwards = 0


# --- The gradients that a microbatch's backward starts with, so that a step ends with the average over microbatches ---


def scaled_root_gradient(root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Return the gradient that backward starts with at `root`: the given one, or 1, times `scale`.

    None leaves it to torch: without a gradient a root must be a scalar, and of any other torch says what is wrong.
    """
    if scale == 1.0:
        return grad
    if grad is not None:
        return grad * scale
    return torch.full_like(root, scale) if root.numel() == 1 else None


class RootGradients:
    """Root gradients; the next microbatch most often needs the one of the last."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._latest: torch.Tensor | None = None

    def scaled(self, root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return what `scaled_root_gradient` does."""
        latest = self._latest
        if (
            grad is None
            and latest is not None
            and scale == self._scale
            and root.shape == latest.shape
            and root.dtype is latest.dtype
            and root.device == latest.device
            and latest._version == 0  # a backward of the user's may have changed what it was given
        ):
            return latest
        gradient = scaled_root_gradient(root, grad, scale)
        if grad is None and gradient is not None:
            self._scale, self._latest = scale, gradient
        return gradient
