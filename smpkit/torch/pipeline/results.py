"""What calls return, so that a rank that does not run one can go on without asking.

The rank that runs a call of a new kind tells the others what came out: its *template*, the result with a TensorSpec in
each tensor's place, and its effects on its arguments (see `effects.py`). From then on everyone makes ghosts from it.
Equal kinds of call have equal keys: the module or operation, its mode, and the specs of its arguments.

[Note: calls like the one before] A call most often has the arguments of the same call in the microbatch before. So for
each module and operation the latest call is kept in a form that is compared part by part, mostly by identity, and no
key is made; only where that fails is the call described, and looked up among all.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

import torch

from smpkit.torch.containers import children, rebuild
from smpkit.torch.pipeline.effects import Effects
from smpkit.torch.pipeline.located import Located, locate
from smpkit.torch.pipeline.specs import PLAIN, TensorSpec

__all__ = ["UNKNOWN", "Call", "Results", "difference", "ghosts", "is_same", "plain_spec_of"]

UNKNOWN: Final[Any] = object()
"""The template of a call that nobody has seen yet: not None, which is what a call such as `x[0] = 1` returns."""

_Mode = tuple[object, bool, torch.dtype | None]


@dataclass(slots=True)
class Call:
    """A kind of call: `key` says all that its result depends on."""

    key: tuple[Any, ...]
    template: Any
    effects: Effects | None
    """What it does to its arguments."""
    arguments: tuple[Any, ...] | None
    """A part for each positional argument, to compare with; None if the call has others, or containers."""
    mode: _Mode


def plain_spec_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a result depends on of a tensor that all ranks hold."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, strides, tensor.dtype, tensor.requires_grad


def _to_compare(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return arguments in the form that `Call.takes` compares; None if they hold what must be described."""
    parts: list[Any] = []
    for argument in args:
        kind = type(argument)
        if kind is Located:
            parts.append(argument.spec)
        elif kind in PLAIN:
            parts.append((kind, argument))
        elif isinstance(argument, torch.Tensor):
            parts.append(plain_spec_of(argument))
        else:
            return None
    return tuple(parts)


class Results:
    """What calls return, by kind of call; filled while microbatches run, alike on all ranks.

    Args:
        weights_elsewhere: ids of the parameters that not every rank holds; what a call makes of one must be described.
    """

    def __init__(self, weights_elsewhere: Container[int] = ()) -> None:
        self._weights_elsewhere = weights_elsewhere
        self._known: dict[tuple[Any, ...], tuple[Any, Effects | None]] = {}
        self._latest: dict[Any, Call] = {}

    def latest(self, target: Any, mode: _Mode, args: tuple[Any, ...]) -> Call | None:
        """Return the latest call of `target` if one with these arguments is of its kind; a None costs only time."""
        call = self._latest.get(target)
        if call is None or call.arguments is None or call.mode != mode or len(args) != len(call.arguments):
            return None
        for argument, known in zip(args, call.arguments, strict=True):
            kind = type(argument)
            if kind is Located:
                if argument.spec is not known:
                    return None
            elif kind in PLAIN:
                if type(known) is not tuple or known[0] is not kind or known[1] != argument:
                    return None
            elif (
                not isinstance(argument, torch.Tensor)
                or id(argument) in self._weights_elsewhere
                or plain_spec_of(argument) != known
            ):
                return None
        return call

    def latest_of_one(self, target: Any, mode: _Mode, spec: TensorSpec) -> Call | None:
        """Return what `latest` would for one located argument, which is what most calls get."""
        call = self._latest.get(target)
        if call is None or (known := call.arguments) is None or len(known) != 1 or known[0] is not spec:
            return None
        return call if call.mode == mode else None

    def look_up(self, call: Call) -> None:
        """See what a call returns and does, if another of its kind has been made since it was described."""
        call.template, call.effects = self._known.get(call.key, (UNKNOWN, None))

    def remember(self, call: Call, template: Any, effects: Effects | None) -> None:
        """Note what a call of a new kind returns and does."""
        self._known[call.key] = call.template, call.effects = template, effects

    def described(self, target: Any, mode: _Mode, args: tuple[Any, ...] | None, key: tuple[Any, ...]) -> Call:
        """Return a call that had to be described, which is the latest of its target from now on.

        Args:
            args: the arguments, if they are all that `key` describes.
        """
        arguments = None if args is None else _to_compare(args)
        call = self._latest[target] = Call(key, *self._known.get(key, (UNKNOWN, None)), arguments, mode)
        return call


def ghosts(template: Any, device: torch.device, home: int) -> Any:
    """Return the result of a call that rank `home` runs, without data."""
    if type(template) is TensorSpec:
        return locate(template, device, home)
    if type(template) is tuple:
        return tuple([ghosts(part, device, home) for part in template])
    inside = children(template)
    if inside is None:
        return template
    return rebuild(template, {key: ghosts(part, device, home) for key, part in inside.items()})


def is_same(left: Any, right: Any) -> bool:
    """Compare templates by their tensors; other leaves are the user's objects, which may have no equality."""
    if isinstance(left, TensorSpec) or isinstance(right, TensorSpec):
        return bool(left == right)
    parts, others = children(left), children(right)
    if parts is None or others is None:
        return type(left) is type(right)
    return parts.keys() == others.keys() and all(is_same(part, others[key]) for key, part in parts.items())


def difference(left: Any, right: Any) -> str:
    """Say, for an error, how templates differ."""
    for first, now in zip(_specs_in(left), _specs_in(right), strict=False):
        if first != now:
            return f"{first} the first time and {now} now"
    return "another structure than before"


def _specs_in(template: Any) -> list[TensorSpec]:
    """Return the specs in a template, in order."""
    if isinstance(template, TensorSpec):
        return [template]
    return [spec for part in (children(template) or {}).values() for spec in _specs_in(part)]
