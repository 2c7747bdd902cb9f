"""Which classes tensor parallelism can replace, by what, and how their arguments, calls and weights translate.

The class that is replaced may be named by a string, so that a library is imported only once a model of it is there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_callable
from smpkit.torch.tensor_parallel.embedding import DistributedEmbedding
from smpkit.torch.tensor_parallel.linear import DistributedLinear

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""

ArgumentHook = Callable[..., tuple[Iterable[Any], Mapping[str, Any]]]
"""Takes exactly the arguments of an original `__init__` or `forward`, and returns those of the distributed one."""

TensorOrFactory = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or what makes it when it is wanted."""


def tensor_of(value: TensorOrFactory) -> torch.Tensor:
    """Return the tensor, which is made now if `value` makes it."""
    return value() if callable(value) else value


Translation = Callable[[Mapping[str, torch.Tensor], nn.Module], Iterable[tuple[str, TensorOrFactory]]]
"""Turns a whole state dict (of all tensor-parallel ranks together) into another one.

Called with the state and the *distributed* module, which knows its sizes; yields names, each with its whole tensor or,
better, with a function that makes it::

    def to_distributed(state, module):
        for name in state:
            yield name.replace("mlp.fc", "output.dense1"), lambda name=name: state[name].t()

So weights are made and divided one at a time, and those of other pipeline ranks not at all: `state` may compute a
tensor when it is read. A name that `state` lacks is left out, and so is everything that depends on it.
"""

_Module = TypeVar("_Module", bound=type[nn.Module])


@dataclass(frozen=True)
class ReplacementRule:
    """How instances of one class become distributed modules.

    Args:
        original: the class (exactly: a subclass may compute something else), or its qualified name.
        distributed: the class that takes its place.
        init_hook: makes the distributed class's arguments from the original's; None: they are the same.
        forward_hook, return_hook: convert a call's arguments and result; None: they are the same.
        arguments: reads the original's arguments from an instance, where they need not have been recorded.
        to_distributed: from the original's whole state to the distributed module's whole state; None: not known, and
            the distributed module starts with weights of its own.
        from_distributed: the reverse.
        keeps_weights: whether the script itself gave `to_distributed`, to keep weights where SMP v1 drew fresh ones.
        finish: called with the original and the distributed module when that has its weights, to hand over what else
            users expect there (`config`, and what `gradient_checkpointing_enable` has set).
        refusal: returns why one instance cannot be replaced; None if it can.
    """

    original: type[nn.Module] | str
    distributed: type[nn.Module]
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
        if not isinstance(self.original, str):
            return self.original
        place, _, name = self.original.rpartition(".")
        imported: type[nn.Module] = getattr(importlib.import_module(place), name)
        return imported


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
    options: dict[str, Any] = {"to_distributed": to_distributed, "from_distributed": from_distributed}

    def decorate(original: _Module) -> _Module:
        tp_register_with_module(original, dist_module, init_hook, forward_hook, return_hook, **options)
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

    Call it before instances are created: the arguments that they get are recorded from now on.

    Raises:
        UsageError: not a class of modules, or a hook that cannot be called.
    """
    _check_class(module_cls, "module_cls")
    _check_class(dist_module, "dist_module")
    hooks: dict[str, Any] = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    hooks |= {"to_distributed": to_distributed, "from_distributed": from_distributed}
    for name, hook in hooks.items():
        if hook is not None:
            check_callable(name, hook)
    # A class that smpkit knows keeps its way of reading arguments, so instances of before this call can be replaced.
    known = _rules.get(qualified_name(module_cls))
    arguments = None if known is None else known.arguments
    keeps_weights = to_distributed is not None
    register(ReplacementRule(module_cls, dist_module, arguments=arguments, keeps_weights=keeps_weights, **hooks))


def _check_class(value: object, name: str) -> None:
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        raise UsageError(f"{name} must be a class of torch.nn.Module, got {value!r}")


# --- what is registered -----------------------------------------------------------------------------------------------


def qualified_name(kind: type) -> str:
    """Return the name by which a class is known here, `torch.nn.modules.linear.Linear` say."""
    return f"{kind.__module__}.{kind.__qualname__}"


def rule_for(module: nn.Module) -> ReplacementRule | None:
    """Return how to replace a module; None if its class is not registered."""
    kind = type(module)
    # `fully_shard` puts a class of its own before the module's; known by its name, as its import takes a second.
    if kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[-1]
    return _rules.get(qualified_name(kind))


def arguments_of(module: nn.Module, rule: ReplacementRule) -> CallArguments:
    """Return the arguments for the distributed class that the original's arguments become."""
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
    """Return the arguments with those keyword arguments of the user's that `kind` knows by name."""
    signature = inspect.signature(kind)
    try:
        bound = signature.bind(*arguments[0], **arguments[1])
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made with the arguments that its init hook returned: {error}",
            hint=f"its arguments are {signature}",
        ) from error
    chosen = {name: overrides[name] for name in argument_names(kind) & overrides.keys()}
    bound.arguments.update({name: chosen.pop(name) for name in signature.parameters if name in chosen})
    return bound.args, {**bound.kwargs, **chosen}


def argument_names(kind: type[nn.Module]) -> set[str]:
    """Return the names by which the arguments of a class can be given."""
    parameters = inspect.signature(kind).parameters.values()
    named = {param.name for param in parameters if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)}
    return named | {*getattr(kind, "options", ())}


# --- torch.nn classes ----------------------------------------------------------------------------------------------


def _linear_arguments(linear: Any) -> CallArguments:
    return (linear.in_features, linear.out_features), {} if linear.bias is not None else {"bias": False}


def _embedding_arguments(embedding: Any) -> CallArguments:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    sizes = embedding.num_embeddings, embedding.embedding_dim
    return sizes, {name: getattr(embedding, name) for name in names}


def _same_names(state: Mapping[str, torch.Tensor], _: nn.Module) -> Iterable[tuple[str, TensorOrFactory]]:
    return ((name, functools.partial(state.__getitem__, name)) for name in state)


_SAME: Final[dict[str, Any]] = {"to_distributed": _same_names, "from_distributed": _same_names}
register(ReplacementRule(nn.Linear, DistributedLinear, arguments=_linear_arguments, **_SAME))
register(ReplacementRule(nn.Embedding, DistributedEmbedding, arguments=_embedding_arguments, **_SAME))
