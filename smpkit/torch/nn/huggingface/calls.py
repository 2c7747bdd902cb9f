"""Read calls of Hugging Face models that are replaced: every argument is honoured, asks for nothing, or is refused.

A call is bound by the signature of the class that was replaced, so names, order and defaults are those of the installed
`transformers`. What a family honours is what its reader takes; all else is looked at in one place.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from smpkit.errors import UnsupportedError, UsageError

__all__ = ["CallReader", "CallRules", "check_given_once", "refuse_recorded_outputs"]

_HINT: Final = "leave it out, or load the weights (`original_state_dict`) into the original model"

_ASKS_FOR_NOTHING: Final[Mapping[str, tuple[object, ...]]] = {
    "is_causal": (True,),
    "logits_to_keep": (0,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "return_dict": (True,),
    "use_cache": (False,),
}
"""Values beside None and the signature's default that ask for what is done anyway."""


_OF_ANY_CLASS: Final = frozenset({"num_items_in_batch", "return_dict"})
"""What a class that takes `**kwargs` passes on to its loss, or to its decorators."""


@dataclass(frozen=True)
class CallRules:
    """How the calls of a family become those of its distributed module.

    Args:
        honoured: the arguments that `translate` looks at, where the class has them.
        translate: from all arguments that were given, by name, to those of the distributed module.
        ignored: arguments that change nothing in the class itself.
    """

    honoured: frozenset[str]
    translate: Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    ignored: frozenset[str] = frozenset()


class CallReader:
    """The forward hook of one class: from its arguments to those of the distributed module.

    Args:
        original: the qualified name of the class that is replaced.
        rules: those of its family.
    """

    def __init__(self, original: str, rules: CallRules) -> None:
        self._original = original
        self._rules = rules

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        module, _, name = self._original.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), name).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the distributed module's arguments.

        Raises:
            TypeError: the class that was replaced could not be called like this, either.
            UnsupportedError: an argument asks for something that distributed modules do not do.
        """
        given: dict[str, Any] = {}
        known = self._rules.ignored | _OF_ANY_CLASS
        parameters = self.__signature__.parameters
        for name, value in self.__signature__.bind(*args, **kwargs).arguments.items():
            if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            else:
                given[name] = value
                # What a class takes as `**kwargs` may mean nothing to it, so only what it names is honoured.
                known |= {name} & self._rules.honoured
        for name in given.keys() - known:
            default = parameters[name].default if name in parameters else None
            if not _asks_for_nothing(name, given[name], default):
                raise UnsupportedError(
                    f"a model that tensor parallelism has replaced cannot be called with `{name}`", hint=_HINT
                )
        return self._rules.translate(given)


def _asks_for_nothing(name: str, value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)):  # a head mask of each layer
        return all(_asks_for_nothing(name, each, default) for each in value)
    if isinstance(value, torch.Tensor):
        # All heads count. Only a plain tensor has values that can be read here.
        return name == "head_mask" and type(value) is torch.Tensor and bool((value == 1).all())
    return value is None or value is default or any(value is each for each in _ASKS_FOR_NOTHING.get(name, ()))


def refuse_recorded_outputs(config: Any) -> None:
    """Refuse a configuration that asks for outputs of the layers, which a call need not name then."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedError(
                f"the configuration has `{name}`, and a model that tensor parallelism has replaced returns none",
                hint=f"set `model.config.{name} = False`",
            )


def check_given_once(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """Return tokens, or the embeddings that are given in their place."""
    given = [each for each in (input_ids, inputs_embeds) if each is not None]
    if len(given) != 1:
        raise UsageError(f"the model was called with {'both' if given else 'neither'} of `input_ids`, `inputs_embeds`")
    return given[0]
