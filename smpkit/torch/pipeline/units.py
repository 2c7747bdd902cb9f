"""Put the calls of placed modules under the pipeline: the owner runs them, the others pass by.

Neighbouring units of one rank are called together, through the largest subtree that lies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from smpkit.torch.pipeline.located import Located, current, data_on, is_running
from smpkit.torch.pipeline.random import RandomStreams
from smpkit.torch.pipeline.specs import map_tensors
from smpkit.torch.pipeline.stage import Stage

__all__ = ["install", "install_streams"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def install(root: nn.Module, placement: Mapping[str, int], stage: Stage) -> None:
    """Route the calls of every module that lies wholly on one rank through the current microbatch.

    Modules above them that lie on several ranks run everywhere; all have a stream of random numbers of their own.
    """
    for name, module in root.named_modules():
        homes = {
            home for unit, home in placement.items() if unit == name or unit.startswith(f"{name}." if name else "")
        }
        above = _unit_above(name, placement)
        if above is not None:
            homes = {placement[above]}
        if len(homes) == 1 and not isinstance(module, _CONTAINERS):
            kind = _Kind.AROUND if above is None else _Kind.UNIT if above == name else _Kind.INNER
            _route(module, name or "model", homes.pop(), stage, kind)
        elif not homes and _is_torch_leaf(module):
            _follow(module, name, stage)
        elif len(homes) > 1 and not isinstance(module, _CONTAINERS):
            _span(module, name or "model", stage.random, closed=False)


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
            _span(module, name or "model", random, closed=name not in above)


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
    return type(module).__module__.startswith("torch.nn") and not any(True for _ in module.children())


def _route(module: nn.Module, name: str, home: int, stage: Stage, kind: _Kind) -> None:
    """Run the module on its home only."""
    plain = _plain_call(module)
    closed = kind is not _Kind.AROUND

    def run(*args: Any, **kwargs: Any) -> Any:
        stage.inside = True
        try:
            return plain(*args, **kwargs)
        finally:
            stage.inside = False

    def routed(*args: Any, **kwargs: Any) -> Any:
        if not stage.inside and is_running():
            return current().run_at(home, name, name, run, args, kwargs, (module.training,), stream=closed)
        if not stage.inside:  # recomputation in backward, which comes past no other place
            args, kwargs = map_tensors(lambda tensor: data_on(tensor, stage.rank), (args, kwargs))
        if kind is _Kind.INNER:
            return plain(*args, **kwargs)
        with stage.random.stream(name, closed=closed):
            return plain(*args, **kwargs)

    _replace_call(module, routed)


def _follow(module: nn.Module, name: str, stage: Stage) -> None:
    """Run a module that holds nothing (a Dropout, an activation) where its input is."""
    plain = _plain_call(module)

    def followed(*args: Any, **kwargs: Any) -> Any:
        homes: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Located):
                homes.append(tensor.home)
            return tensor

        if not stage.inside and is_running():
            map_tensors(note, (args, kwargs))
        if not homes:
            with stage.random.stream(name, closed=True):
                return plain(*args, **kwargs)
        return current().run_at(homes[0], name, name, plain, args, kwargs, (module.training,), stream=True)

    _replace_call(module, followed)


def _span(module: nn.Module, name: str, random: RandomStreams, *, closed: bool) -> None:
    """Run the module on every rank, each with what it holds; `closed` says that it is no more than a unit."""
    plain = _plain_call(module)

    def spanning(*args: Any, **kwargs: Any) -> Any:
        with random.stream(name, closed=closed):
            return plain(*args, **kwargs)

    _replace_call(module, spanning)


def _plain_call(module: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return compiled if compiled is not None else module._call_impl


def _replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    # The slot that `module.compile()` fills: nn.Module.__call__ looks there first, and pickling leaves it out.
    module._compiled_call_impl = call
