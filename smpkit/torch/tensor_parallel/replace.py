"""Put distributed modules in the place of marked ones: what `smp.DistributedModel` does first under tensor parallelism.

::

    find      the outermost marked modules that are supported; the distributed ones are made, without memory
    compare   the tensor-parallel ranks: they must do the same next, to the same weights
    replace   parameter by parameter, each becomes this rank's piece, so no rank ever holds two whole models
    install   where a parent has the old module as a child, it gets the new one

A distributed module is called as the one that it replaced, and keeps its weights, its partition and what was frozen.
Models with a plan of their own (`Rewrite`: Hugging Face's `_tp_plan`) are divided in place instead.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import ConfigError, UnsupportedError, UsageError
from smpkit.torch.core.announce import announce
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import (
    delay_param_initialization,
    initial_values,
    initialize,
    is_delayed,
    set_initializer,
)
from smpkit.torch.placement.manual import inherit_partition
from smpkit.torch.tensor_parallel.agreement import ModelComparison, compare_models
from smpkit.torch.tensor_parallel.hf_plan.apply import apply_tp_plan, has_tp_plan
from smpkit.torch.tensor_parallel.marking import Marking, default_dtype, marking_of
from smpkit.torch.tensor_parallel.module import DistributedModule, global_shape, load_shard
from smpkit.torch.tensor_parallel.registry import (
    ReplacementRule,
    Rewrite,
    Translation,
    argument_names,
    arguments_of,
    register_rewrite,
    rewrite_for,
    rule_for,
    with_overrides,
)
from smpkit.torch.tensor_parallel.replaced import record_replacement

__all__ = ["applied_rule_of", "distribute", "distribute_without_weights", "replacement_stubs"]


def distribute(
    root: nn.Module, *, at_degree_1: bool = False, fresh: Callable[[nn.Module], bool] = lambda _: False
) -> nn.Module:
    """Replace what is marked in a model and return the model: another object only if it was replaced as a whole.

    Modules keep their weights where a translation is known, and else draw new ones that depend on the seed and their
    names only: one seed gives one model at every degree. All ranks of a tensor-parallel group call this together.

    Args:
        at_degree_1: whether one rank has distributed modules, too, so that a model has the same modules and names at
            every degree.
        fresh: whether a module that is replaced is to draw new weights though a translation is known.

    Raises:
        UsageError: the model differs between tensor-parallel ranks, or a marked module cannot be made as registered.
    """
    if state.tp_size == 1 and not at_degree_1:
        return root
    finder = _Finder(root)
    finder.visit(root, "")
    if state.tp_size == 1:
        # What is divided in place has its own modules and names at every degree.
        finder.targets = [target for target in finder.targets if target.rewrite is None]
        if not finder.targets:
            return root
    # Before anything is sent for a single module: ranks that found other modules would wait for each other.
    names = [*finder.skipped, *(target.name for target in finder.targets)]
    comparison = compare_models(
        root, names, [_may_be_fresh(target) and fresh(target.module) for target in finder.targets]
    )
    for target, is_fresh in zip(finder.targets, comparison.fresh, strict=True):
        target.is_fresh = is_fresh
        if target.rewrite is not None:
            for parameter in target.module.parameters():
                if not is_delayed(parameter):
                    parameter.data = comparison.first(parameter.data)
            target.rewrite.distribute(target.module, target.marking.config)
        else:
            _replace(root, target, comparison)
    if state.rank == 0:
        announce(_report(finder))
    # Last: until here the old modules are in the model, and translations and the report read them there.
    return _install_replacements(root, finder.targets)


def distribute_without_weights(root: nn.Module) -> tuple[nn.Module, list[str]]:
    """Do what `distribute` does, without weights and other ranks, for `smpkit plan`; return the model and the report.

    Raises:
        UsageError: a marked module cannot be made as registered.
    """
    finder = _Finder(root)
    finder.visit(root, "")
    for target in finder.targets:
        if target.rewrite is not None:
            target.rewrite.distribute(target.module, target.marking.config)
        else:
            _replace(root, target, None)
    return _install_replacements(root, finder.targets), list(_report(finder))


def replacement_stubs(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, ReplacementRule]]:
    """Yield the modules that tensor parallelism would replace: name, module, replacement and rule.

    Replacements have no memory. They give names and sizes, with which checkpoints of other degrees are translated.
    """
    finder = _Finder(root)
    finder.visit(root, "")
    for target in finder.targets:
        if target.rule is not None and target.replacement is not None:
            yield target.name, target.module, target.replacement, target.rule


def applied_rule_of(module: nn.Module) -> ReplacementRule | None:
    """Return the rule by which a distributed module replaced another; None if it replaced none."""
    rule: ReplacementRule | None = vars(module).get(_ENTRY)
    return rule


_ENTRY: Final = "_smp_entry"


# --- find what is replaced --------------------------------------------------------------------------------------------


@dataclass
class _Target:
    """A module that will be replaced or rewritten; `name` is where it is first."""

    name: str
    module: nn.Module
    marking: Marking
    rule: ReplacementRule | None = None
    replacement: nn.Module | None = None
    rewrite: Rewrite | None = None
    is_fresh: bool = False
    """Whether it draws new weights, instead of translating those of the module."""


class _Finder:
    """Walks down a model and stops at what can be distributed."""

    def __init__(self, root: nn.Module) -> None:
        self.targets: list[_Target] = []
        self.skipped: dict[str, str] = {}
        """Why a marked module stays as it is, by name."""
        self.num_custom = sum(isinstance(module, DistributedModule) for module in root.modules())
        """How many distributed modules the script itself has made."""
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
        rule, rewrite = rule_for(module), rewrite_for(module)
        if rule is None and rewrite is None:
            return False
        reason = self._why_excluded(module) or self._why_tied(module)
        if reason is None and rule is not None:
            try:
                reason = rule.refusal(module) if rule.refusal is not None else None
                made = _make(module, rule, marking) if reason is None else None
            except (ConfigError, UnsupportedError) as error:
                reason = _error_text(error)
            if reason is None:
                self.targets.append(_Target(name, module, marking, rule=rule, replacement=made))
                return True
        # A rewrite leaves out the parts that the user excepted, so only ties to other modules rule it out.
        if rewrite is not None and self._why_tied(module) is None:
            reason = rewrite.refusal(module) if rewrite.refusal is not None else None
            if reason is None:
                self.targets.append(_Target(name, module, marking, rewrite=rewrite))
                return True
        self.skipped[name] = f"{type(module).__name__} `{name or 'model'}`: {reason}"
        return False

    def _why_excluded(self, module: nn.Module) -> str | None:
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


def _make(module: nn.Module, rule: ReplacementRule, marking: Marking) -> nn.Module:
    """Make the distributed module, without memory for its weights and without drawing random numbers."""
    kind = rule.distributed_class
    args, kwargs = with_overrides(kind, arguments_of(module, rule), marking.config)
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    # On the host, whatever the user's default device is: weights get memory in `_load_shards`, not before. The fork
    # leaves the script's random numbers as they were.
    with torch.device("cpu"), torch.random.fork_rng([]), delay_param_initialization(), default_dtype(dtype):
        return kind(*args, **kwargs)


def _may_be_fresh(target: _Target) -> bool:
    return target.rule is not None and not target.rule.keeps_weights


# --- replace it -------------------------------------------------------------------------------------------------------


def _replace(root: nn.Module, target: _Target, comparison: ModelComparison | None) -> None:
    """Make a distributed module equal to the one that it replaces; without a comparison, all but its weights."""
    module, rule, replacement = target.module, target.rule, target.replacement
    assert rule is not None
    assert replacement is not None
    if comparison is not None:
        if target.is_fresh:
            draw_fresh_weights(target.name, module, replacement, comparison.seed)
        else:
            load_replacement_weights(root, target.name, module, replacement, rule.to_distributed, comparison)
    _keep_frozen(module, replacement)
    inherit_partition(target.name, module, replacement)
    replacement.train(module.training)
    wrap_forward(replacement, rule.forward_hook, rule.return_hook)
    object.__setattr__(replacement, _ENTRY, rule)
    if rule.finish is not None:
        rule.finish(module, replacement)
    record_replacement(target.name, module, replacement, rule.to_distributed)


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


# --- the weights of the one that is replaced --------------------------------------------------------------------------


def load_replacement_weights(
    root: nn.Module,
    name: str,
    module: nn.Module,
    replacement: nn.Module,
    translation: Translation | None,
    comparison: ModelComparison,
) -> None:
    """Fill `replacement` with this rank's pieces of what `module` has, or of what it would be initialised with.

    Where `module` has no memory yet, `replacement` gets its own when the model is placed. Without a translation it
    draws weights of its own, by the seed and its name.

    Args:
        root: the model, `name` that of `module` in it.
    """
    source = _OriginalState(root, name, module, comparison.seed)
    is_delayed_source = source.is_delayed
    if translation is not None:

        def fill(wanted: Collection[int], device: torch.device) -> None:
            source.device = device
            _load_shards(replacement, source, translation, wanted, comparison)

        set_initializer(replacement, fill)
    if not is_delayed_source:
        initialize(replacement, list(replacement.parameters()), _device_of(module), comparison.seed, name)


def draw_fresh_weights(name: str, module: nn.Module, replacement: nn.Module, seed: int) -> None:
    """Give `replacement` the weights that its own initialisers draw; without memory in `module`, when it is placed."""

    def draw(wanted: Collection[int], device: torch.device) -> None:
        initialize(replacement, [each for each in replacement.parameters() if id(each) in wanted], device, seed, name)

    if any(map(is_delayed, module.parameters())):
        set_initializer(replacement, draw)
    else:
        draw({id(each) for each in replacement.parameters()}, _device_of(module))


def _device_of(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), state.device)


def _load_shards(
    replacement: nn.Module,
    source: _OriginalState,
    translation: Translation,
    wanted: Collection[int],
    comparison: ModelComparison,
) -> None:
    """Fill the buffers of a distributed module, and those of its parameters whose ids are wanted, one by one.

    Raises:
        UsageError: the translation makes a name or a shape that the distributed module does not have.
    """
    own_tensors: dict[str, torch.Tensor] = dict(replacement.named_parameters(remove_duplicate=False))
    saved = replacement.state_dict(keep_vars=True)
    own_tensors.update({name: buffer for name, buffer in replacement.named_buffers() if name in saved})
    done: set[int] = set()
    for name, made in translation(source, replacement):
        tensor = own_tensors.get(name)
        if tensor is None:
            raise UsageError(f"a translation made `{name}`, which {type(replacement).__name__} does not have")
        if id(tensor) in done or (isinstance(tensor, nn.Parameter) and id(tensor) not in wanted):
            continue
        whole = made() if callable(made) else made
        if whole.shape != global_shape(tensor):
            raise UsageError(
                f"a translation made `{name}` of {type(replacement).__name__} {list(whole.shape)},"
                f" not {list(global_shape(tensor))}"
            )
        _load(tensor, comparison.first(whole), source.device)
        done.add(id(tensor))


def _load(tensor: torch.Tensor, whole: torch.Tensor, device: torch.device) -> None:
    load_shard(tensor, whole)
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


class _OriginalState(Mapping[str, torch.Tensor]):
    """The state dict of a module that is to be replaced; delayed weights are initialised when they are read."""

    def __init__(self, root: nn.Module, name: str, module: nn.Module, seed: int) -> None:
        self.device = state.device
        self._root = root
        self._seed = seed
        self._values: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        self._owners: dict[int, tuple[str, nn.Module]] = {}
        for owner_name, owner in module.named_modules(prefix=name):
            for parameter in owner.parameters(recurse=False):
                self._owners.setdefault(id(parameter), (owner_name, owner))
        self._last: dict[int, torch.Tensor] = {}

    @property
    def is_delayed(self) -> bool:
        """Whether a weight has no memory yet."""
        return any(is_delayed(each) for each in self._values.values())

    def __getitem__(self, key: str) -> torch.Tensor:
        value = self._values[key]
        if is_delayed(value):
            return self._initialized(value)
        return value.detach()

    def _initialized(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a parameter is initialised with.

        The parameters of one module are initialised together, and kept until one of another module is read: the
        translations read weight by weight, and no more than one module is ever held whole.
        """
        name, owner = self._owners[id(parameter)]
        if id(parameter) not in self._last:
            values = initial_values(self._root, name, owner, self.device, self._seed)
            own = dict(owner.named_parameters(recurse=False))
            self._last = {id(own[key]): value for key, value in values.items()}
        return self._last[id(parameter)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


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
    kinds: dict[str, int] = defaultdict(int)
    for target in finder.targets:
        was = type(target.module).__name__
        kinds[was if target.replacement is None else f"{was} -> {type(target.replacement).__name__}"] += 1
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


def _over_ranks() -> str:
    return f"Tensor parallelism over {state.tp_size} rank{'s' if state.tp_size > 1 else ''}"


def _unused_overrides(targets: list[_Target]) -> set[str]:
    """Return the names of the user's arguments that no replaced module took."""
    given = {name for target in targets for name in target.marking.config}
    if any(target.rewrite is not None for target in targets):
        return set()
    rules = [target.rule for target in targets if target.rule is not None]
    return given - {name for rule in rules for name in argument_names(rule.distributed_class)}


register_rewrite(Rewrite(has_tp_plan, apply_tp_plan))
