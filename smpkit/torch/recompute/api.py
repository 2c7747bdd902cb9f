"""SMP v1's calls for activation checkpointing, and how modules and Sequentials are checkpointed over a pipeline.

`checkpoint` and `checkpoint_sequential` checkpoint one call, `set_activation_checkpointing` every later call of a
module. All of them give a `ModuleCheckpoint` or a `SequentialCheckpoint` to the module's `ModuleCall`, which runs the
call through it. Backward recomputes a call on one rank, so what is checkpointed together must lie on one pipeline rank:
a module on several ranks is not checkpointed, and layers of a Sequential are grouped by rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_bool, check_module
from smpkit.torch.core.module_call import ModuleCall, OriginalCall
from smpkit.torch.core.runtime import state
from smpkit.torch.pipeline.stage_tensor import microbatch_between_units
from smpkit.torch.pipeline.units import run_together
from smpkit.torch.placement.placement import pp_ranks_of
from smpkit.torch.recompute.layer import ChosenCheckpoint, ModuleCheckpoint, warn_once
from smpkit.torch.recompute.region import name_of, run_checkpointed

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call `module(*args, **kwargs)` and keep only its inputs for backward, which recomputes the rest.

    Gradients are those of a plain call, also with dropout, autocast and running statistics. Use it in the `forward` of
    your model instead of a call; to checkpoint layers of a model that you cannot edit, use
    `set_activation_checkpointing`.

    Args:
        module: a module, not a function; over a pipeline all of it on one rank.
        preserve_rng_state: False saves some time if the module draws no random numbers.

    Raises:
        UsageError: `module` is no module, or was placed by hand on several pipeline ranks. A module that the automatic
            partition puts on several ranks runs un-checkpointed, after a warning.
    """
    _check_layer("checkpoint", module)
    check_bool("preserve_rng_state", preserve_rng_state)
    if isinstance(module, _CONTAINERS):
        raise UsageError(
            f"a {type(module).__name__} cannot be called, so it cannot be checkpointed",
            hint="checkpoint the modules in it",
        )
    call = ModuleCall.of(module)
    if len(call.pp_ranks) > 1 and isinstance(module, nn.Sequential) and is_plain(module):
        return call.run(SequentialCheckpoint(module, preserve_rng_state, None), args, kwargs)
    return call.run(_checkpoint_of(module, call, preserve_rng_state), args, kwargs)


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
        strategy: `each` checkpoints each layer; `contiguous` all neighbours on one pipeline rank together; `group_2`,
            `group_3`, ... that many neighbours on one rank, and fewer where the rank has no more.
        preserve_rng_state: False saves some time if the layers draw no random numbers.
        pack_args_as_tuple: accepted for compatibility: a tuple reaches layers as a tuple in any case.

    Raises:
        UsageError: an argument is invalid, or a layer was placed by hand on several pipeline ranks.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise UsageError(
            f"checkpoint_sequential takes a torch.nn.Sequential, not {_kind(sequential_module)}",
            hint="use smp.checkpoint for other modules",
        )
    check_bool("preserve_rng_state", preserve_rng_state)
    check_bool("pack_args_as_tuple", pack_args_as_tuple)
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

    With `strategy="auto"` the layers are checkpointed until the first steps have been measured. Then each layer of this
    pipeline rank keeps its activations, is recomputed, or (with `offload_activations`) has its input offloaded:
    together the fastest that fits `memory_budget_gib`. Gradients are the same bits in all three.

    Args:
        module: a layer or a stack of layers, before or after `smp.DistributedModel`; for `auto` before the first step.
        preserve_rng_state: False saves some time if the module draws no random numbers.
        pack_args_as_tuple: as for `checkpoint_sequential`; only for a Sequential.
        strategy: as for `checkpoint_sequential`, for a Sequential; or `auto`.

    Raises:
        UsageError: an argument is invalid, or a module was placed by hand on several pipeline ranks (raised in the
            first step if the module has not been placed yet).
    """
    _check_layer("set_activation_checkpointing", module)
    check_bool("preserve_rng_state", preserve_rng_state)
    check_bool("pack_args_as_tuple", pack_args_as_tuple)
    automatic = strategy == "auto"
    size = 1 if automatic else _group_size(strategy, "`auto`, ")
    if not isinstance(module, nn.Sequential):
        settings = ["pack_args_as_tuple"] * pack_args_as_tuple + ["strategy"] * (strategy not in ("each", "auto"))
        if settings:
            raise UsageError(
                f"{' and '.join(settings)} can be set for a torch.nn.Sequential only, not for {_kind(module)}",
                hint=f"leave out {' and '.join(settings)}",
            )
    elif size != 1:
        _check_chain(module)
        for layer in module:
            ModuleCall.of(layer).checkpointing = None
        ModuleCall.on(module).checkpointing = SequentialCheckpoint(module, preserve_rng_state, size)
        return
    else:
        ModuleCall.on(module).checkpointing = None
    for layer in module.children() if isinstance(module, (nn.Sequential, *_CONTAINERS)) else [module]:
        call = ModuleCall.on(layer)
        kind = ChosenCheckpoint if automatic else ModuleCheckpoint
        call.checkpointing = _checkpoint_of(layer, call, preserve_rng_state, kind)


def _checkpoint_of(
    module: nn.Module, call: ModuleCall, preserve_rng_state: bool, kind: type[ModuleCheckpoint] = ModuleCheckpoint
) -> ModuleCheckpoint | None:
    """Return what checkpoints calls of a module; None if it lies on several ranks."""
    return None if _cannot_checkpoint(module, call.pp_ranks) else kind(module, preserve_rng_state)


def _check_layer(function: str, module: object) -> None:
    check_module(function, module)
    model: object = state.model
    if module is model:
        raise UsageError(
            f"{function} takes a layer, not the whole smp.DistributedModel",
            hint="checkpoint the layers: recomputing everything at once would save nothing",
        )


def _group_size(strategy: object, others: str = "") -> int | None:
    """Return how many layers a strategy groups; None: as many as lie on one rank. An error names `others`, too."""
    if strategy == "contiguous":
        return None
    match = re.fullmatch(r"each|group_([1-9][0-9]*)", strategy) if isinstance(strategy, str) else None
    if match is None:
        raise UsageError(
            f"strategy is {strategy!r}",
            hint=f"valid are {others}`each`, `contiguous`, and `group_N`, such as `group_2`",
        )
    return int(match[1] or 1)


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


def check_checkpoint_ranks(root: nn.Module, placement: Mapping[str, int]) -> None:
    """Check that modules to be checkpointed lie on one rank each, once the partition is known."""
    for name, module in root.named_modules():
        call = ModuleCall.of(module)
        if isinstance(call.checkpointing, ModuleCheckpoint) and _cannot_checkpoint(
            module, pp_ranks_of(name, placement)
        ):
            call.checkpointing = None


def _cannot_checkpoint(module: nn.Module, pp_ranks: Collection[int]) -> bool:
    """Return whether a module lies on several pipeline ranks and hence cannot be checkpointed.

    The user is warned once; to have placed it there by hand is an error.
    """
    if len(pp_ranks) < 2:
        return False
    if not state.initialized:  # a recording for a plan, in which every unit may have a rank of its own
        return True
    ranks = " and ".join(map(str, sorted(pp_ranks)))
    if not state.cfg.auto_partition:
        raise UsageError(
            f"`{name_of(module)}` is to be checkpointed, but parts of it were placed on pipeline ranks {ranks}",
            hint="place it on one rank with smp.set_partition, or checkpoint the modules in it",
        )
    warn_once(module, f"lies on pipeline ranks {ranks}")
    return True


class SequentialCheckpoint:
    """Checkpoints each call of a Sequential in groups of neighbouring layers, of at most `size` layers.

    None: as many as lie on one rank.
    """

    def __init__(self, module: nn.Sequential, preserve_rng_state: bool, size: int | None) -> None:
        self._module, self._preserve_rng_state, self._size = module, preserve_rng_state, size

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        """Run the Sequential's own call, with its hooks, around our loop over its layers."""
        # An attribute of the object hides the class's `forward`: the Sequential's own hooks run around our loop.
        attributes = vars(self._module)
        attributes["forward"] = self._forward
        try:
            return original(*args, **kwargs)
        finally:
            attributes.pop("forward", None)  # a hook that comes before it has raised

    def _forward(self, input: Any) -> Any:  # noqa: A002 - nn.Sequential's own name, which callers may use
        # Now, not afterwards: a layer may suspend this microbatch, and another one calls the Sequential meanwhile.
        vars(self._module).pop("forward", None)
        spans_ranks = microbatch_between_units() is not None and len(ModuleCall.of(self._module).pp_ranks) > 1
        layers, value = list(self._module), input
        for group in cut_groups([_ranks_of(layer) if spans_ranks else frozenset() for layer in layers], self._size):
            members = [layers[index] for index in group]
            if len(members) == 1:
                call = ModuleCall.of(members[0])
                value = call.run(_checkpoint_of(members[0], call, self._preserve_rng_state), (value,), {})
            elif spans_ranks:
                run = functools.partial(self._run_group, members)
                value = run_together(run, members, tuple(map(name_of, members)), value)
            else:
                value = self._run_group(members, value)
        return value

    def _run_group(self, layers: Sequence[nn.Module], value: Any) -> Any:
        def run_layers(value: Any) -> Any:
            for layer in layers:
                value = layer(value)
            return value

        return run_checkpointed(run_layers, layers, (value,), {}, preserve_rng_state=self._preserve_rng_state)


def is_plain(module: nn.Sequential) -> bool:
    """Return whether calling the module calls its layers one after the other and does nothing else."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return not own_forward and not ModuleCall.of(module).is_compiled


def cut_groups(ranks_of_layers: Sequence[frozenset[int] | None], size: int | None) -> Iterator[list[int]]:
    """Yield groups of indices: neighbouring layers that lie on the same rank.

    Args:
        ranks_of_layers: the rank of each layer. An empty set: a layer without parameters, which joins its neighbours.
            None: a layer that must stay alone.
        size: the most layers of a group; None: no limit.
    """
    group: list[int] = []
    pp_ranks: frozenset[int] = frozenset()
    for index, ranks in enumerate(ranks_of_layers):
        fits = ranks is not None and len(pp_ranks | ranks) < 2 and len(group) != size
        if group and not fits:
            yield group
            group, pp_ranks = [], frozenset()
        if ranks is None:
            yield [index]
        else:
            group.append(index)
            pp_ranks |= ranks
    if group:
        yield group


def _ranks_of(layer: nn.Module) -> frozenset[int] | None:
    call = ModuleCall.of(layer)
    return None if type(call) is ModuleCall or len(call.pp_ranks) > 1 else call.pp_ranks
