"""Put distributed modules in the place of marked ones: what `smp.DistributedModel` does first under tensor parallelism.

find        the outermost supported marked modules; the distributed ones are made without memory
agree       all tensor-parallel ranks are about to do the same, to the same weights
replace     each parameter becomes this rank's piece of it, one at a time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from smpkit.errors import ConfigError, UnsupportedError, UsageError
from smpkit.torch.announce import announce
from smpkit.torch.partitioning.delayed import delay_param_initialization, is_delayed
from smpkit.torch.partitioning.manual import inherit_partition
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.agreement import ModelComparison, compare_models
from smpkit.torch.tensor_parallel.calls import wrap_forward
from smpkit.torch.tensor_parallel.marking import Marking, default_dtype, marking_of
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.plan_styles import apply_tp_plan, has_tp_plan
from smpkit.torch.tensor_parallel.registry import (
    ReplacementRule,
    Rewrite,
    argument_names,
    arguments_of,
    register_rewrite,
    rewrite_for,
    rule_for,
    with_overrides,
)
from smpkit.torch.tensor_parallel.successors import record_replacement
from smpkit.torch.tensor_parallel.weights import load_replacement_weights

__all__ = ["applied_rule_of", "distribute", "distribute_without_weights", "replacement_stubs"]

_ENTRY: Final = "_smp_entry"


def distribute(root: nn.Module) -> nn.Module:
    """Replace what is marked in a model and return the model: another object only if it was replaced as a whole.

    Modules keep their weights where a translation is known, so one seed gives one model at every degree. All ranks of a
    tensor-parallel group call this together.

    Raises:
        UsageError: the model differs between tensor-parallel ranks, or a marked module cannot be made as registered.
    """
    if state.tp_size == 1:
        return root
    finder = _Finder(root)
    finder.visit(root, "")
    comparison = compare_models(root, [*finder.skipped, *(target.name for target in finder.targets)])
    for target in finder.targets:
        if target.rewrite is not None:
            for parameter in target.module.parameters():
                if not is_delayed(parameter):
                    parameter.data = comparison.first(parameter.data)
            target.rewrite.distribute(target.module, target.marking.config)
        else:
            _replace(root, target, comparison)
    if state.rank == 0:
        announce(_report(finder))
    return _install_replacements(root, finder.targets)


def distribute_without_weights(root: nn.Module) -> tuple[nn.Module, list[str]]:
    """Do what `distribute` does on this rank, without weights and without the others, and say what: for a plan.

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


def applied_rule_of(module: nn.Module) -> ReplacementRule | None:
    """Return by which rule a distributed module took the place of another; None if it did not."""
    rule: ReplacementRule | None = vars(module).get(_ENTRY)
    return rule


def replacement_stubs(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, ReplacementRule]]:
    """Yield the modules of a model that other degrees would replace, each with its name and what would take its place.

    The latter have no memory: they say names and sizes, so that states of theirs can be translated.
    """
    finder = _Finder(root)
    finder.visit(root, "")
    for target in finder.targets:
        if target.rule is not None and target.replacement is not None:
            yield target.name, target.module, target.replacement, target.rule


@dataclass
class _Target:
    """A module that will be replaced or rewritten; `name` is where it is first."""

    name: str
    module: nn.Module
    marking: Marking
    rule: ReplacementRule | None = None
    replacement: nn.Module | None = None
    rewrite: Rewrite | None = None


# --- find -------------------------------------------------------------------------------------------------------------


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
        """Note the module as a target, or why it is none; unsupported ones are none without a word."""
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
        if rewrite is not None and self._why_tied(module) is None:  # which leaves out the parts that are excepted
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
    # On the host, whatever the user's default device is: weights come when they are taken over.
    with torch.device("cpu"), torch.random.fork_rng([]), delay_param_initialization(), default_dtype(dtype):
        return kind(*args, **kwargs)


# --- replace ----------------------------------------------------------------------------------------------------------


def _replace(root: nn.Module, target: _Target, comparison: ModelComparison | None) -> None:
    """Give a distributed module the weights and the ways of the one whose place it takes; None: no weights."""
    module, rule, replacement = target.module, target.rule, target.replacement
    assert rule is not None
    assert replacement is not None
    if comparison is not None:
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
    """Let parameters that were not trained not be trained, as far as names tell which those are now.

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
    """Let the parents of what is replaced have the distributed modules for children, wherever it appears."""
    new = {id(target.module): target.replacement for target in targets if target.replacement is not None}
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            replacement = new.get(id(child)) if child is not None else None
            if replacement is not None:
                parent.add_module(name, replacement)
                _disable_fast_path(parent)
    return new.get(id(root)) or root


def _disable_fast_path(parent: nn.Module) -> None:
    """Make torch's transformer layers call their children in evaluation too, where they would read their weights."""
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0


# --- report -----------------------------------------------------------------------------------------------------------


def _report(finder: _Finder) -> Iterator[str]:
    """Say what is distributed, what is not and why."""
    if finder.num_custom:
        yield f"Tensor parallelism over {state.tp_size} ranks: {finder.num_custom} distributed modules of the script."
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
    yield f"Tensor parallelism over {state.tp_size} ranks: {distributed}."
    for sentence in finder.skipped.values():
        yield f"  not distributed: {sentence}"
    for name in sorted(_unused_overrides(finder.targets)):
        yield f"  no distributed module has an argument `{name}`: it has no effect"


def _unused_overrides(targets: list[_Target]) -> set[str]:
    """Return the names of the user's arguments that no replaced module took."""
    given = {name for target in targets for name in target.marking.config}
    if any(target.rewrite is not None for target in targets):
        return set()
    rules = [target.rule for target in targets if target.rule is not None]
    return given - {name for rule in rules for name in argument_names(rule.distributed_class)}


register_rewrite(Rewrite(has_tp_plan, apply_tp_plan))
