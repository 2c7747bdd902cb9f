"""Put distributed modules in the place of marked ones: what `smp.DistributedModel` does first under tensor parallelism.

::

    search    the outermost marked modules that are supported; the distributed ones are constructed, without memory
    compare   the tensor-parallel ranks: they must do the same next, to models of the same shapes
    replace   parameter by parameter, each becomes this rank's piece, so no rank ever holds two whole models
    install   where a parent has the old module as a child, it gets the new one

A distributed module is called as the one that it replaced, and keeps its weights, its partition and what was frozen.
Hugging Face models with a plan of their own (`_tp_plan`) are divided in place instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import ConfigError, UnsupportedError, UsageError
from smpkit.torch.core.announce import announce
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import delay_param_initialization, initialize, is_delayed
from smpkit.torch.placement.manual import inherit_partition
from smpkit.torch.placement.shards import hook_on_weight, shard_of
from smpkit.torch.tensor_parallel.agreement import compare_models, weights_of_first_rank
from smpkit.torch.tensor_parallel.marking import Marking, default_dtype, loaded_modules, marking_of
from smpkit.torch.tensor_parallel.module import DistributedModule, global_shape, load_shard, named_tensors
from smpkit.torch.tensor_parallel.plan import apply_tp_plan, has_tp_plan
from smpkit.torch.tensor_parallel.registry import (
    ReplacementRule,
    argument_names,
    arguments_of,
    rule_for,
    tensor_of,
    with_overrides,
)


def distribute(root: nn.Module, *, at_degree_1: bool = False, fresh_weights: bool | None = None) -> nn.Module:
    """Replace what is marked in a model and return the model: another object only if it was replaced as a whole.

    Modules keep their weights where a translation is known, and else draw new ones that depend on the seed and their
    names only: one seed gives one model at every degree. All ranks of a tensor-parallel group call this together.

    Args:
        at_degree_1: whether one rank has distributed modules, too, so that a model has the same modules and names at
            every degree.
        fresh_weights: whether modules that are replaced draw new weights though a translation is known; None: in
            scripts of SMP v1 without `_match_weights`, where no weights were loaded into them.
    """
    if state.tp_size == 1 and not at_degree_1:
        return root
    search = _Search(root)
    if state.tp_size == 1:
        search.planned.clear()  # what is divided in place has its own modules and names at every degree
        if not search.replaced:
            return root
    for name in search.checkpointed():
        raise UsageError(
            f"`{name or 'the model'}` is checkpointed, and tensor parallelism replaces it",
            hint="call smp.set_activation_checkpointing after smp.DistributedModel",
        )
    # Before anything is sent for a single module: ranks that have others to treat would wait for each other.
    fresh = search.fresh_ones(root, fresh_weights)
    seed, fresh = compare_models(root, [*search.skipped, *fresh, *search.planned], fresh)
    for replaced in search.replaced:
        _fill(root, replaced, seed, is_fresh=fresh[replaced.name])
        _hand_over(replaced)
    for name, module in search.planned.items():
        weight = hook_on_weight(module)
        if weight is not None:
            raise UsageError(
                f"a hook was registered on `{name}{'.' if name else ''}{weight}`, which tensor parallelism divides",
                hint="register it after smp.DistributedModel: it gets the gradient of this rank's piece",
            )
        for parameter in module.parameters():
            if not is_delayed(parameter):
                parameter.data = weights_of_first_rank(parameter.data)
        apply_tp_plan(module, search.readers)
    if state.rank == 0:
        announce(search.report(fresh))
    # Last: until here the old modules are in the model, and translations and the report read them there.
    return _install(root, search.replaced)


def distribute_without_weights(root: nn.Module) -> tuple[nn.Module, list[str]]:
    """Do what `distribute` does, without weights and other ranks, for `smpkit plan`; return model and report."""
    search = _Search(root)
    report = list(search.report({}))
    report += [f"  not checkpointed in this plan: `{name}`, which is replaced" for name in search.checkpointed()]
    for replaced in search.replaced:
        _hand_over(replaced)
    for module in search.planned.values():
        apply_tp_plan(module, search.readers)
    return _install(root, search.replaced), report


def replacement_stubs(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, ReplacementRule]]:
    """Yield the modules that tensor parallelism would replace: name, module, replacement and rule.

    Replacements have no memory. They give names and sizes, with which checkpoints of other degrees are translated.
    """
    for replaced in _Search(root, minds_hooks=False).replaced:  # a model that trains has hooks of smpkit's own
        yield replaced.name, replaced.module, replaced.replacement, replaced.rule


_RULE: Final = "_smp_replacement_rule"


def applied_rule_of(module: nn.Module) -> ReplacementRule | None:
    """Return the rule by which a distributed module replaced another; None if it replaced none."""
    rule: ReplacementRule | None = vars(module).get(_RULE)
    return rule


# --- what was set before wrapping -------------------------------------------------------------------------------------

_REPLACED: Final = "_smp_replaced"
"""On a parameter of a module that was replaced: its name in the model."""


def refuse_replaced_parameters(optimizer: Any) -> None:
    """Refuse an optimizer of parameters that tensor parallelism has replaced, or with states of whole ones."""
    hint = "make the optimizer of `model.parameters()` after smp.DistributedModel"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [getattr(parameter, _REPLACED) for parameter in parameters if hasattr(parameter, _REPLACED)]
    kind = type(optimizer).__name__
    if names:
        others = f" and {len(names) - 1} other parameters of its" if names[1:] else ""
        raise UsageError(
            f"{kind} was made before smp.DistributedModel, which has replaced `{names[0]}`{others}", hint=hint
        )
    for parameter in parameters:  # those that are divided in place
        shard, values = shard_of(parameter), (optimizer.state.get(parameter) or {}).values()
        shapes = {tuple(value.shape) for value in values if isinstance(value, torch.Tensor)}
        if shard is not None and shard.shape != shard.local_shape and shard.shape in shapes:
            raise UsageError(f"{kind} has states of parameters that smp.DistributedModel has divided", hint=hint)


# --- search -----------------------------------------------------------------------------------------------------------


@dataclass
class _Replaced:
    """A module that will be replaced; `name` is where it is first."""

    name: str
    module: nn.Module
    marking: Marking
    rule: ReplacementRule
    replacement: nn.Module


class _Search:
    """Walks down a model and stops at what can be distributed.

    Attributes:
        replaced: what becomes another module.
        planned: what is divided in place, by name.
        skipped: why a marked module stays as it is, by name.
        readers: of the weights of modules.
    """

    def __init__(self, root: nn.Module, *, minds_hooks: bool = True) -> None:
        self._minds_hooks = minds_hooks
        self.replaced: list[_Replaced] = []
        self.planned: dict[str, nn.Module] = {}
        self.skipped: dict[str, str] = {}
        self._num_custom = sum(isinstance(module, DistributedModule) for module in root.modules())
        self._seen: set[nn.Module] = set()
        self._holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
        self._names = {parameter: name for name, parameter in root.named_parameters()}
        self.readers = _weight_readers(root)
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                self._holders[parameter].add(module)
        self._visit(root, "")

    def _visit(self, module: nn.Module, name: str) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        marking = marking_of(module)
        if marking is not None and marking.enabled and self._distributes(module, name, marking):
            self._seen.update(module.modules())
            return
        for child_name, child in module.named_children():
            self._visit(child, f"{name}.{child_name}" if name else child_name)

    def _distributes(self, module: nn.Module, name: str, marking: Marking) -> bool:
        """Note how a module is distributed, or in `skipped` why not; unsupported classes are skipped silently."""
        rule, has_plan = rule_for(module), has_tp_plan(module)
        if rule is None and not has_plan:
            return False
        tied = self._why_tied(module)
        reason = _why_excepted(module) or tied or self._why_read(module)
        reason = reason or (_why_hooked(module) if self._minds_hooks else None)
        if reason is None and rule is not None:
            try:
                reason = rule.refusal(module) if rule.refusal is not None else None
                if reason is None:
                    self.replaced.append(_Replaced(name, module, marking, rule, _construct(module, rule, marking)))
                    return True
            except ConfigError as error:
                reason = "; ".join(map(str, error.problems))
            except UnsupportedError as error:
                reason = error.message
        # A plan leaves out the parts that the user excepted, so only ties to other modules rule it out.
        if has_plan and tied is None:
            self.planned[name] = module
            return True
        self.skipped[name] = f"{type(module).__name__} `{name or 'model'}`: {reason}"
        return False

    def _why_tied(self, module: nn.Module) -> str | None:
        """Return what ties a module to the rest of the model, so that it cannot be distributed by itself."""
        inside = set(module.modules())
        tied = (weight for weight in module.parameters() if self._holders[weight] - inside)
        return next((f"it shares the weight `{self._names[weight]}` with another module" for weight in tied), None)

    def _why_read(self, module: nn.Module) -> str | None:
        """Return what reads a weight in a module past it."""
        inside = set(module.modules())
        readers = (reader for part in inside for reader in self.readers.get(part, ()) if reader not in inside)
        return next((f"{type(reader).__name__} reads its weight by itself" for reader in readers), None)

    def checkpointed(self) -> Iterator[str]:
        """Yield the names of checkpointed modules that are replaced: the setting would go with them."""
        for replaced in self.replaced:
            for name, module in replaced.module.named_modules(prefix=replaced.name):
                is_flagged = replaced.rule.finish is None and getattr(module, "gradient_checkpointing", False)
                if is_flagged or ModuleCall.of(module).checkpointing is not None:
                    yield name

    def fresh_ones(self, root: nn.Module, asked: bool | None) -> dict[str, bool]:
        """Return whether each module that is replaced draws fresh weights, by name, as this rank sees it."""
        as_v1 = state.is_v1_script and not state.cfg.match_weights
        loaded = loaded_modules(root) if asked is None and as_v1 else set()
        fresh = {}
        for replaced in self.replaced:
            was_not_loaded = loaded.isdisjoint(map(id, replaced.module.modules()))
            is_fresh = as_v1 and was_not_loaded if asked is None else asked
            fresh[replaced.name] = is_fresh and not replaced.rule.keeps_weights
        return fresh

    def report(self, fresh: Mapping[str, bool]) -> Iterator[str]:
        """Say what is distributed, what is not and why, and how many modules draw the `fresh` weights of SMP v1."""
        over_ranks = f"Tensor parallelism over {state.tp_size} rank{'s' if state.tp_size > 1 else ''}"
        kinds = Counter(f"{type(swap.module).__name__} -> {type(swap.replacement).__name__}" for swap in self.replaced)
        kinds.update(type(module).__name__ for module in self.planned.values())
        if self._num_custom:
            yield f"{over_ranks}: {self._num_custom} distributed modules of the script."
        elif not kinds and not self.skipped:
            yield (
                "Tensor parallelism: nothing is distributed: create the model under smp.tensor_parallelism(), or call"
                " smp.set_tensor_parallelism(model) before smp.DistributedModel."
            )
        if not kinds and not self.skipped:
            return
        yield f"{over_ranks}: {', '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'nothing'}."
        untranslated = Counter(type(swap.module).__name__ for swap in self.replaced if swap.rule.to_distributed is None)
        if untranslated:
            yield (
                f"  fresh weights for {', '.join(f'{count} {kind}' for kind, count in untranslated.items())}: weights"
                " that they have, loaded ones too, are dropped; `to_distributed` of smp.tp_register keeps them"
            )
        num_fresh = sum(fresh.get(swap.name, False) for swap in self.replaced if swap.rule.to_distributed is not None)
        if num_fresh:
            yield (
                f"  fresh weights, as in SMP v1, for {num_fresh} of {kinds.total()}: nothing was loaded into what they"
                " replace; `_match_weights: true` keeps the weights of the script"
            )
        for sentence in self.skipped.values():
            yield f"  not distributed: {sentence}"
        if not self.planned:  # a plan takes no arguments, and may be marked with those of other modules
            unused = {name for replaced in self.replaced for name in replaced.marking.config}
            unused -= {name for replaced in self.replaced for name in argument_names(replaced.rule.distributed)}
            for name in sorted(unused):
                yield f"  no distributed module has an argument `{name}`: it has no effect"


def _why_excepted(module: nn.Module) -> str | None:
    markings = filter(None, map(marking_of, module.modules()))
    return None if all(marking.enabled for marking in markings) else "a part of it is excepted from tensor parallelism"


def _why_hooked(module: nn.Module) -> str | None:
    """Return which hook would be lost with a module: the user's own, or one of torch's (`weight_norm`)."""
    for name, part in module.named_modules():
        kinds = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
        # `gradient_checkpointing_enable` registers one for reentrant checkpoints, which need it; ours do not.
        if any(
            getattr(hook, "__name__", "") != "make_inputs_require_grads" for hooks in kinds for hook in hooks.values()
        ):
            return f"a hook was registered on {f'its `{name}`' if name else 'it'}"
    weight = hook_on_weight(module)
    return None if weight is None else f"a hook was registered on its `{weight}`"


def _construct(module: nn.Module, rule: ReplacementRule, marking: Marking) -> nn.Module:
    """Construct the distributed module, without memory for its weights and without drawing random numbers."""
    args, kwargs = with_overrides(rule.distributed, arguments_of(module, rule), marking.config)
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)
    # On the host, whatever the user's default device is: weights get memory in `_fill`, not before. The fork
    # leaves the script's random numbers as they were.
    with torch.device("cpu"), torch.random.fork_rng([]), delay_param_initialization(), default_dtype(dtype):
        return rule.distributed(*args, **kwargs)


# --- replace ----------------------------------------------------------------------------------------------------------


def _fill(root: nn.Module, replaced: _Replaced, seed: int, *, is_fresh: bool) -> None:
    """Give a distributed module this rank's pieces of the weights of the one that it replaces, or weights of its own.

    Weights of its own depend on the seed and its name, and on nothing else. A module without memory yet
    (`smp.delay_param_initialization`) gets these when the model is placed.
    """
    module, replacement = replaced.module, replaced.replacement
    parameters = [*module.parameters()]
    if parameters and all(map(is_delayed, parameters)):
        return
    device = next((parameter.device for parameter in parameters), state.device)
    if any(map(is_delayed, parameters)):  # the others were loaded
        initialize(root, parameters, device, seed)
    if not is_fresh:
        _translate_weights(replaced, device)
    initialize(replacement, list(replacement.parameters()), device, seed, replaced.name)


def _translate_weights(replaced: _Replaced, device: torch.device) -> None:
    """Fill the parameters and buffers of a distributed module that a translation yields, one by one."""
    replacement, translation = replaced.replacement, replaced.rule.to_distributed
    whole = {key: value.detach() for key, value in replaced.module.state_dict(keep_vars=True).items()}
    own, done = named_tensors(replacement), set[int]()
    for name, tensor_or_factory in () if translation is None else translation(whole, replacement):
        tensor = own.get(name)
        if tensor is None:
            raise UsageError(f"a translation made `{name}`, which {type(replacement).__name__} does not have")
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        value = tensor_of(tensor_or_factory)
        if value.shape != global_shape(tensor):
            raise UsageError(
                f"a translation made `{name}` of {type(replacement).__name__} {list(value.shape)},"
                f" not {list(global_shape(tensor))}"
            )
        load_shard(tensor, weights_of_first_rank(value))
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _hand_over(replaced: _Replaced) -> None:
    """Give a distributed module all but the weights of the one that it replaces."""
    module, replacement, rule = replaced.module, replaced.replacement, replaced.rule
    _keep_frozen(module, replacement)
    inherit_partition(replaced.name, module, replacement)
    replacement.train(module.training)
    if rule.forward_hook is not None or rule.return_hook is not None:
        # On the instance, where nn.Module looks first: hooks that users register see the values they know.
        forward = functools.partial(_call_as_original, replacement, rule.forward_hook, rule.return_hook)
        if rule.forward_hook is not None:
            # Hugging Face's Trainer, for one, reads from the signature which columns of the data a model takes.
            vars(forward)["__signature__"] = inspect.signature(rule.forward_hook)
        vars(replacement)["forward"] = forward
    vars(replacement)[_RULE] = rule
    if rule.finish is not None:
        rule.finish(module, replacement)
    for name, parameter in module.named_parameters(prefix=replaced.name):
        setattr(parameter, _REPLACED, name)


def _call_as_original(
    module: nn.Module,
    forward_hook: Callable[..., Any] | None,
    return_hook: Callable[[Any], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a distributed module with the arguments of the one that it replaced, and return what that would."""
    if forward_hook is not None:
        args, kwargs = forward_hook(*args, **kwargs)
    # Of the class: the instance's attribute `forward` is this function.
    result = type(module).forward(module, *args, **kwargs)
    return result if return_hook is None else return_hook(result)


def _keep_frozen(module: nn.Module, replacement: nn.Module) -> None:
    """Freeze the parameters that were frozen; refuse it where a part is, and other names do not tell which."""
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


def _install(root: nn.Module, replaced: list[_Replaced]) -> nn.Module:
    """Make the distributed modules children of all parents of the modules that they replace; return the model."""
    # A shared module has several parents, or several names in one: it is looked up under all of them.
    new: dict[nn.Module | None, nn.Module] = {item.module: item.replacement for item in replaced}
    for parent in list(root.modules()):
        is_fused = isinstance(parent, (nn.TransformerEncoder, nn.TransformerEncoderLayer))
        if is_fused and not new.keys().isdisjoint(parent.modules()):
            # In evaluation torch's fused kernel would read the weights of the modules inside, now pieces.
            vars(parent).update(activation_relu_or_gelu=0, use_nested_tensor=False)
        for name, child in list(parent._modules.items()):
            if child in new:
                parent.add_module(name, new[child])
        for held in vars(parent).values():
            if isinstance(held, list):  # beside its children: Mask2Former's forward goes through one
                held[:] = [new.get(part, part) if isinstance(part, nn.Module) else part for part in held]
    return new.get(root, root)


# --- weights that other modules read ----------------------------------------------------------------------------------


def _weight_readers(root: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules in a model whose weight the forwards of others read, each with those others: they stay whole.

    A divided module returns what the whole one would, but its weight is a piece: `self.rel_embeddings.weight`, which
    the encoder of a DeBERTa hands to its layers, would have some of the columns. A wrong number comes of
    `self.lm_head.weight` in a forward that computes its loss from it.
    """
    readers: dict[nn.Module, list[nn.Module]] = {}
    for reader in root.modules():
        kind: Any = type(reader)
        forward = getattr(reader.forward, "__func__", reader.forward)
        # torch's own forwards do it in evaluation, for a kernel that divided modules rule out.
        if getattr(forward, "__module__", "").startswith("torch."):
            continue
        for path in _paths_read(kind, forward):
            try:
                readers.setdefault(reader.get_submodule(path), []).append(reader)
            except AttributeError:  # the option that makes it is off
                continue
    return readers


@functools.lru_cache(maxsize=1024)
def _paths_read(kind: Any, forward: Callable[..., Any]) -> list[str]:
    """Return `a.b` for each `self.a.b.weight` in a forward, or in methods that are called from there."""
    paths, seen, functions = dict[str, None](), set[Any](), [forward]
    while functions:
        function = inspect.unwrap(functions.pop())
        if function in seen:
            continue
        seen.add(function)
        for name in _names_read(function):
            path, _, last = name.rpartition(".")
            if path and last == "weight":
                paths[path] = None
            elif not path and inspect.isfunction(method := getattr(kind, last, None)):
                functions.append(method)
    return list(paths)


def _names_read(function: Callable[..., Any]) -> Iterator[str]:
    """Yield `a.b` for each `self.a.b` that a method reads: not to look at its dtype or device, as T5 does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # written in C, or at a prompt
        return
    looked_at: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device"):
            looked_at.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            looked_at.add(node.args[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in looked_at:
            owner, _, name = ast.unparse(node).partition(".")
            if owner == "self":
                yield name
