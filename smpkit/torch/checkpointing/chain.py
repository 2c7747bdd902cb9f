"""Checkpoint the layers of an `nn.Sequential` in groups, each of which lies on one pipeline rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from smpkit.torch.calls import ModuleCall, OriginalCall
from smpkit.torch.checkpointing.names import name_of
from smpkit.torch.checkpointing.region import run_checkpointed
from smpkit.torch.checkpointing.whole import ModuleCheckpoint, cannot_checkpoint
from smpkit.torch.pipeline.located import microbatch_between_units
from smpkit.torch.pipeline.units import run_together

__all__ = ["SequentialCheckpoint", "cut_groups", "is_plain"]


class SequentialCheckpoint:
    """Checkpoints each call of a Sequential in groups of neighbouring layers.

    Args:
        size: how many layers a group has at most; None for as many as lie on one rank.
    """

    def __init__(self, module: nn.Sequential, preserve_rng_state: bool, size: int | None) -> None:
        self._module = module
        self._preserve_rng_state = preserve_rng_state
        self._size = size

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        """Run the Sequential's own call, with its hooks, around our loop over its layers."""
        attributes = vars(self._module)
        attributes["forward"] = self._forward
        try:
            return original(*args, **kwargs)
        finally:
            attributes.pop("forward", None)  # a parked microbatch may have been faster

    def _forward(self, input: Any) -> Any:  # noqa: A002 - nn.Sequential's own name, which callers may use
        spans_ranks = microbatch_between_units() is not None and len(ModuleCall.of(self._module).pp_ranks) > 1
        layers = list(self._module)
        for group in cut_groups([_ranks_of(layer) if spans_ranks else frozenset() for layer in layers], self._size):
            members = [layers[index] for index in group]
            if len(members) == 1:
                input = self._run_one(members[0], input)  # noqa: A001
            elif spans_ranks:
                input = run_together(self._as_group(members), {name_of(each): each for each in members}, input)  # noqa: A001
            else:
                input = self._as_group(members)(input)  # noqa: A001
        return input

    def _run_one(self, layer: nn.Module, value: Any) -> Any:
        call = ModuleCall.of(layer)
        refused = cannot_checkpoint(layer, call.pp_ranks)
        return call.run(None if refused else ModuleCheckpoint(layer, self._preserve_rng_state), (value,), {})

    def _as_group(self, layers: Sequence[nn.Module]) -> OriginalCall:
        def one_after_the_other(value: Any) -> Any:
            for layer in layers:
                value = layer(value)
            return value

        def checkpointed(value: Any) -> Any:
            name, preserve = name_of(layers[0]), self._preserve_rng_state
            return run_checkpointed(one_after_the_other, layers, name, (value,), {}, preserve_rng_state=preserve)

        return checkpointed


def is_plain(module: nn.Sequential) -> bool:
    """Return whether calling the module calls its layers one after the other and does nothing else."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return not own_forward and not ModuleCall.of(module).is_compiled


def cut_groups(ranks_of_layers: Sequence[frozenset[int] | None], size: int | None) -> Iterator[list[int]]:
    """Group neighbours that lie on the same rank.

    Args:
        ranks_of_layers: the rank of each layer; an empty set for one that holds nothing and goes with its neighbours,
            None for one that must stay alone.
        size: how many a group has at most.
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
    return None if call.dispatch is None or len(call.pp_ranks) > 1 else call.pp_ranks
