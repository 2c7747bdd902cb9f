"""Put the calls of placed modules under the pipeline: the owner runs them, the others pass by.

Neighbouring units of one rank are called together, through the largest subtree that lies on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.calls import ModuleCall, OwnCall, Placed
from smpkit.torch.deadline import note_place
from smpkit.torch.partitioning.apply import names_of
from smpkit.torch.pipeline.captured import lists_that_fill, mode_of, parts_added, with_added
from smpkit.torch.pipeline.located import Located, Running, between_units, current
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.pipeline.specs import tensors_in
from smpkit.torch.pipeline.stage import Stage

__all__ = ["home_of", "homes_of", "install", "install_streams", "refuse_compiled", "run_together"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_IN_VMAP: Final = ("vmap: called random operation", "BatchedTensorImpl")
"""What torch says of where a module draws, and of where its arguments and results are looked at."""


def install(root: nn.Module, placement: Mapping[str, int], stage: Stage) -> None:
    """Route the calls of every module that lies wholly on one rank through the current microbatch.

    Modules above them that lie on several ranks run everywhere; all have a stream of random numbers of their own.
    """
    for module, names in names_of(root).items():
        name = names[0]
        homes = homes_of(name, placement)
        above = _unit_above(name, placement)
        (stage.modules if len(homes) != 1 or stage.rank in homes else stage.modules_elsewhere)[name] = module
        stage.spanning.update([name] * (len(homes) != 1))
        if len(homes) == 1 and not isinstance(module, _CONTAINERS):
            kind = _Kind.AROUND if above is None else _Kind.UNIT if above == name else _Kind.INNER
            is_here = any(stage.rank in homes_of(other, placement) for other in names)
            _route(module, name or "model", next(iter(homes)), stage, kind, is_here=is_here)
        elif not homes and _is_torch_leaf(module):
            _follow(module, name, stage)
        elif len(homes) > 1 and not isinstance(module, _CONTAINERS):
            _span(module, name or "model", stage.random, homes, closed=False)


def refuse_compiled(root: nn.Module, placement: Mapping[str, int] | None = None) -> None:
    """Raise if torch.compile is to trace through a module that lies on several ranks, and so through their exchanges.

    Args:
        placement: None before it is known: the whole model will lie on several.

    Raises:
        UsageError: names the module.
    """
    for name, module in root.named_modules() if placement is not None else [("", root)]:
        compiled = "_orig_mod" in module._modules or ModuleCall.of(module).is_compiled
        if compiled and (placement is None or len(homes_of(name, placement)) > 1):
            raise UsageError(
                f"torch.compile was asked to compile {f'`{name}`' if name else 'the whole model'}, which lies on"
                " several pipeline ranks",
                hint="compile its layers instead: `for layer in model.layers: layer.compile()`",
            )


def homes_of(name: str, placement: Mapping[str, int]) -> set[int]:
    """Return the ranks on which a module lies: that of the unit around it, or those of the units in it."""
    above = _unit_above(name, placement)
    if above is not None:
        return {placement[above]}
    below = f"{name}." if name else ""
    return {home for unit, home in placement.items() if unit.startswith(below)}


class _Kind(Enum):
    """Where a module that lies on one rank is, seen from the units."""

    AROUND = auto()
    UNIT = auto()
    INNER = auto()


def install_streams(root: nn.Module, units: Collection[str], random: RandomStreams) -> None:
    """Give modules the streams of random numbers that they would have on a pipeline, on a rank that holds them all."""
    above = {unit.rpartition(".")[0] for unit in units}
    for parent in list(above):
        above.update(_ancestors(parent))
    placed = dict.fromkeys(units, 0)
    for name, module in root.named_modules():
        if isinstance(module, _CONTAINERS) or _unit_above(name.rpartition(".")[0], placed) is not None:
            continue
        if name in placed or name in above or _is_torch_leaf(module):
            _span(module, name or "model", random, (), closed=name not in above)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _unit_above(name: str, placement: Mapping[str, int]) -> str | None:
    while name:
        if name in placement:
            return name
        name = name.rpartition(".")[0]
    return None


def _is_torch_leaf(module: nn.Module) -> bool:
    known = type(module).__module__.startswith(("torch.nn", "smpkit.torch.tensor_parallel"))
    return known and not any(True for _ in module.children())


def _route(module: nn.Module, name: str, home: int, stage: Stage, kind: _Kind, *, is_here: bool) -> None:
    """Run the module on its home only.

    Args:
        is_here: whether it is a part of this rank's units, as one that several units share is of each.
    """
    closed = kind is not _Kind.AROUND
    lists_now = lists_that_fill()

    def routed(own: OwnCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        microbatch = Running.microbatch
        if microbatch is not None and not stage.inside:
            if microbatch.around_units is not None:
                own = microbatch.around_units(own)
            run = functools.partial(_inside, stage, own) if home == stage.rank else own
            lists = lists_now()
            if not lists:
                return microbatch.run_at(home, name, name, run, args, kwargs, module.training, stream=closed)
            mode = module.training, mode_of(lists)
            run = with_added(lists, run)
            return parts_added(lists, microbatch.run_at(home, name, name, run, args, kwargs, mode, stream=closed))
        if not is_here:
            raise UsageError(
                f"`{name}`, whose weights pipeline rank {home} holds, was called outside a step, on rank {stage.rank}",
                hint="call it in a function with @smp.step, which all pipeline ranks run",
            )
        if kind is _Kind.INNER:
            return own(*args, **kwargs)
        return stage.random.run(name, closed, own, args, kwargs)

    _place(module, name, routed, {home})


def _inside(stage: Stage, own: OwnCall, *args: Any, **kwargs: Any) -> Any:
    """Run a call that is this rank's own business, whatever it calls."""
    stage.inside = True
    try:
        return own(*args, **kwargs)
    finally:
        stage.inside = False


def _follow(module: nn.Module, name: str, stage: Stage) -> None:
    """Run a module that holds nothing (a Dropout, an activation) where its input is."""

    def followed(own: OwnCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        microbatch = between_units()
        home = None if microbatch is None else home_of((args, kwargs), microbatch.stage)
        if microbatch is None or home is None:
            return stage.random.run(name, True, own, args, kwargs)
        return microbatch.run_at(home, name, name, own, args, kwargs, module.training, stream=True)

    _place(module, name, followed, set())


def home_of(arguments: Any, stage: Stage | None = None) -> int | None:
    """Return where the first located value among arguments is, or the first weight that not every rank holds."""
    for tensor in tensors_in(arguments):
        if isinstance(tensor, Located):
            return tensor.home
        if stage is not None and (home := stage.weights_elsewhere.get(id(tensor))) is not None:
            return home
    return None


def run_together(function: Callable[..., Any], members: Mapping[str, nn.Module], argument: Any) -> Any:
    """Run `function`, which calls neighbouring modules of one rank one after the other, as one call over there.

    Args:
        members: the modules by name; if they all hold nothing, they run where `argument` is.
    """
    homes = {home for module in members.values() for home in ModuleCall.of(module).homes}
    home = next(iter(homes), home_of(argument))
    if home is None:
        return function(argument)
    stage, names = current().stage, tuple(members)
    run = functools.partial(_inside, stage, function)
    modes = tuple(module.training for module in members.values())
    result = current().run_at(home, names, f"{names[0]} to {names[-1]}", run, (argument,), {}, modes)
    if home != stage.rank:
        for _ in names:  # each takes a stream of random numbers
            stage.random.skip()
    return result


def _span(module: nn.Module, name: str, random: RandomStreams, homes: Collection[int], *, closed: bool) -> None:
    """Run the module on every rank, each with what it holds; `closed` says that it is no more than a unit."""

    def spanning(own: OwnCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return random.run(name, closed, own, args, kwargs)

    _place(module, name, spanning, homes)


def _place(module: nn.Module, name: str, placed: Placed, homes: Collection[int]) -> None:
    def named(own: OwnCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return placed(own, args, kwargs)
        except Exception as error:
            note_place(error, module=f"`{name}`")
            said = any(text in str(error) for text in _IN_VMAP)
            if said and torch._C._functorch.peek_interpreter_stack() is not None:
                raise UsageError(
                    f"torch.vmap was called around `{name}`, which is one of several parts over a pipeline",
                    hint="call it in a torch.nn.Module, which is placed as a whole; layers take batches anyway",
                ) from error
            raise

    call = ModuleCall.on(module)
    call.placed, call.homes = named, frozenset(homes)
