"""Load a checkpoint into the wrapped model and optimizer: this rank's part, whatever ranks saved it.

For each tensor there is a *source*: mostly the entry of the same name. Two things make it another one.

*Replaced modules*. A module that tensor parallelism has replaced, here or in the job that saved, has other names in the
checkpoint than in the model. Its registration has translations of whole state dicts, both ways (`KeyMapping`). They are
given tensors that are read only when a translation uses them, so there is one whole tensor in memory at a time.
Optimizer states are translated like their parameters.

*Float32 weights*. In half precision a checkpoint has the model's rounded weights, and float32 masters beside the
optimizer's moments. With sharded data parallelism, and without half precision, the model's own weights are float32, and
there are no masters. Float32 weights here are read from the float32 ones there, whichever those are (`_fp32_sources`,
`_Masters`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.reader import PieceReader, Target, read_into, read_whole
from smpkit.torch.checkpoints.state_entries import (
    GROUPS,
    MODEL,
    SCALER,
    STATES,
    TensorFactory,
    TensorsOnAccess,
    chunks_in,
    chunks_of,
    copy_chunks,
    opaque_state_name,
    optimizer_parameters,
    parameter_names,
    shard_positions,
    translated,
)
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.delayed import allocate, defer_load, is_delayed
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.precision.cast import MASTER_KEY, SCALER_KEY
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import Translation
from smpkit.torch.tensor_parallel.replace import replacement_stubs
from smpkit.torch.tensor_parallel.state_dict import replaced_modules

__all__ = [
    "load_loss_scale",
    "load_model",
    "load_optimizer",
]

_Candidate = tuple[str, nn.Module, AbstractSet[str], AbstractSet[str] | None, Translation | None]
"""Prefix, distributed module, names in the model, possible names in the checkpoint (None: any), translation."""
TensorSource: TypeAlias = str | TensorFactory
"""The name in the checkpoint, or a function that makes the whole tensor."""


def load_model(model: DistributedModel, reader: PieceReader, strict: bool, prefix: str = MODEL) -> None:
    """Fill the parameters and buffers that this rank holds, in place.

    Parameters without memory, and those whose files are on other hosts only, are loaded when the model is partitioned:
    then it is known whether this rank holds them.

    Args:
        strict: whether the names must be the same.
        prefix: of the model's names in the checkpoint.

    Raises:
        CheckpointError: the names or shapes are those of another model.
    """
    own = model.module.state_dict(keep_vars=True)
    sources = _sources(model.module, own, reader, prefix, strict)
    if prefix == MODEL:
        sources |= _fp32_sources(model.module, sources, reader)
    _check_shapes(own, sources, reader)
    unpartitioned = awaits_partition(model)
    now, deferred = dict[str, TensorSource](), dict[str, TensorSource]()
    for name, source in sources.items():
        is_missing = isinstance(source, str) and reader.is_missing(source)
        if unpartitioned and (is_delayed(own[name]) or is_missing):
            deferred[name] = source
        else:
            now[name] = source
    _fill(model, reader, now)
    if deferred:
        defer_load(lambda: _fill(model, reader, deferred))
    if state.optimizer is not None:
        state.optimizer.refresh_masters()


def awaits_partition(model: DistributedModel) -> bool:
    """Return whether the model is still to be partitioned."""
    return model.pipeline is not None and not model.partitioned


def _sources(
    root: nn.Module, own: Mapping[str, Any], reader: PieceReader, prefix: str, strict: bool
) -> dict[str, TensorSource]:
    """Return the source of each entry of the model's state, by name."""
    there = {name.removeprefix(prefix) for name in reader.metadata.state_dict_metadata if name.startswith(prefix)}
    # Translations come after equal names and win: a replaced module may keep a name and change its layout.
    found: dict[str, TensorSource] = {name: prefix + name for name in own if name in there}
    for mapping in _key_mappings(root, there):
        there -= {mapping.prefix + name for name in mapping.in_checkpoint}
        factories = mapping.factories(reader, lambda name: prefix + name)
        found |= {name: factory for name, factory in factories.items() if name in own}
    # A tied weight may be in the checkpoint under any of its names; files of Hugging Face have it under one.
    first = {id(own[name]): name for name in reversed(list(found)) if isinstance(own[name], nn.Parameter)}
    for name, value in own.items():
        if name not in found and id(value) in first:
            found[name] = found[first[id(value)]]
    missing, surplus = sorted(own.keys() - found.keys()), sorted(there - own.keys())
    if strict and (missing or surplus):
        raise CheckpointError(
            f"the checkpoint belongs to another model: missing {_some(missing)}, unexpected {_some(surplus)}",
            hint="strict=False loads what fits",
        )
    return found


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"`{name}`" for name in names[:5]) + more


def _check_shapes(own: Mapping[str, Any], sources: Mapping[str, TensorSource], reader: PieceReader) -> None:
    wrong = []
    for name, source in sources.items():
        if not isinstance(source, str):
            continue
        value, there = own[name], reader.metadata.state_dict_metadata[source]
        shape = tuple(global_shape(value)) if isinstance(value, torch.Tensor) else None
        found = tuple(there.size) if isinstance(there, TensorStorageMetadata) else None
        if shape != found:
            wrong.append(f"`{name}` is {_text(shape)} here and {_text(found)} there")
    if wrong:
        raise CheckpointError(f"the checkpoint belongs to another model: {'; '.join(wrong[:5])}")


def _text(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _fill(model: DistributedModel, reader: PieceReader, sources: Mapping[str, TensorSource]) -> None:
    own = model.module.state_dict(keep_vars=True)
    live = {id(each) for each in (*model.module.parameters(), *model.module.buffers())}
    targets, objects, others = {}, {}, {}
    filled: set[int] = set()
    for name, source in sources.items():
        value = own[name]
        if isinstance(value, nn.Parameter) and not model.holds(value):
            continue
        if not isinstance(value, torch.Tensor):
            objects[name] = source
            continue
        if value.device.type == "meta":
            continue
        tensor = value
        if id(value) not in live:  # computed for the state dict: the module takes it back below
            tensor = others[name] = torch.empty_like(value)
        elif id(value) in filled:  # a tied weight, under another name
            continue
        filled.add(id(value))
        if isinstance(source, str):
            if isinstance(tensor, nn.Parameter) and is_delayed(tensor):
                allocate(tensor, state.device)
            targets[source] = Target(local_tensor_of(tensor), chunks_in(value))
        else:
            _fill_from(tensor, name, source())
    found = read_into(reader, targets, [source for source in objects.values() if isinstance(source, str)])
    # Modules take back what they compute for their state dict, and their extra state.
    others |= {name: found[source] for name, source in objects.items() if isinstance(source, str)}
    if others:
        model.module.load_state_dict(others, strict=False)
    if state.optimizer is not None:
        state.optimizer.refresh_masters()  # they are copies of the weights that have been loaded


def _fill_from(tensor: torch.Tensor, name: str, whole: torch.Tensor) -> None:
    if whole.shape != global_shape(tensor):
        raise CheckpointError(
            f"the checkpoint belongs to another model: `{name}` is {list(global_shape(tensor))} here and "
            f"{list(whole.shape)} there"
        )
    if isinstance(tensor, nn.Parameter) and is_delayed(tensor):
        allocate(tensor, state.device)
    copy_chunks(local_tensor_of(tensor), whole, chunks_in(tensor))


def load_optimizer(optimizer: WrappedOptimizer, model: DistributedModel, reader: PieceReader) -> None:
    """Load the groups' settings, and the states of the parameters that this rank holds, which the partition decides.

    Raises:
        CheckpointError: it is the state of another optimizer, or can be loaded only with the degrees of the job that
            saved.
    """
    there = reader.metadata.state_dict_metadata
    if GROUPS not in there:
        _load_opaque(optimizer, reader)
        return
    groups = _groups(optimizer, read_into(reader, {}, [GROUPS])[GROUPS])
    if awaits_partition(model):
        # States wait until it is known what this rank holds; settings such as the learning rate are needed before.
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        defer_load(lambda: _load_states(optimizer, model, reader, groups))
    else:
        _load_states(optimizer, model, reader, groups)


def load_loss_scale(optimizer: WrappedOptimizer, reader: PieceReader) -> None:
    """Load only the loss scale of an optimizer's state, if the checkpoint and the optimizer have one."""
    if SCALER in reader.metadata.state_dict_metadata and optimizer.masters is not None:
        optimizer.masters.loss_scaler.load_state_dict(read_into(reader, {}, [SCALER])[SCALER])


def _groups(optimizer: WrappedOptimizer, saved: Any) -> list[dict[str, Any]]:
    """Return the settings of the saved groups with the parameters of this optimizer's."""
    indices = {id(parameter): index for index, parameter in enumerate(optimizer_parameters(optimizer))}
    own = [
        [indices[id(optimizer.model_parameter(member))] for member in group["params"]]
        for group in optimizer.param_groups
    ]
    if not isinstance(saved, list) or len(saved) != len(own):
        count = len(saved) if isinstance(saved, list) else "no"
        raise CheckpointError(
            f"the checkpoint is of an optimizer with {count} parameter groups, this one has {len(own)}",
            hint="make the same parameter groups, or pass load_optimizer=False",
        )
    return [{**in_checkpoint, "params": ours} for in_checkpoint, ours in zip(saved, own, strict=True)]


def _load_states(
    optimizer: WrappedOptimizer, model: DistributedModel, reader: PieceReader, groups: list[dict[str, Any]]
) -> None:
    by_parameter = _states_by_parameter(reader)
    factories = _state_factories(model.module, reader, by_parameter)
    parameters, names = optimizer_parameters(optimizer), parameter_names(optimizer, model)
    masters = _Masters(optimizer, model, reader)
    states: dict[int, dict[str, Any]] = {}
    targets: dict[str, Target] = {}
    objects: dict[str, list[tuple[int, str]]] = {}
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if not model.owns(parameter):
            continue
        for key, factory in factories.get(name, {}).items():
            if key != MASTER_KEY or masters.has(parameter):
                states.setdefault(index, {})[key] = _local_part(factory(), parameter)
        for key, full in _usable(name, () if name in factories else by_parameter.get(name, ()), parameter):
            if key == MASTER_KEY and not masters.has(parameter):
                continue
            item = reader.metadata.state_dict_metadata[full]
            if isinstance(item, TensorStorageMetadata):
                targets[full] = _target(item, parameter)
                states.setdefault(index, {})[key] = targets[full].tensor
            else:
                objects.setdefault(full, []).append((index, key))
        # A master that the checkpoint does not have is read from the model's own weight, if that is float32 there.
        source = masters.source_of(name, parameter) if MASTER_KEY not in states.get(index, {}) else None
        if isinstance(source, str):
            targets[source] = Target(torch.empty_like(parameter, dtype=torch.float32), chunks_in(parameter))
            states.setdefault(index, {})[MASTER_KEY] = targets[source].tensor
        elif source is not None:
            states.setdefault(index, {})[MASTER_KEY] = _local_part(source(), parameter)
    scalers = [SCALER] if SCALER in reader.metadata.state_dict_metadata else []
    found = read_into(reader, targets, [*objects, *scalers])  # in one call, which opens each file once
    for full, places in objects.items():
        for index, key in places:
            states.setdefault(index, {})[key] = found[full]
    scaler = {} if SCALER not in found else {SCALER_KEY: found[SCALER]}
    optimizer.load_state_dict({"state": states, "param_groups": groups, **scaler})


class _Masters:
    """The parameters of an optimizer that have masters, and their sources in a checkpoint without masters."""

    def __init__(self, optimizer: WrappedOptimizer, model: DistributedModel, reader: PieceReader) -> None:
        self._ids = set() if optimizer.masters is None else set(optimizer.masters.masters())
        self._reader = reader
        own = model.module.state_dict(keep_vars=True)
        # Not strict: whether names may differ was decided when the model was loaded.
        self._sources = _sources(model.module, own, reader, MODEL, strict=False) if self._ids else {}

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def source_of(self, name: str, parameter: torch.Tensor) -> TensorSource | None:
        """Return the model's weight in the checkpoint, unless it is in half precision, too."""
        source = self._sources.get(name) if self.has(parameter) else None
        if isinstance(source, str):
            item = self._reader.metadata.state_dict_metadata[source]
            return source if isinstance(item, TensorStorageMetadata) and not _is_half(item.properties.dtype) else None
        return source


def _state_factories(
    root: nn.Module, reader: PieceReader, by_parameter: Mapping[str, list[str]]
) -> dict[str, dict[str, TensorFactory]]:
    """Return the factories of states of parameters that the checkpoint has under other names: by name and key."""
    result: dict[str, dict[str, TensorFactory]] = {}
    for mapping in _key_mappings(root, by_parameter):
        example_of_key = dict[str, str]()
        for name in mapping.in_checkpoint:
            for full in by_parameter[mapping.prefix + name]:
                example_of_key[full.rpartition(".")[2]] = full
        for key, example in example_of_key.items():
            factories = mapping.factories(reader, lambda name, key=key: f"{STATES}{name}.{key}")  # type: ignore[misc]
            item = reader.metadata.state_dict_metadata[example]
            if isinstance(item, TensorStorageMetadata) and not item.size:
                # A scalar, such as a count of steps: the same for all parameters of the module.
                own_names = [name for name, _ in root.named_parameters() if name.startswith(mapping.prefix)]
                factories = dict.fromkeys(own_names, functools.partial(read_whole, reader, example))
            for name, factory in factories.items():
                result.setdefault(name, {})[key] = factory
    return result


def _local_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the state of a parameter."""
    if whole.dim() == 0 or whole.shape != global_shape(parameter):
        return whole.clone()
    piece = torch.empty(local_tensor_of(parameter).shape, dtype=whole.dtype, device=parameter.device)
    copy_chunks(piece, whole, chunks_in(parameter))
    return piece


def _states_by_parameter(reader: PieceReader) -> dict[str, list[str]]:
    """Return the names of the states in the checkpoint, by parameter; keys have no dots, parameters may have."""
    found: dict[str, list[str]] = {}
    for full in reader.metadata.state_dict_metadata:
        if full.startswith(STATES):
            found.setdefault(full.removeprefix(STATES).rpartition(".")[0], []).append(full)
    return found


def _usable(name: str, states: Iterable[str], parameter: torch.Tensor) -> Iterable[tuple[str, str]]:
    """Return the states of a parameter that this rank can use: keys, and names in the checkpoint.

    Raises:
        CheckpointError: one can be loaded only with other degrees.
    """
    here = "@".join(f"{index}of{size}" for index, size in shard_positions(parameter))
    usable, foreign = {}, set()
    for full in states:
        key, _, position = full.removeprefix(f"{STATES}{name}.").partition("@")
        if position in ("", here):
            usable[key] = full
        else:
            foreign.add(key)
    if lacking := sorted(foreign - usable.keys()):
        raise CheckpointError(
            f"the optimizer's `{lacking[0]}` of `{name}` has not the shape of its parameter, so it is good for the "
            "degrees it was saved with only",
            hint="resume with those, or with load_optimizer=False",
        )
    return usable.items()


def _target(item: TensorStorageMetadata, parameter: torch.Tensor) -> Target:
    """Return memory for a state: divided like the parameter if the whole tensors have the same shape."""
    shape = tuple(item.size)
    if shape and shape == tuple(global_shape(parameter)):
        tensor = torch.empty(local_tensor_of(parameter).shape, dtype=item.properties.dtype, device=parameter.device)
        return Target(tensor, chunks_in(parameter))
    return Target(torch.empty(shape, dtype=item.properties.dtype, device="cpu"), chunks_of(shape))


def _load_opaque(optimizer: WrappedOptimizer, reader: PieceReader) -> None:
    """Load a state that has not torch's layout, as it was saved."""
    name = opaque_state_name()
    if name not in reader.metadata.state_dict_metadata:
        warn_user(f"{reader.folder} holds no optimizer state that this rank can use: the optimizer starts anew")
        return
    optimizer.load_state_dict(read_into(reader, {}, [name])[name])


@dataclass(frozen=True)
class KeyMapping:
    """A replaced module, and the translation of its names in the checkpoint to those in the model.

    Args:
        prefix: of its names, in both.
        in_checkpoint: its names in the checkpoint, without the prefix.
        module: the distributed module, from which the translation takes sizes.
    """

    prefix: str
    in_checkpoint: tuple[str, ...]
    module: nn.Module
    translation: Translation

    def factories(self, reader: PieceReader, full: Callable[[str], str]) -> dict[str, TensorFactory]:
        """Return a factory for each whole tensor of the model's own state, by name.

        Args:
            full: returns the full name of an entry (of the weight, or of one of its states), given the parameter's name
                in the checkpoint. Entries that are not there are left out.
        """
        items = reader.metadata.state_dict_metadata
        names = {name: full(self.prefix + name) for name in self.in_checkpoint}
        there = {name: each for name, each in names.items() if isinstance(items.get(each), TensorStorageMetadata)}
        tensors = TensorsOnAccess(there, lambda name: read_whole(reader, there[name]))
        return dict(translated(self.translation, tensors, self.module, self.prefix))


def _key_mappings(root: nn.Module, names: Collection[str]) -> list[KeyMapping]:
    """Return the modules of a model that have other names in a checkpoint, given the checkpoint's names."""
    found = []
    for prefix, module, ours, in_checkpoint, translation in _candidates(root):
        inside = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        known = in_checkpoint is None or set(inside) <= in_checkpoint
        if translation is not None and inside and known and not set(inside) <= ours:
            found.append(KeyMapping(prefix, inside, module, translation))
    return found


def _candidates(root: nn.Module) -> Iterator[_Candidate]:
    for name, module, entry in replaced_modules(root):
        # Only the translation knows the names of the original module.
        yield _prefix(name), module, set(module.state_dict()), None, entry.to_distributed
    if state.tp_size == 1:
        # Saved with tensor parallelism, loaded without: stubs of the replacements that would be made know the names.
        for name, module, stub, entry in replacement_stubs(root):
            yield _prefix(name), stub, set(module.state_dict()), set(stub.state_dict()), entry.from_distributed


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _is_half(dtype: torch.dtype) -> bool:
    """Return whether weights of this dtype have float32 masters."""
    return dtype in (torch.float16, torch.bfloat16)


def _fp32_sources(root: nn.Module, sources: Mapping[str, TensorSource], reader: PieceReader) -> dict[str, TensorSource]:
    """Return sources among the checkpoint's masters for the parameters that are not in half precision here, by name.

    Masters that only another host has are left out; then the rounded weights are loaded.
    """
    masters = _masters_in(reader)
    wanted = dict[str, nn.Parameter]()
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if name in sources and not _is_half(parameter.dtype):
            wanted[name] = parameter
    if not masters or not wanted:
        return {}
    found: dict[int, TensorSource] = {}
    for name, parameter in wanted.items():
        source = sources[name]
        if isinstance(source, str) and source.removeprefix(MODEL) in masters:
            found[id(parameter)] = masters[source.removeprefix(MODEL)]
    there = {name.removeprefix(MODEL) for name in reader.metadata.state_dict_metadata if name.startswith(MODEL)}
    for mapping in _key_mappings(root, there):
        factories = mapping.factories(reader, lambda name: masters.get(name, ""))
        found |= {id(wanted[name]): factory for name, factory in factories.items() if name in wanted}
    return {name: found[id(parameter)] for name, parameter in wanted.items() if id(parameter) in found}


def _masters_in(reader: PieceReader) -> dict[str, str]:
    """Return the names of the masters in a checkpoint, by the name of their parameter."""
    end = f".{MASTER_KEY}"
    items = reader.metadata.state_dict_metadata
    names = [name for name, item in items.items() if isinstance(item, TensorStorageMetadata)]
    names = [name for name in names if name.startswith(STATES) and name.endswith(end) and not reader.is_missing(name)]
    return {name.removeprefix(STATES).removesuffix(end): name for name in names}
