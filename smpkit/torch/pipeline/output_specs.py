"""Output collectors: what Hugging Face models collect by hooks (hidden states, attentions, router logits).

Their layers do not return it: hooks put it into lists that the model's forward has opened. Over a pipeline they run
where the layer runs, so the lists would fill on its rank alone, and a loss made of them (of router logits, say) would
miss what other ranks hold. So a placed call returns, beside its result, what it has added to the lists, and every rank
adds that to its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Final

import torch

from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES, TensorSpec
from smpkit.torch.core.tree import children, rebuild
from smpkit.torch.pipeline.mutation import MutationInfo
from smpkit.torch.pipeline.stage_tensor import StageTensor, make_stage_tensor

__all__ = [
    "MISSING",
    "CachedCall",
    "Collectors",
    "OutputSpecs",
    "active_collectors",
    "add_collected",
    "collector_key",
    "describe_difference",
    "has_same_specs",
    "make_placeholders",
    "replicated_spec_of",
    "returning_collected",
]

_MODULE: Final = "transformers.utils.output_capturing"

Collectors = dict[str, Any]
"""By kind of output, a list; beside them settings, under names that begin with an underscore."""


def active_collectors() -> Callable[[], Collectors | None]:
    """Return a function that returns the active collectors; None: there are none."""
    active: Any = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    return _never if active is None else active.get


def _never() -> None:
    return None


def collector_key(collectors: Collectors) -> tuple[Any, ...]:
    """Return what decides which outputs a call adds: the kinds wanted, how many there are, which ones are kept."""
    return tuple(
        (key, len(kept) if isinstance(kept, list) else tuple(sorted(kept))) for key, kept in collectors.items()
    )


def returning_collected(collectors: Collectors, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes what `function` adds to the lists off them, and returns it with the result."""

    def called(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        counts = {key: len(kept) for key, kept in collectors.items() if isinstance(kept, list)}
        output = function(*args, **kwargs)
        collected = {key: tuple(collectors[key][count:]) for key, count in counts.items()}
        for key, count in counts.items():
            del collectors[key][count:]
        return output, collected

    return called


def add_collected(collectors: Collectors, returned: tuple[Any, dict[str, tuple[Any, ...]]]) -> Any:
    """Add to the lists what `returning_collected` took off them; return the result."""
    output, collected = returned
    for key, parts in collected.items():
        collectors[key].extend(parts)
    return output


# --- What calls return, so that a rank that does not run one can go on without asking ---------------------------------
# The rank that runs a call of a new kind tells the others what came out: its *output spec*, the result with a
# TensorSpec in each tensor's place, and how it mutates or aliases its arguments (see `effects.py`). From then on
# everyone makes placeholders from it. Equal kinds of call have equal keys: the module or operation, its mode, and the
# specs of its arguments.
#
# [Note: calls like the one before] A call most often has the arguments of the same call in the microbatch before. So
# for each module and operation the latest call is kept in a form that is compared part by part, mostly by identity, and
# no key is made; only where that fails is the call described, and looked up among all.


MISSING: Final[Any] = object()
"""The output spec of a call that nobody has seen yet: not None, which is what a call such as `x[0] = 1` returns."""

_Mode = tuple[object, bool, torch.dtype | None]


@dataclass(slots=True)
class CachedCall:
    """A kind of call: `key` says all that its result depends on."""

    key: tuple[Any, ...]
    output_spec: Any
    mutation_info: MutationInfo | None
    """What it does to its arguments."""
    arguments: tuple[Any, ...] | None
    """A part for each positional argument, to compare with; None if the call has others, or containers."""
    mode: _Mode


def replicated_spec_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a result depends on of a tensor that all ranks hold."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, strides, tensor.dtype, tensor.requires_grad


def _comparable(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return arguments in the form that `CachedCall.takes` compares; None if they hold what must be described."""
    parts: list[Any] = []
    for argument in args:
        kind = type(argument)
        if kind is StageTensor:
            parts.append(argument.spec)
        elif kind in NON_TENSOR_TYPES:
            parts.append((kind, argument))
        elif isinstance(argument, torch.Tensor):
            parts.append(replicated_spec_of(argument))
        else:
            return None
    return tuple(parts)


class OutputSpecs:
    """What calls return, by kind of call; filled while microbatches run, alike on all ranks.

    Args:
        parameter_owners: ids of the parameters that not every rank holds; what a call makes of one must be described.
    """

    def __init__(self, parameter_owners: Container[int] = ()) -> None:
        self._parameter_owners = parameter_owners
        self._known: dict[tuple[Any, ...], tuple[Any, MutationInfo | None]] = {}
        self._latest: dict[Any, CachedCall] = {}

    def find_latest(self, target: Any, mode: _Mode, args: tuple[Any, ...]) -> CachedCall | None:
        """Return the latest call of `target` if its specs match these arguments; None means the slow look-up."""
        call = self._latest.get(target)
        if call is None or call.arguments is None or call.mode != mode or len(args) != len(call.arguments):
            return None
        for argument, known in zip(args, call.arguments, strict=True):
            kind = type(argument)
            if kind is StageTensor:
                if argument.spec is not known:
                    return None
            elif kind in NON_TENSOR_TYPES:
                if type(known) is not tuple or known[0] is not kind or known[1] != argument:
                    return None
            elif (
                not isinstance(argument, torch.Tensor)
                or id(argument) in self._parameter_owners
                or replicated_spec_of(argument) != known
            ):
                return None
        return call

    def find_latest_unary(self, target: Any, mode: _Mode, spec: TensorSpec) -> CachedCall | None:
        """Return what `find_latest` would for one stage tensor as argument, which is what most calls get."""
        call = self._latest.get(target)
        if call is None or (known := call.arguments) is None or len(known) != 1 or known[0] is not spec:
            return None
        return call if call.mode == mode else None

    def look_up(self, call: CachedCall) -> None:
        """See what a call returns and does, if another of its kind has been made since it was described."""
        call.output_spec, call.mutation_info = self._known.get(call.key, (MISSING, None))

    def remember(self, call: CachedCall, output_spec: Any, mutation_info: MutationInfo | None) -> None:
        """Note what a call of a new kind returns and does."""
        self._known[call.key] = call.output_spec, call.mutation_info = output_spec, mutation_info

    def add_call(self, target: Any, mode: _Mode, args: tuple[Any, ...] | None, key: tuple[Any, ...]) -> CachedCall:
        """Return a call that had to be described, which is the latest of its target from now on.

        Args:
            args: the arguments, if they are all that `key` describes.
        """
        arguments = None if args is None else _comparable(args)
        call = self._latest[target] = CachedCall(key, *self._known.get(key, (MISSING, None)), arguments, mode)
        return call


def make_placeholders(output_spec: Any, device: torch.device, owner: int) -> Any:
    """Return the result of a call that rank `owner` runs, without data."""
    if type(output_spec) is TensorSpec:
        return make_stage_tensor(output_spec, device, owner)
    if type(output_spec) is tuple:
        return tuple([make_placeholders(part, device, owner) for part in output_spec])
    inside = children(output_spec)
    if inside is None:
        return output_spec
    return rebuild(output_spec, {key: make_placeholders(part, device, owner) for key, part in inside.items()})


def has_same_specs(left: Any, right: Any) -> bool:
    """Compare output specs by their tensors; other leaves are the user's objects, which may have no equality."""
    if isinstance(left, TensorSpec) or isinstance(right, TensorSpec):
        return bool(left == right)
    parts, others = children(left), children(right)
    if parts is None or others is None:
        return type(left) is type(right)
    return parts.keys() == others.keys() and all(has_same_specs(part, others[key]) for key, part in parts.items())


def describe_difference(left: Any, right: Any) -> str:
    """Say, for an error, how output specs differ."""
    for first, now in zip(_specs_in(left), _specs_in(right), strict=False):
        if first != now:
            return f"{first} the first time and {now} now"
    return "another structure than before"


def _specs_in(output_spec: Any) -> list[TensorSpec]:
    """Return the specs in an output spec, in order."""
    if isinstance(output_spec, TensorSpec):
        return [output_spec]
    return [spec for part in (children(output_spec) or {}).values() for spec in _specs_in(part)]
