"""Give what was set before tensor parallelism replaced modules to what took their place.

Optimizers that were made before the model was wrapped get the parameters that replaced theirs; a module is checkpointed
where the one whose weights it has was.

Which parameter replaced which is found by running the translation of weights on tensors without data: a weight replaces
the weights that the translation reads to make it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall, ModuleSetting
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.registry import Translation

__all__ = ["record_replacement", "replace_optimizer_parameters"]

_HINT: Final = "make the optimizer of `model.parameters()` after smp.DistributedModel"


@dataclass(frozen=True)
class _ReplacedModule:
    """One module that was replaced. Weak references: its parameters live only as long as an optimizer holds them."""

    name: str
    originals: Mapping[str, weakref.ref[nn.Parameter]]
    shapes: Mapping[str, torch.Tensor]
    """Its state dict, without data."""
    distributed: nn.Module
    translation: Translation | None

    def full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


_replaced_modules: Final[list[_ReplacedModule]] = []


def record_replacement(name: str, module: nn.Module, replacement: nn.Module, translation: Translation | None) -> None:
    """Record which module replaced another, and the translation that made its weights; carry its checkpointing over."""
    if not _replaced_modules:
        state.reset_hooks.append(_replaced_modules.clear)
    originals = {key: weakref.ref(each) for key, each in module.named_parameters(remove_duplicate=False)}
    values: Mapping[str, torch.Tensor] = module.state_dict(keep_vars=True)
    shapes = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in values.items()}
    found = _ReplacedModule(name, originals, shapes, replacement, translation)
    _replaced_modules.append(found)
    _carry_checkpointing(module, found)


def _carry_checkpointing(module: nn.Module, found: _ReplacedModule) -> None:
    """Checkpoint the parts of a distributed module whose weights were made of those of checkpointed modules."""
    parts = [(name, part) for name, part in module.named_modules() if ModuleCall.of(part).checkpointing is not None]
    if not parts:
        return
    sources: Mapping[int, set[str]] = {}
    with contextlib.suppress(UsageError):  # a translation that needs values: all parts but the whole are warned about
        sources = _sources_by_parameter(found)
    for name, part in parts:
        setting = ModuleCall.of(part).checkpointing
        counterpart = found.distributed if part is module else _made_of(f"{name}.", sources, found.distributed)
        if counterpart is not None and isinstance(setting, ModuleSetting):
            ModuleCall.on(counterpart).checkpointing = setting.for_module(counterpart)
        else:
            warn_user(
                f"`{found.full_name(name)}` is not checkpointed: tensor parallelism replaced it, and no part of the"
                f" {type(found.distributed).__name__} has its weights and no others; call"
                " smp.set_activation_checkpointing after smp.DistributedModel"
            )


def _made_of(prefix: str, sources: Mapping[int, set[str]], distributed: nn.Module) -> nn.Module | None:
    """Return the innermost part of a distributed module whose weights are those made of what is under `prefix`."""
    wanted = {new for new, keys in sources.items() if any(key.startswith(prefix) for key in keys)}
    whole = all(key.startswith(prefix) for new in wanted for key in sources[new])
    if not wanted or not whole:
        return None
    # A distributed module may have weights that were made of none.
    holders = [each for each in distributed.modules() if {*map(id, each.parameters())} & sources.keys() == wanted]
    return holders[-1] if holders else None


def replace_optimizer_parameters(optimizer: Any) -> None:
    """Put the parameters of distributed modules into the groups that held those of the modules they replaced.

    Raises:
        UsageError: the optimizer has states already, is not one of torch's, or it is not clear what belongs where.
    """
    old: dict[int, tuple[_ReplacedModule, str]] = {}
    for found in _replaced_modules:
        for key, ref in found.originals.items():
            original = ref()
            if original is not None:
                old[id(original)] = found, key
    groups: list[dict[str, Any]] = optimizer.param_groups
    replaced = [each for group in groups for each in group["params"] if id(each) in old]
    _check_states(optimizer, replaced)
    if not replaced:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        found, key = old[id(replaced[0])]
        raise UsageError(
            f"{type(optimizer).__name__} was made before smp.DistributedModel, which has replaced"
            f" `{found.full_name(key)}` and {len(replaced) - 1} other parameters of its",
            hint=_HINT,
        )
    group_of = {id(each): index for index, group in enumerate(groups) for each in group["params"]}
    new_parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for found in _unique([old[id(each)][0] for each in replaced]):
        for name, new_parameter, sources in _replacement_parameters(found):
            if any(id(each) in group_of for each in sources):
                _check_group(found.full_name(name), sources, found, group_of)
                for each in sources:
                    new_parameters.setdefault(id(each), []).append((found.full_name(name), new_parameter))
    for group in groups:
        _rebuild_group(group, new_parameters)


def _unique(modules: list[_ReplacedModule]) -> list[_ReplacedModule]:
    return list({id(each): each for each in modules}.values())


def _rebuild_group(group: dict[str, Any], new_parameters: Mapping[int, list[tuple[str, nn.Parameter]]]) -> None:
    """Replace the parameters of a group, in place: some optimizers have a second reference to the list."""
    names = group.get("param_names")
    # By id, in order: several old parameters may become one (query, key and value packed), which is listed once.
    rebuilt: dict[int, tuple[str | None, nn.Parameter]] = {}
    for index, parameter in enumerate(group["params"]):
        kept = [(None if names is None else names[index], parameter)]
        for name, new_parameter in new_parameters.get(id(parameter), kept):
            rebuilt.setdefault(id(new_parameter), (name, new_parameter))
    group["params"][:] = [parameter for _, parameter in rebuilt.values()]
    if names is not None:
        names[:] = [name for name, _ in rebuilt.values()]


def _replacement_parameters(found: _ReplacedModule) -> Iterator[tuple[str, nn.Parameter, list[nn.Parameter]]]:
    """Yield the parameters of a distributed module: name, parameter, and the parameters that it replaced.

    Raises:
        UsageError: it is not known what a trained one replaced.
    """
    names = _sources_by_parameter(found)
    for name, new_parameter in found.distributed.named_parameters():
        originals = {
            key: found.originals[key]() for key in sorted(names.get(id(new_parameter), ())) if key in found.originals
        }
        sources = [each for each in originals.values() if each is not None]
        # Frozen ones need no place in the optimizer; a trained one that is left out would silently never be updated.
        if new_parameter.requires_grad and not sources:
            raise UsageError(
                "the optimizer was made before smp.DistributedModel, and it is not known what"
                f" `{found.full_name(name)}` took the place of",
                hint=_HINT,
            )
        yield name, new_parameter, sources


def _sources_by_parameter(found: _ReplacedModule) -> dict[int, set[str]]:
    """Return the names of the weights that each parameter of a distributed module, by id, was made of."""
    names: dict[int, set[str]] = {}
    ours = dict(found.distributed.named_parameters(remove_duplicate=False))
    for name, keys in _sources_of_weights(found):
        if name in ours:
            names.setdefault(id(ours[name]), set()).update(keys)
    return names


def _sources_of_weights(found: _ReplacedModule) -> Iterator[tuple[str, set[str]]]:
    """Yield the names of distributed weights, each with the names of the weights that its translation reads."""
    if found.translation is None:
        return
    reading = _ReadTracker(found.shapes)
    try:
        for name, made in found.translation(reading, found.distributed):
            if callable(made):
                made()  # a lazy translation reads its sources only now
            yield name, set(reading.read)
            reading.read.clear()
    except Exception as error:  # a translation of the user's may need values
        raise UsageError(
            "the optimizer was made before smp.DistributedModel, and the translation of"
            f" `{found.name or 'the model'}` cannot say what its weights are made of ({type(error).__name__}: {error})",
            hint=_HINT,
        ) from error


class _ReadTracker(Mapping[str, torch.Tensor]):
    """A state dict that records which of its names are read."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> torch.Tensor:
        value = self._values[key]
        self.read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _check_group(name: str, sources: list[nn.Parameter], found: _ReplacedModule, group_of: Mapping[int, int]) -> None:
    if len({group_of.get(id(each)) for each in sources}) > 1:
        keys = [found.full_name(key) for key, ref in found.originals.items() if any(ref() is each for each in sources)]
        raise UsageError(
            f"`{name}` took the place of {', '.join(f'`{key}`' for key in keys)}, which are not all in one parameter"
            " group of the optimizer",
            hint=_HINT,
        )


def _check_states(optimizer: Any, replaced: list[nn.Parameter]) -> None:
    """Refuse optimizer states of whole parameters, of which this rank has pieces now."""
    states: Mapping[Any, Any] = optimizer.state
    for each in replaced:
        if states.get(each):
            raise UsageError(
                f"{type(optimizer).__name__} has states of parameters that smp.DistributedModel has divided", hint=_HINT
            )
    for each in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = shard_of(each)
        if shard is None or not shard.is_distributed or shard.shape == shard.local_shape:
            continue
        values = states.get(each) or {}
        if any(isinstance(value, torch.Tensor) and tuple(value.shape) == shard.shape for value in values.values()):
            raise UsageError(
                f"{type(optimizer).__name__} has states of parameters that smp.DistributedModel has divided", hint=_HINT
            )
