"""The calls of SMP v1: `checkpoint`, `checkpoint_sequential` and `set_activation_checkpointing`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.module_call import ModuleCall
from smpkit.torch.core.runtime import state
from smpkit.torch.recompute.region import ModuleCheckpoint, SequentialCheckpoint, cannot_checkpoint, is_plain

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call `module(*args, **kwargs)` and keep only its inputs for backward, which computes the rest again.

    Gradients are those of a plain call, with dropout, autocast and running statistics too. Write it in the `forward` of
    your model in place of a call; to checkpoint layers of a model that you cannot edit, use
    `set_activation_checkpointing`.

    Args:
        module: a module, not a function; over a pipeline all of it on one rank.
        preserve_rng_state: False saves some time where the module draws no random numbers.

    Raises:
        UsageError: `module` is no module, or was placed by hand on several pipeline ranks. A module that the automatic
            partition puts on several ranks runs un-checkpointed, after a warning.
    """
    _check_module("checkpoint", module)
    _check_bool("preserve_rng_state", preserve_rng_state)
    if isinstance(module, _CONTAINERS):
        raise UsageError(
            f"a {type(module).__name__} cannot be called, so it cannot be checkpointed",
            hint="checkpoint the modules in it",
        )
    call = ModuleCall.of(module)
    if len(call.pp_ranks) > 1 and isinstance(module, nn.Sequential) and is_plain(module):
        return call.run(SequentialCheckpoint(module, preserve_rng_state, None), args, kwargs)
    refused = cannot_checkpoint(module, call.pp_ranks)
    return call.run(None if refused else ModuleCheckpoint(module, preserve_rng_state), args, kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,  # noqa: A002 - SMP v1's and torch's name
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call `sequential_module(input)` and keep only what enters each of its layers, or each group of them.

    Args:
        input: a tensor or a tuple, as the first layer takes it.
        strategy: `each` checkpoints each layer; `contiguous` all neighbours that lie on one pipeline rank together;
            `group_2`, `group_3`, ... so many neighbours on one rank, and fewer where the rank has no more.
        preserve_rng_state: False saves some time where the layers draw no random numbers.
        pack_args_as_tuple: accepted for compatibility: a tuple reaches layers as a tuple in any case.

    Raises:
        UsageError: an argument cannot be meant, or a layer was placed by hand on several pipeline ranks.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise UsageError(
            f"checkpoint_sequential takes a torch.nn.Sequential, not {_kind(sequential_module)}",
            hint="use smp.checkpoint for other modules",
        )
    _check_bool("preserve_rng_state", preserve_rng_state)
    _check_bool("pack_args_as_tuple", pack_args_as_tuple)
    size = _group_size(strategy)
    _check_chain(sequential_module)
    return ModuleCall.of(sequential_module).run(
        SequentialCheckpoint(sequential_module, preserve_rng_state, size), (input,), {}
    )


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Checkpoint every call of a module from now on, without a change to the model's code.

    Nothing is wrapped: the module's class, its names and its state dict stay. The children of a Sequential, ModuleList
    or ModuleDict are checkpointed each by itself. A later call for the same module replaces the settings.

    Args:
        module: a layer or a stack of layers, before or after `smp.DistributedModel`.
        preserve_rng_state: False saves some time where the module draws no random numbers.
        pack_args_as_tuple, strategy: as for `checkpoint_sequential`; only for a Sequential.

    Raises:
        UsageError: an argument cannot be meant, or a module was placed by hand on several pipeline ranks (said at the
            first step if it has not been yet).
    """
    _check_module("set_activation_checkpointing", module)
    _check_bool("preserve_rng_state", preserve_rng_state)
    _check_bool("pack_args_as_tuple", pack_args_as_tuple)
    size = _group_size(strategy)
    if not isinstance(module, nn.Sequential):
        given = ["pack_args_as_tuple"] * pack_args_as_tuple + ["strategy"] * (strategy != "each")
        if given:
            raise UsageError(
                f"{' and '.join(given)} can be set for a torch.nn.Sequential only, not for {_kind(module)}",
                hint=f"leave out {' and '.join(given)}",
            )
        for each in module.children() if isinstance(module, _CONTAINERS) else [module]:
            _mark(each, preserve_rng_state)
        return
    if size == 1:
        ModuleCall.on(module).checkpointing = None
        for layer in module:
            _mark(layer, preserve_rng_state)
        return
    _check_chain(module)
    for layer in module:
        ModuleCall.of(layer).checkpointing = None
    ModuleCall.on(module).checkpointing = SequentialCheckpoint(module, preserve_rng_state, size)


def _mark(module: nn.Module, preserve_rng_state: bool) -> None:
    call = ModuleCall.on(module)
    call.checkpointing = (
        None if cannot_checkpoint(module, call.pp_ranks) else ModuleCheckpoint(module, preserve_rng_state)
    )


def _check_module(function: str, module: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise UsageError(
            f"{function} takes a module, not the class {module.__name__}", hint="make an object of the class first"
        )
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{function} takes a torch.nn.Module, not {_kind(module)}",
            hint="put the code into the forward of a module",
        )
    model: object = state.model
    if module is model:
        raise UsageError(
            f"{function} takes a layer, not the whole smp.DistributedModel",
            hint="checkpoint the layers: recomputing everything at once would save nothing",
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, which is neither True nor False")


def _group_size(strategy: object) -> int | None:
    """Return how many layers a strategy groups; None for all that lie on one rank."""
    if strategy == "contiguous":
        return None
    found = re.fullmatch(r"each|group_([1-9][0-9]*)", strategy) if isinstance(strategy, str) else None
    if found is None:
        raise UsageError(
            f"strategy is {strategy!r}", hint="valid are `each`, `contiguous`, and `group_N`, such as `group_2`"
        )
    return int(found[1] or 1)


def _check_chain(module: nn.Sequential) -> None:
    if not is_plain(module):
        what = "was compiled" if ModuleCall.of(module).is_compiled else "has a forward of its own"
        raise UsageError(
            f"{_kind(module)} {what}, so its layers cannot be grouped",
            hint='call smp.set_activation_checkpointing for it with strategy="each", or smp.checkpoint for its layers',
        )


def _kind(value: object) -> str:
    name = getattr(value, "__name__", None)
    return f"`{name}`" if name else f"an object of type `{type(value).__name__}`"
