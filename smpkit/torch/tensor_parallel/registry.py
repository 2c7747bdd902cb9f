"""Which classes tensor parallelism can replace, by what, and how their arguments, calls and weights translate.

Classes may be named by a string, so that a rule for a library imports it only once a model of it is there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_callable

__all__ = [
    "CallArguments",
    "ReplacementRule",
    "TensorOrFactory",
    "Translation",
    "argument_names",
    "arguments_of",
    "qualified_name",
    "register",
    "rule_for",
    "tp_register",
    "tp_register_with_module",
    "with_overrides",
]

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""

ArgumentHook = Callable[..., tuple[Iterable[Any], Mapping[str, Any]]]
"""Takes exactly the arguments of an original `__init__` or `forward`, and returns those of the distributed one."""

TensorOrFactory = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or what makes it when it is wanted."""

Translation = Callable[[Mapping[str, torch.Tensor], nn.Module], Iterable[tuple[str, TensorOrFactory]]]
"""Turns a whole state dict (of all tensor-parallel ranks together) into another one.

Called with the state and the *distributed* module, which knows its sizes; yields names, each with its whole tensor or,
better, with a function that makes it::

    def to_distributed(state, module):
        for name in state:
            yield name.replace("mlp.fc", "output.dense1"), lambda name=name: state[name].t()

So weights are made and taken apart one at a time, and those of other pipeline ranks not at all: `state` may compute a
tensor when it is asked for. A name that `state` lacks is left out, with everything that depends on it.
"""

_Module = TypeVar("_Module", bound=type[nn.Module])


@dataclass(frozen=True)
class ReplacementRule:
    """How instances of one class become distributed modules.

    Args:
        original: the class (exactly: a subclass may compute something else), or its qualified name.
        distributed: the class that takes its place, or its qualified name.
        init_hook: makes the distributed class's arguments from the original's; None: they are the same.
        forward_hook, return_hook: convert a call's arguments and result; None: they are the same.
        arguments: reads the original's arguments from an instance, where they need not have been recorded.
        to_distributed: from the original's whole state to the distributed module's whole state; None: not known, and
            the distributed module starts with weights of its own.
        from_distributed: the reverse.
        keeps_weights: whether the script itself gave `to_distributed`, to keep weights where SMP v1 drew fresh ones.
        finish: called with the original and the distributed module when that has its weights, to hand over what else
            users expect there (`config`, say).
        refusal: returns why one instance cannot be replaced; None if it can.
    """

    original: type[nn.Module] | str
    distributed: type[nn.Module] | str
    init_hook: ArgumentHook | None = None
    forward_hook: ArgumentHook | None = None
    return_hook: Callable[[Any], Any] | None = None
    arguments: Callable[[nn.Module], CallArguments] | None = None
    to_distributed: Translation | None = None
    from_distributed: Translation | None = None
    keeps_weights: bool = False
    finish: Callable[[nn.Module, nn.Module], None] | None = None
    refusal: Callable[[nn.Module], str | None] | None = None

    @property
    def original_class(self) -> type[nn.Module]:
        """The class that is replaced, imported now if it was named."""
        return _import_class(self.original) if isinstance(self.original, str) else self.original

    @property
    def distributed_class(self) -> type[nn.Module]:
        """The class that takes the original's place, imported now if it was named."""
        return _import_class(self.distributed) if isinstance(self.distributed, str) else self.distributed


_rules: dict[str, ReplacementRule] = {}
"""By qualified name of the original class; the last registration counts."""


# --- registration -----------------------------------------------------------------------------------------------------


def register(rule: ReplacementRule) -> None:
    """Let marked modules of `rule.original` be replaced; a later rule for the same class takes its place."""
    original = rule.original
    if not isinstance(original, str):
        if rule.arguments is None:
            _record_arguments(original)
        original = qualified_name(original)
    _rules[original] = rule


_RECORDED: Final = "_smp_arguments"


def _record_arguments(kind: type[nn.Module]) -> None:
    """Record on every instance that is made from now on the arguments that it was made with."""
    plain = kind.__init__
    if getattr(plain, _RECORDED, False):
        return

    @functools.wraps(plain)
    def recording(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        # Past nn.Module's registration: an argument that is a module must not become a child. A subclass's own
        # __init__ that calls this one may have other arguments, and only exact instances are replaced.
        if type(self) is kind:
            object.__setattr__(self, _RECORDED, (args, kwargs))

    setattr(recording, _RECORDED, True)
    kind.__init__ = recording  # type: ignore[method-assign]


def tp_register(
    dist_module: type[nn.Module],
    init_hook: ArgumentHook | None = None,
    forward_hook: ArgumentHook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
    *,
    to_distributed: Translation | None = None,
    from_distributed: Translation | None = None,
) -> Callable[[_Module], _Module]:
    """Decorate a module class, so that its marked instances become `dist_module` (the decorator of SMP v1).

    ::

        @smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda width: ((width, width), {}))
        class Square(nn.Module): ...

    Args:
        dist_module: a `smp.nn.DistributedModule` class.
        init_hook, forward_hook: take exactly the arguments of the decorated class's `__init__` and `forward` without
            `self`, and return `(args, kwargs)` for those of `dist_module`; None: the same arguments.
        return_hook: converts what `dist_module.forward` returns into what the decorated class would return.
        to_distributed, from_distributed: translate whole state dicts, so that replaced modules keep their weights
            (an extension: SMP v1 always started afresh). See `Translation`.

    Raises:
        UsageError: not a class of modules, or a hook that cannot be called.
    """
    _check_class(dist_module, "dist_module")

    def decorate(original: _Module) -> _Module:
        tp_register_with_module(
            original,
            dist_module,
            init_hook,
            forward_hook,
            return_hook,
            to_distributed=to_distributed,
            from_distributed=from_distributed,
        )
        return original

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: ArgumentHook | None = None,
    forward_hook: ArgumentHook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
    *,
    to_distributed: Translation | None = None,
    from_distributed: Translation | None = None,
) -> None:
    """Do for an existing class what `smp.tp_register` does for one that is being written.

    Call it before instances are made: the arguments they are made with are recorded from now on.

    Raises:
        UsageError: not a class of modules, or a hook that cannot be called.
    """
    _check_class(module_cls, "module_cls")
    _check_class(dist_module, "dist_module")
    functions = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    for name, given in {**functions, "to_distributed": to_distributed, "from_distributed": from_distributed}.items():
        if given is not None:
            check_callable(name, given)
    rule = ReplacementRule(
        module_cls,
        dist_module,
        init_hook,
        forward_hook,
        return_hook,
        to_distributed=to_distributed,
        from_distributed=from_distributed,
        keeps_weights=to_distributed is not None,
    )
    # A class that smpkit knows keeps its way of reading arguments, so instances made before this call can be replaced.
    known = _rules.get(qualified_name(module_cls))
    register(rule if known is None else replace(rule, arguments=known.arguments))


def _check_class(given: object, name: str) -> None:
    if not (isinstance(given, type) and issubclass(given, nn.Module)):
        raise UsageError(f"{name} must be a class of torch.nn.Module, got {given!r}")


# --- what is registered -----------------------------------------------------------------------------------------------


def qualified_name(kind: type) -> str:
    """Return the name by which a class is known here, `torch.nn.modules.linear.Linear` say."""
    return f"{kind.__module__}.{kind.__qualname__}"


def rule_for(module: nn.Module) -> ReplacementRule | None:
    """Return how to replace a module; None if its class is not registered."""
    return _rules.get(qualified_name(type(module)))


def _import_class(name: str) -> type[nn.Module]:
    place, _, kind = name.rpartition(".")
    found: type[nn.Module] = getattr(importlib.import_module(place), kind)
    return found


def arguments_of(module: nn.Module, rule: ReplacementRule) -> CallArguments:
    """Return the arguments for the distributed class that the original's arguments become.

    Raises:
        UsageError: the original was made before its class was registered, or its init hook does not take its arguments.
    """
    if rule.arguments is not None:
        args, kwargs = rule.arguments(module)
    else:
        recorded: CallArguments | None = vars(module).get(_RECORDED)
        if recorded is None:
            raise UsageError(
                f"nothing is known about how this {type(module).__name__} was made",
                hint="call smp.tp_register_with_module before the model is created",
            )
        args, kwargs = recorded
    if rule.init_hook is None:
        return args, kwargs
    hook_args, hook_kwargs = rule.init_hook(*args, **kwargs)
    return tuple(hook_args), dict(hook_kwargs)


def with_overrides(kind: type[nn.Module], arguments: CallArguments, overrides: Mapping[str, Any]) -> CallArguments:
    """Return the arguments with those keyword arguments of the user's that `kind` knows by name.

    Raises:
        UsageError: `kind` cannot be made with these arguments.
    """
    signature = inspect.signature(kind)
    try:
        bound = signature.bind(*arguments[0], **arguments[1])
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made with the arguments that its init hook returned: {error}",
            hint=f"its arguments are {signature}",
        ) from error
    for name in argument_names(kind) & overrides.keys():
        bound.arguments[name] = overrides[name]
    return bound.args, bound.kwargs


def argument_names(kind: type[nn.Module]) -> set[str]:
    """Return the names by which the arguments of a class can be given."""
    return {
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


# --- torch.nn classes ----------------------------------------------------------------------------------------------


def _linear_arguments(linear: nn.Module) -> CallArguments:
    assert isinstance(linear, nn.Linear)
    bias: nn.Parameter | None = linear.bias  # torch declares it as always there
    return (linear.in_features, linear.out_features), {} if bias is not None else {"bias": False}


def _embedding_arguments(embedding: nn.Module) -> CallArguments:
    assert isinstance(embedding, nn.Embedding)
    return (embedding.num_embeddings, embedding.embedding_dim), {
        "padding_idx": embedding.padding_idx,
        "max_norm": embedding.max_norm,
        "norm_type": embedding.norm_type,
        "scale_grad_by_freq": embedding.scale_grad_by_freq,
        "sparse": embedding.sparse,
    }


def _same_names(state: Mapping[str, torch.Tensor], _: nn.Module) -> Iterable[tuple[str, TensorOrFactory]]:
    return ((name, functools.partial(state.__getitem__, name)) for name in state)


register(
    ReplacementRule(
        nn.Linear,
        "smpkit.torch.tensor_parallel.layers.linear.DistributedLinear",
        arguments=_linear_arguments,
        to_distributed=_same_names,
        from_distributed=_same_names,
    )
)

register(
    ReplacementRule(
        nn.Embedding,
        "smpkit.torch.tensor_parallel.layers.embedding.DistributedEmbedding",
        arguments=_embedding_arguments,
        to_distributed=_same_names,
        from_distributed=_same_names,
    )
)
