"""Put distributed modules in the place of marked ones: what `smp.DistributedModel` does first under tensor parallelism.

::

    find      the outermost marked modules that are supported; the distributed ones are constructed, without memory
    compare   the tensor-parallel ranks: they must do the same next, to models of the same shapes
    replace   parameter by parameter, each becomes this rank's piece, so no rank ever holds two whole models
    install   where a parent has the old module as a child, it gets the new one

A distributed module is called as the one that it replaced, and keeps its weights, its partition and what was frozen.
Hugging Face models with a plan of their own (`_tp_plan`) are divided in place instead.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import ConfigError, UnsupportedError, UsageError
from smpkit.torch.core.announce import announce
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import delay_param_initialization, initialize, is_delayed, set_initializer
from smpkit.torch.placement.manual import inherit_partition
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.agreement import compare_models, weights_of_first_rank
from smpkit.torch.tensor_parallel.marking import Marking, default_dtype, loaded_modules, marking_of
from smpkit.torch.tensor_parallel.module import DistributedModule, global_shape, load_shard
from smpkit.torch.tensor_parallel.plan import apply_tp_plan, has_tp_plan
from smpkit.torch.tensor_parallel.registry import (
    ReplacementRule,
    Translation,
    argument_names,
    arguments_of,
    rule_for,
    with_overrides,
)

__all__ = [
    "applied_rule_of",
    "distribute",
    "distribute_without_weights",
    "refuse_replaced_parameters",
    "replacement_stubs",
]


def distribute(root: nn.Module, *, at_degree_1: bool = False, fresh_weights: bool | None = None) -> nn.Module:
    """Replace what is marked in a model and return the model: another object only if it was replaced as a whole.

    Modules keep their weights where a translation is known, and else draw new ones that depend on the seed and their
    names only: one seed gives one model at every degree. All ranks of a tensor-parallel group call this together.

    Args:
        at_degree_1: whether one rank has distributed modules, too, so that a model has the same modules and names at
            every degree.
        fresh_weights: whether modules that are replaced draw new weights though a translation is known; None: in
            scripts of SMP v1 without `_match_weights`, where no weights were loaded into them.

    Raises:
        UsageError: the model differs between tensor-parallel ranks, a marked module cannot be constructed as
            registered, or it is checkpointed already.
    """
    if state.tp_size == 1 and not at_degree_1:
        return root
    finder = _Finder(root)
    finder.visit(root, "")
    if state.tp_size == 1:
        # What is divided in place has its own modules and names at every degree.
        finder.targets = [target for target in finder.targets if target.rule is not None]
        if not finder.targets:
            return root
    for name in _checkpointed(finder.targets):
        raise UsageError(
            f"`{name or 'the model'}` is checkpointed, and tensor parallelism replaces it",
            hint="call smp.set_activation_checkpointing after smp.DistributedModel",
        )
    # Before anything is sent for a single module: ranks that found other modules would wait for each other.
    names = [*finder.skipped, *(target.name for target in finder.targets)]
    seed, fresh = compare_models(root, names, _fresh_by_name(root, finder.targets, fresh_weights))
    for target, is_fresh in zip(finder.targets, fresh, strict=True):
        target.is_fresh = is_fresh
        if target.rule is None:
            for parameter in target.module.parameters():
                if not is_delayed(parameter):
                    parameter.data = weights_of_first_rank(parameter.data)
            apply_tp_plan(target.module)
        else:
            _fill(target, target.rule.to_distributed, seed)
            _replace(target, target.rule)
    if state.rank == 0:
        announce(_report(finder))
    # Last: until here the old modules are in the model, and translations and the report read them there.
    return _install_replacements(root, finder.targets)


def distribute_without_weights(root: nn.Module) -> tuple[nn.Module, list[str]]:
    """Do what `distribute` does, without weights and other ranks, for `smpkit plan`; return the model and the report.

    Raises:
        UsageError: a marked module cannot be constructed as registered.
    """
    finder = _Finder(root)
    finder.visit(root, "")
    report = [*_report(finder)]
    report += [
        f"  not checkpointed in this plan: `{name}`, which is replaced" for name in _checkpointed(finder.targets)
    ]
    for target in finder.targets:
        if target.rule is None:
            apply_tp_plan(target.module)
        else:
            _replace(target, target.rule)
    return _install_replacements(root, finder.targets), report


def replacement_stubs(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, ReplacementRule]]:
    """Yield the modules that tensor parallelism would replace: name, module, replacement and rule.

    Replacements have no memory. They give names and sizes, with which checkpoints of other degrees are translated.
    """
    finder = _Finder(root)
    finder.visit(root, "")
    for target in finder.targets:
        if target.rule is not None and target.replacement is not None:
            yield target.name, target.module, target.replacement, target.rule


_RULE: Final = "_smp_replacement_rule"


def applied_rule_of(module: nn.Module) -> ReplacementRule | None:
    """Return the rule by which a distributed module replaced another; None if it replaced none."""
    rule: ReplacementRule | None = vars(module).get(_RULE)
    return rule


# --- what was set before wrapping -------------------------------------------------------------------------------------

_REPLACED: Final = "_smp_replaced"
"""On a parameter of a module that was replaced: its name in the model."""


def refuse_replaced_parameters(optimizer: Any) -> None:
    """Refuse an optimizer of parameters that tensor parallelism has replaced, or with states of whole ones.

    Raises:
        UsageError: it was constructed before smp.DistributedModel.
    """
    hint = "make the optimizer of `model.parameters()` after smp.DistributedModel"
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = [getattr(each, _REPLACED) for each in parameters if hasattr(each, _REPLACED)]
    kind = type(optimizer).__name__
    if names:
        others = f" and {len(names) - 1} other parameters of its" if names[1:] else ""
        raise UsageError(
            f"{kind} was made before smp.DistributedModel, which has replaced `{names[0]}`{others}", hint=hint
        )
    for parameter in parameters:  # those that are divided in place
        shard, values = shard_of(parameter), (optimizer.state.get(parameter) or {}).values()
        shapes = {tuple(each.shape) for each in values if isinstance(each, torch.Tensor)}
        if shard is not None and shard.shape != shard.local_shape and shard.shape in shapes:
            raise UsageError(f"{kind} has states of parameters that smp.DistributedModel has divided", hint=hint)


def _checkpointed(targets: Iterable[_Target]) -> Iterator[str]:
    """Yield the names of checkpointed modules that are replaced: the setting would go with them."""
    for target in targets:
        if target.rule is not None:
            for name, module in target.module.named_modules(prefix=target.name):
                if ModuleCall.of(module).checkpointing is not None:
                    yield name


# --- find what is replaced --------------------------------------------------------------------------------------------


@dataclass
class _Target:
    """A module that will be replaced by its rule or, without one, divided in place; `name` is where it is first."""

    name: str
    module: nn.Module
    marking: Marking
    rule: ReplacementRule | None = None
    replacement: nn.Module | None = None
    is_fresh: bool = False
    """Whether it draws new weights, instead of translating those of the module."""


class _Finder:
    """Walks down a model and stops at what can be distributed."""

    def __init__(self, root: nn.Module) -> None:
        self.targets: list[_Target] = []
        self.skipped: dict[str, str] = {}
        """Why a marked module stays as it is, by name."""
        self.num_custom = sum(isinstance(module, DistributedModule) for module in root.modules())
        """How many distributed modules the script itself has constructed."""
        self._seen: set[int] = set()
        self._modules_using: dict[int, set[int]] = defaultdict(set)
        """Which modules (by id) have a parameter (by id) of their own."""
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                self._modules_using[id(parameter)].add(id(module))

    def visit(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        marking = marking_of(module)
        if marking is not None and marking.enabled and self._distributes(module, name, marking):
            self._seen.update(id(each) for each in module.modules())
            return
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name)

    def _distributes(self, module: nn.Module, name: str, marking: Marking) -> bool:
        """Record the module as a target, or in `skipped` why it is none; unsupported classes are skipped silently."""
        rule, has_plan = rule_for(module), has_tp_plan(module)
        if rule is None and not has_plan:
            return False
        tied = self._why_tied(module)
        reason = self._why_excepted(module) or tied
        if reason is None and rule is not None:
            try:
                reason = rule.refusal(module) if rule.refusal is not None else None
                if reason is None:
                    self.targets.append(_Target(name, module, marking, rule, _construct(module, rule, marking)))
                    return True
            except (ConfigError, UnsupportedError) as error:
                reason = _error_text(error)
        # A plan leaves out the parts that the user excepted, so only ties to other modules rule it out.
        if has_plan and tied is None:
            self.targets.append(_Target(name, module, marking))
            return True
        self.skipped[name] = f"{type(module).__name__} `{name or 'model'}`: {reason}"
        return False

    def _why_excepted(self, module: nn.Module) -> str | None:
        if any((marking := marking_of(each)) is not None and not marking.enabled for each in module.modules()):
            return "a part of it is excepted from tensor parallelism"
        return None

    def _why_tied(self, module: nn.Module) -> str | None:
        """Return what ties a module to the rest of the model, so that it cannot be distributed by itself."""
        ids = {id(each) for each in module.modules()}
        for parameter in module.parameters():
            if self._modules_using[id(parameter)] - ids:
                return f"it shares the weight `{self._names[id(parameter)]}` with another module"
        return None


def _error_text(error: ConfigError | UnsupportedError) -> str:
    return "; ".join(map(str, error.problems)) if isinstance(error, ConfigError) else error.message


def _construct(module: nn.Module, rule: ReplacementRule, marking: Marking) -> nn.Module:
    """Construct the distributed module, without memory for its weights and without drawing random numbers."""
    kind = rule.distributed_class
    args, kwargs = with_overrides(kind, arguments_of(module, rule), marking.config)
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    # On the host, whatever the user's default device is: weights get memory in `_fill`, not before. The fork
    # leaves the script's random numbers as they were.
    with torch.device("cpu"), torch.random.fork_rng([]), delay_param_initialization(), default_dtype(dtype):
        return kind(*args, **kwargs)


def _fresh_by_name(root: nn.Module, targets: Iterable[_Target], asked: bool | None) -> dict[str, bool]:
    """Return which targets draw fresh weights, as this rank sees it."""
    as_v1 = state.is_v1_script and not state.cfg.match_weights
    loaded = loaded_modules(root) if asked is None and as_v1 else set()

    def is_fresh(target: _Target) -> bool:
        if target.rule is None or target.rule.keeps_weights:
            return False
        return as_v1 and loaded.isdisjoint(map(id, target.module.modules())) if asked is None else asked

    return {target.name: is_fresh(target) for target in targets}


# --- replace it -------------------------------------------------------------------------------------------------------


def _fill(target: _Target, translation: Translation | None, seed: int) -> None:
    """Give a distributed module this rank's pieces of the weights of the one that it replaces, or weights of its own.

    Weights of its own depend on the seed and its name, and on nothing else. A module without memory yet
    (`smp.delay_param_initialization`) gets these when the model is placed.

    Raises:
        UsageError: the translation yields a name or a shape that the distributed module does not have.
    """
    name, module, replacement = target.name, target.module, target.replacement
    assert replacement is not None

    def draw(wanted: Collection[int], device: torch.device) -> None:
        initialize(replacement, [each for each in replacement.parameters() if id(each) in wanted], device, seed, name)

    if any(map(is_delayed, module.parameters())):
        set_initializer(replacement, draw)
        return
    device = next((each.device for each in module.parameters()), state.device)
    if translation is not None and not target.is_fresh:
        whole = {key: value.detach() for key, value in module.state_dict(keep_vars=True).items()}
        _load_shards(replacement, whole, translation, device)
    draw({id(each) for each in replacement.parameters() if is_delayed(each)}, device)


def _load_shards(
    replacement: nn.Module, whole: Mapping[str, torch.Tensor], translation: Translation, device: torch.device
) -> None:
    """Fill the parameters and buffers of a distributed module that a translation yields, one by one."""
    own_tensors: dict[str, torch.Tensor] = dict(replacement.named_parameters(remove_duplicate=False))
    saved = replacement.state_dict(keep_vars=True)
    own_tensors.update({name: buffer for name, buffer in replacement.named_buffers() if name in saved})
    done: set[int] = set()
    for name, tensor_or_factory in translation(whole, replacement):
        tensor = own_tensors.get(name)
        if tensor is None:
            raise UsageError(f"a translation made `{name}`, which {type(replacement).__name__} does not have")
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        value = tensor_or_factory() if callable(tensor_or_factory) else tensor_or_factory
        if value.shape != global_shape(tensor):
            raise UsageError(
                f"a translation made `{name}` of {type(replacement).__name__} {list(value.shape)},"
                f" not {list(global_shape(tensor))}"
            )
        load_shard(tensor, weights_of_first_rank(value))
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _replace(target: _Target, rule: ReplacementRule) -> None:
    """Give a distributed module all but the weights of the one that it replaces."""
    module, replacement = target.module, target.replacement
    assert replacement is not None
    _keep_frozen(module, replacement)
    inherit_partition(target.name, module, replacement)
    replacement.train(module.training)
    wrap_forward(replacement, rule.forward_hook, rule.return_hook)
    object.__setattr__(replacement, _RULE, rule)
    if rule.finish is not None:
        rule.finish(module, replacement)
    for name, parameter in module.named_parameters(prefix=target.name):
        setattr(parameter, _REPLACED, name)


def _keep_frozen(module: nn.Module, replacement: nn.Module) -> None:
    """Freeze the parameters that were frozen, if the names tell which those are now.

    Raises:
        UsageError: a part of the module is frozen, and the distributed one has other names.
    """
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    if all(before.values()):
        return
    after = dict(replacement.named_parameters())
    if any(before.values()) and before.keys() != after.keys():
        frozen = [name for name, trained in before.items() if not trained]
        raise UsageError(
            f"{len(frozen)} of {len(before)} parameters of a {type(module).__name__} are frozen (`{frozen[0]}` the"
            f" first), and the {type(replacement).__name__} that takes its place has other parameters",
            hint="freeze parameters after smp.DistributedModel, by the names of the distributed modules",
        )
    for name, parameter in after.items():
        parameter.requires_grad_(before.get(name, False))


def _install_replacements(root: nn.Module, targets: list[_Target]) -> nn.Module:
    """Make the distributed modules children of all parents of the modules that they replace; return the model."""
    # A shared module has several parents, or several names in one: it is found by its id under all of them.
    new = {id(target.module): target.replacement for target in targets if target.replacement is not None}
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            replacement = new.get(id(child)) if child is not None else None
            if replacement is not None:
                parent.add_module(name, replacement)
                _disable_fast_path(parent)
    return new.get(id(root)) or root


def _disable_fast_path(parent: nn.Module) -> None:
    # In evaluation torch's fused kernel would read the weights of the children, now pieces, without calling them.
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0


# --- its calls --------------------------------------------------------------------------------------------------------


def wrap_forward(
    module: nn.Module,
    forward_hook: Callable[..., tuple[Iterable[Any], Mapping[str, Any]]] | None,
    return_hook: Callable[[Any], Any] | None,
) -> None:
    """Let a distributed module be called as the one that it replaced.

    Args:
        forward_hook: from the arguments of a call to those of the module's own forward.
        return_hook: from the module's own result to that of a call.
    """
    if forward_hook is not None or return_hook is not None:
        # On the instance, where nn.Module looks first: hooks that users register see the values they know.
        object.__setattr__(module, "forward", _WrappedForward(module, forward_hook, return_hook))


class _WrappedForward:
    """The forward of one module; an object, because copies of a module copy it with them."""

    def __init__(
        self,
        module: nn.Module,
        forward_hook: Callable[..., tuple[Iterable[Any], Mapping[str, Any]]] | None,
        return_hook: Callable[[Any], Any] | None,
    ) -> None:
        self._module = module
        self._forward_hook = forward_hook
        self._return_hook = return_hook
        if forward_hook is not None:
            # Hugging Face's Trainer, for one, reads from the signature which columns of the data a model takes.
            self.__signature__ = inspect.signature(forward_hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hook is not None:
            made_args, made_kwargs = self._forward_hook(*args, **kwargs)
            args, kwargs = tuple(made_args), dict(made_kwargs)
        # Of the class: the instance's attribute `forward` is this object.
        result = type(self._module).forward(self._module, *args, **kwargs)
        return result if self._return_hook is None else self._return_hook(result)


# --- what the log says of it ------------------------------------------------------------------------------------------


def _report(finder: _Finder) -> Iterator[str]:
    """Say what is distributed, what is not and why."""
    if finder.num_custom:
        yield f"{_over_ranks()}: {finder.num_custom} distributed modules of the script."
    elif not finder.targets and not finder.skipped:
        yield (
            "Tensor parallelism: nothing is distributed: create the model under smp.tensor_parallelism(), or call"
            " smp.set_tensor_parallelism(model) before smp.DistributedModel."
        )
    if not finder.targets and not finder.skipped:
        return
    kinds = Counter(map(_kind, finder.targets))
    distributed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    yield f"{_over_ranks()}: {distributed}."
    fresh = sum(target.is_fresh for target in finder.targets)
    if fresh:
        yield (
            f"  fresh weights, as in SMP v1, for {fresh} of {len(finder.targets)}: nothing was loaded into what they"
            " replace; `_match_weights: true` keeps the weights of the script"
        )
    for sentence in finder.skipped.values():
        yield f"  not distributed: {sentence}"
    for name in sorted(_unused_overrides(finder.targets)):
        yield f"  no distributed module has an argument `{name}`: it has no effect"


def _kind(target: _Target) -> str:
    was = type(target.module).__name__
    return was if target.replacement is None else f"{was} -> {type(target.replacement).__name__}"


def _over_ranks() -> str:
    return f"Tensor parallelism over {state.tp_size} rank{'s' if state.tp_size > 1 else ''}"


def _unused_overrides(targets: list[_Target]) -> set[str]:
    """Return the names of the user's arguments that no replaced module took."""
    asked = {name for target in targets for name in target.marking.config}
    rules = [target.rule for target in targets if target.rule is not None]
    if len(rules) < len(targets):  # a plan takes no arguments, and may be marked with those of other modules
        return set()
    return asked - {name for rule in rules for name in argument_names(rule.distributed_class)}
