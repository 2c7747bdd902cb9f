"""Load a checkpoint into the wrapped model and optimizer: this rank's part, whatever ranks saved it.

Each tensor has a *source*: mostly the entry of the same name. A module that tensor parallelism has replaced, here or in
the job that saved, has other names in the checkpoint than in the model. Its registration has translations of whole
state dicts, both ways (`Replaced`). They are given tensors that are read only when a translation uses them, so there
is one whole tensor in memory at a time. Optimizer states are translated like their parameters.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.entries import (
    GROUPS,
    MODEL,
    SCALER,
    STATES,
    Division,
    TensorFactory,
    TensorsOnAccess,
    chunks_of,
    copy_chunks,
    division_of,
    members_of,
    translated,
)
from smpkit.torch.checkpoints.reader import Reader, Target, read_into, read_whole
from smpkit.torch.core.announce import announce
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.delayed import allocate, defer_load, is_delayed
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.precision.cast import SCALER_KEY
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import Translation
from smpkit.torch.tensor_parallel.replace import replacement_stubs
from smpkit.torch.tensor_parallel.state_dict import replaced_modules

TensorSource: TypeAlias = str | TensorFactory
"""The name in the checkpoint, or a function that makes the whole tensor."""


def load_model(model: DistributedModel, reader: Reader, strict: bool, prefix: str = MODEL) -> None:
    """Fill the parameters and buffers that this rank holds, in place.

    Parameters without memory, and those whose files are on other hosts only, are loaded when the model is partitioned:
    then it is known whether this rank holds them. `prefix` is that of the model's names in the checkpoint.
    """
    state_dict = model.module.state_dict(keep_vars=True)
    sources = _sources(model.module, state_dict, reader, prefix, strict)
    _check_shapes(state_dict, sources, reader)
    if strict:
        _check_ties(state_dict, sources, reader)
    now, deferred = dict[str, TensorSource](), dict[str, TensorSource]()
    for name, source in sources.items():
        must_wait = is_delayed(state_dict[name]) or (isinstance(source, str) and reader.is_missing(source))
        (deferred if must_wait and _awaits_partition(model) else now)[name] = source
    _fill(model, reader, now, strict)
    if deferred:
        defer_load(lambda: _fill(model, reader, deferred, strict))


def _awaits_partition(model: DistributedModel) -> bool:
    return model.pipeline is not None and not model.partitioned


def _sources(
    root: nn.Module, state_dict: Mapping[str, Any], reader: Reader, prefix: str, strict: bool
) -> dict[str, TensorSource]:
    """Return the source of each entry of the model's state, by name."""
    saved = {name.removeprefix(prefix) for name in (*reader.tensors, *reader.objects) if name.startswith(prefix)}
    sources: dict[str, TensorSource] = {name: prefix + name for name in state_dict if name in saved}
    # Translations come after equal names and win: a replaced module may keep a name and change its layout.
    for replaced in [*_replaced(root, saved)]:
        saved -= {replaced[0] + name for name in replaced[1]}
        factories = _factories(replaced, reader, lambda name: prefix + name)
        sources |= {name: factory for name, factory in factories.items() if name in state_dict}
    # A tied weight may be in the checkpoint under any of its names; files of Hugging Face have it under one.
    names_by_id = {
        id(state_dict[name]): name for name in reversed(list(sources)) if isinstance(state_dict[name], nn.Parameter)
    }
    for name, value in state_dict.items():
        if name not in sources and id(value) in names_by_id:
            sources[name] = sources[names_by_id[id(value)]]
    missing, surplus = sorted(state_dict.keys() - sources.keys()), sorted(saved - state_dict.keys())
    if strict and (missing or surplus):
        raise CheckpointError(
            f"the checkpoint belongs to another model: missing {_some(missing)}, unexpected {_some(surplus)}",
            hint="strict=False loads what fits",
        )
    if (missing or surplus) and state.rank == 0:
        announce([f"Not all was loaded (strict=False): missing {_some(missing)}, unexpected {_some(surplus)}."])
    return sources


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"`{name}`" for name in names[:5]) + more


def _check_shapes(state_dict: Mapping[str, Any], sources: Mapping[str, TensorSource], reader: Reader) -> None:
    wrong = []
    for name, source in sources.items():
        # A tensor of a kind that no safetensors file holds was saved as an object.
        if not isinstance(source, str) or (isinstance(state_dict[name], torch.Tensor) and source in reader.objects):
            continue
        value, saved = state_dict[name], reader.tensors.get(source)
        here = list(global_shape(value)) if isinstance(value, torch.Tensor) else "no tensor"
        there = "no tensor" if saved is None else list(saved.size)
        if here != there:
            wrong.append(f"`{name}` is {here} here and {there} there")
    if wrong:
        raise CheckpointError(f"the checkpoint belongs to another model: {'; '.join(wrong[:5])}")


def _check_ties(state_dict: Mapping[str, Any], sources: Mapping[str, TensorSource], reader: Reader) -> None:
    """Raise CheckpointError where a tied weight has become two: its optimizer states are those of one."""
    places, names = reader.places(), dict[object, str]()
    for name, source in sources.items():
        if isinstance(state_dict[name], nn.Parameter) and (place := places.get(str(source))):
            first = names.setdefault(place, name)
            if state_dict[first] is not state_dict[name]:
                raise CheckpointError(
                    f"the checkpoint belongs to another model: `{first}` and `{name}` are one weight there, two here",
                    hint="tie the same weights, or load what fits with strict=False",
                )


def _check_doubles(
    state_dict: Mapping[str, Any], sources: Mapping[str, TensorSource], reader: Reader, doubles: Mapping[str, str]
) -> None:
    """Raise CheckpointError where two weights have become one, unless their values are the same.

    Args:
        doubles: further names of tied weights that have been loaded, each with the first one.
    """
    places = reader.places() if doubles else {}
    for name, first in doubles.items():
        source, first_source = sources[name], sources[first]
        if not isinstance(source, str) or source == first_source:
            continue
        if source in places and places[source] == places.get(str(first_source)):
            continue
        loaded = local_tensor_of(state_dict[name])
        other = torch.empty_like(loaded)
        read_into(reader, {source: Target(other, division_of(state_dict[name]).chunks)})
        if not torch.allclose(other, loaded, rtol=0, atol=0, equal_nan=True):
            raise CheckpointError(
                f"the checkpoint belongs to another model: `{first}` and `{name}` are one weight here, two there",
                hint="untie them (`tie_word_embeddings`), or load the first with strict=False",
            )


def _fill(model: DistributedModel, reader: Reader, sources: Mapping[str, TensorSource], strict: bool) -> None:
    state_dict = model.module.state_dict(keep_vars=True)
    live = {id(tensor) for tensor in (*model.module.parameters(), *model.module.buffers())}
    targets = dict[str, Target]()
    objects = dict[str, str]()
    computed = dict[str, Any]()  # for the state dict: modules take it back
    filled, doubles = dict[int, str](), dict[str, str]()
    for name, source in sources.items():
        value = state_dict[name]
        if isinstance(value, nn.Parameter) and not model.holds(value):
            continue
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            continue
        if isinstance(source, str) and source in reader.objects:
            objects[name] = source
            continue
        if (first := filled.setdefault(id(value), name)) != name:  # a tied weight, under another name
            doubles[name] = first
            continue
        if id(value) not in live:
            value = computed[name] = torch.empty_like(value)
        if isinstance(value, nn.Parameter) and is_delayed(value):
            allocate(value, state.device)
        if isinstance(source, str):
            targets[source] = Target(local_tensor_of(value), division_of(state_dict[name]).chunks)
        else:
            _fill_from(value, name, source())
    read_into(reader, targets)
    _check_doubles(state_dict, sources, reader, doubles if strict else {})
    if objects:
        values = reader.read_objects(objects.values())
        computed |= {name: values[source] for name, source in objects.items()}
    if computed:
        model.module.load_state_dict(computed, strict=False)
    if state.optimizer is not None:
        state.optimizer.refresh_masters()  # they are copies of the weights that have been loaded


def _fill_from(tensor: torch.Tensor, name: str, whole: torch.Tensor) -> None:
    division = division_of(tensor)
    if whole.shape != division.shape:
        raise CheckpointError(
            f"the checkpoint belongs to another model: `{name}` is {list(division.shape)} here and "
            f"{list(whole.shape)} there"
        )
    copy_chunks(local_tensor_of(tensor), whole, division.chunks)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def load_optimizer(optimizer: WrappedOptimizer, model: DistributedModel, reader: Reader) -> None:
    """Load the groups' settings, and the states of the parameters that this rank holds, which the partition decides."""
    if GROUPS not in reader.objects:
        warn_user(f"{reader.folder} holds no optimizer state that this rank can use: the optimizer starts anew")
        return
    _load_settings(optimizer, model, reader.read_objects([GROUPS])[GROUPS])
    # States wait until it is known what this rank holds; the script may change the settings until then.
    if _awaits_partition(model):
        defer_load(lambda: _load_states(optimizer, model, reader))
    else:
        _load_states(optimizer, model, reader)


def load_loss_scale(optimizer: WrappedOptimizer, reader: Reader) -> None:
    """Load only the loss scale of an optimizer's state, if the checkpoint and the optimizer have one."""
    if SCALER in reader.objects and optimizer.masters is not None:
        optimizer.masters.loss_scaler.load_state_dict(reader.read_objects([SCALER])[SCALER])


def _load_settings(optimizer: WrappedOptimizer, model: DistributedModel, saved: Any) -> None:
    """Give the parameter groups the settings of the saved ones.

    A parameter that both know is in the same group, or it would get another one's settings. Others are new, were
    frozen, or have other names in modules that tensor parallelism has replaced.
    """
    groups = optimizer.param_groups
    if not isinstance(saved, list) or len(saved) != len(groups):
        count = len(saved) if isinstance(saved, list) else "no"
        raise CheckpointError(
            f"the checkpoint is of an optimizer with {count} parameter groups, this one has {len(groups)}",
            hint="make the same parameter groups, or pass load_optimizer=False",
        )
    names = {id(parameter): name for name, parameter in members_of(optimizer, model).items()}
    before = {name: number for number, group in enumerate(saved) for name in group["params"]}
    for number, group in enumerate(groups):
        for name in (names[id(optimizer.model_parameter(member))] for member in group["params"]):
            if before.get(name, number) != number:
                raise CheckpointError(
                    f"`{name}` is in parameter group {number} here and in {before[name]} there",
                    hint="make the same parameter groups, or pass load_optimizer=False",
                )
    for group, settings in zip(groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _load_states(optimizer: WrappedOptimizer, model: DistributedModel, reader: Reader) -> None:
    by_parameter = _states_by_parameter(reader)
    factories = _state_factories(model.module, reader, by_parameter)
    members = members_of(optimizer, model)
    states = defaultdict[int, dict[str, Any]](dict)
    targets = dict[str, Target]()
    objects: list[tuple[int, str, str]] = []
    for number, (name, parameter) in enumerate(members.items()):
        if not model.owns(parameter):
            continue
        if name in factories:
            states[number] = {key: _local_part(make(), parameter) for key, make in factories[name].items()}
            continue
        division = division_of(parameter)
        for key, full in _usable(name, by_parameter.get(name, ()), division.suffix):
            if full in reader.objects:
                objects.append((number, key, full))
            else:
                targets[full] = _target(reader, full, division, parameter.device)
                states[number][key] = targets[full].tensor
    read_into(reader, targets)
    scalers = {SCALER}.intersection(reader.objects)
    values = reader.read_objects({*scalers, *(full for _, _, full in objects)})
    for number, key, full in objects:
        states[number][key] = values[full]
    scaler = {SCALER_KEY: values[SCALER]} if scalers else {}
    numbers = {id(parameter): number for number, parameter in enumerate(members.values())}
    groups = [
        {**group, "params": [numbers[id(optimizer.model_parameter(member))] for member in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict({"state": dict(states), "param_groups": groups, **scaler})


def _state_factories(
    root: nn.Module, reader: Reader, by_parameter: Mapping[str, list[str]]
) -> dict[str, dict[str, TensorFactory]]:
    """Return the factories of states of parameters that the checkpoint has under other names: by name and key."""
    result: dict[str, dict[str, TensorFactory]] = {}
    for replaced in _replaced(root, by_parameter):
        prefix, saved_names, *_ = replaced
        examples = {full.rpartition(".")[2]: full for name in saved_names for full in by_parameter[prefix + name]}
        for key, example in examples.items():
            factories = _factories(replaced, reader, lambda name, key=key: f"{STATES}{name}.{key}")  # type: ignore[misc]
            if example in reader.tensors and not reader.tensors[example].size:
                factories = {name: functools.partial(_number, name, key, make) for name, make in factories.items()}
            for name, factory in factories.items():
                result.setdefault(name, {})[key] = factory
    return result


def _number(name: str, key: str, make: TensorFactory) -> torch.Tensor:
    """Return the state of a parameter that is one number: that of all weights that it is put together from."""
    low, high = make().aminmax()
    if low != high:
        raise CheckpointError(
            f"the optimizer's `{key}` of `{name}` is one number, and the weights of the checkpoint that it is put"
            " together from have different ones",
            hint="resume with the tensor_parallel_degree it was saved with, or with load_optimizer=False",
        )
    return low


def _local_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the state of a parameter."""
    division = division_of(parameter)
    if whole.dim() == 0 or whole.shape != division.shape:
        return whole.clone()
    piece = torch.empty(division.local_shape, dtype=whole.dtype, device=parameter.device)
    copy_chunks(piece, whole, division.chunks)
    return piece


def _states_by_parameter(reader: Reader) -> dict[str, list[str]]:
    """Return the names of the states in the checkpoint, by parameter; keys have no dots, parameters may have."""
    names: dict[str, list[str]] = {}
    for full in (*reader.tensors, *reader.objects):
        if full.startswith(STATES):
            names.setdefault(full.removeprefix(STATES).rpartition(".")[0], []).append(full)
    return names


def _usable(name: str, states: Iterable[str], suffix: str) -> Iterable[tuple[str, str]]:
    """Return the states of a parameter that this rank can use, given the suffix of the parameter's division here.

    They are keys, and names in the checkpoint. One that can be loaded only with other degrees is an error.
    """
    usable, foreign = {}, set()
    for full in states:
        key, _, position = full.removeprefix(f"{STATES}{name}.").partition("@")
        if position in ("", suffix.removeprefix("@")):
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


def _target(reader: Reader, name: str, division: Division, device: torch.device) -> Target:
    """Return memory for a state: divided like the parameter if the whole tensors have the same shape."""
    saved = reader.tensors[name]
    shape, dtype = tuple(saved.size), saved.properties.dtype
    if shape and shape == division.shape:
        return Target(torch.empty(division.local_shape, dtype=dtype, device=device), division.chunks)
    return Target(torch.empty(shape, dtype=dtype, device="cpu"), chunks_of(shape))


# --- replaced modules -------------------------------------------------------------------------------------------------


Replaced: TypeAlias = tuple[str, tuple[str, ...], nn.Module, Translation]
"""A replaced module: the prefix of its names, in the model and in the checkpoint; its names in the checkpoint without
that; the distributed module, from which the translation takes sizes; and the translation to the model's names."""


def _factories(replaced: Replaced, reader: Reader, entry_of: Callable[[str], str]) -> dict[str, TensorFactory]:
    """Return a factory for each whole tensor of a replaced module's own state, by name.

    `entry_of` returns the name of an entry (of the weight, or of one of its states), given the parameter's name in the
    checkpoint. Entries that are not there are left out. One that is a number, such as a count of steps, is a whole
    tensor of it, of the weight's shape.
    """
    prefix, saved_names, module, translation = replaced
    names = {name: entry_of(prefix + name) for name in saved_names}
    saved = {name: entry for name, entry in names.items() if entry in reader.tensors}

    def read(name: str) -> torch.Tensor:
        value = read_whole(reader, saved[name])
        weight = reader.tensors.get(f"{MODEL}{prefix}{name}", reader.tensors[saved[name]])
        return value if value.dim() else value.expand(weight.size)

    return dict(translated(translation, TensorsOnAccess(saved, read), module, prefix))


def _replaced(root: nn.Module, names: Collection[str]) -> Iterator[Replaced]:
    """Yield the modules of a model that have other names in a checkpoint, given the checkpoint's names."""

    def inside(name: str) -> tuple[str, tuple[str, ...]]:
        prefix = f"{name}." if name else ""
        return prefix, tuple(saved.removeprefix(prefix) for saved in names if saved.startswith(prefix))

    for name, module, rule in replaced_modules(root):
        # Only the translation knows the names of the original module.
        prefix, saved_names = inside(name)
        if rule.to_distributed is not None and not set(saved_names) <= set(module.state_dict()):
            yield prefix, saved_names, module, rule.to_distributed
    # Saved with tensor parallelism, loaded without: stubs of the replacements that would be made know the names.
    for name, module, stub, rule in replacement_stubs(root) if state.tp_size == 1 else ():
        prefix, saved_names = inside(name)
        is_of_stub = set(saved_names) <= set(stub.state_dict())
        if rule.from_distributed is not None and is_of_stub and not set(saved_names) <= set(module.state_dict()):
            yield prefix, saved_names, stub, rule.from_distributed
