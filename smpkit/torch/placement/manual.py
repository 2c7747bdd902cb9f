"""Place modules by hand: `smp.partition(index)` where they are made, `smp.set_partition(module, index)` afterwards."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.arguments import check_module
from smpkit.torch.core.module_call import on_module_created
from smpkit.torch.core.runtime import state

_partition_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The partition that the user chose, by module."""

_num_partitions: int | None = None
"""The number of partitions where a model is only planned, without `smp.init()`."""


@contextlib.contextmanager
def planning_partitions(num_partitions: int) -> Iterator[None]:
    """Let `partition` and `set_partition` be used without `smp.init()`, with indices below `num_partitions`."""
    global _num_partitions  # noqa: PLW0603 - one per process, as the model that is planned
    previous, _num_partitions = _num_partitions, num_partitions
    try:
        yield
    finally:
        _num_partitions = previous


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Put the modules that are created in this block on pipeline rank `index`; the innermost block wins.

    Acts only with `auto_partition: false`. Without, any index will do on one pipeline rank, so a script for many runs
    there. Modules created in no block go to `default_partition`. With virtual stages `index` counts them, 0 to
    `virtual_pipeline_degree * pipeline_parallel_degree - 1`: stage k is on rank k mod degree.

    Raises:
        UsageError: `index` is no pipeline rank, or no virtual stage.
    """
    _check(index)
    with on_module_created(lambda module: _partition_of.__setitem__(module, index)):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Put a module that exists, and everything in it, on pipeline rank `index`, before the first step.

    With virtual stages `index` counts them, as in `partition`.

    Raises:
        UsageError: `index` is no pipeline rank or virtual stage, or the model has been partitioned, or is no module.
    """
    check_module("smp.set_partition", module)
    _check(index)
    if state.model is not None and state.model.partitioned and state.pp_size > 1:
        raise UsageError("the model has been partitioned", hint="call smp.set_partition before the first step")
    for part in module.modules():
        _partition_of[part] = index


def inherit_partition(name: str, module: nn.Module, replacement: nn.Module) -> None:
    """Put a module that replaces another, of this name, on the partition that the user chose for that one."""
    partitions = {_partition_of[part] for part in module.modules() if part in _partition_of}
    if not partitions or not _is_manual():
        return
    if module not in _partition_of and len(partitions) > 1:
        raise UsageError(
            f"parts of `{name}` are placed on the pipeline ranks {', '.join(map(str, sorted(partitions)))}, and tensor"
            f" parallelism makes one {type(replacement).__name__} of it",
            hint="place the whole module, or except it with smp.set_tensor_parallelism(module, False)",
        )
    index = _partition_of.get(module, min(partitions))
    for part in replacement.modules():
        _partition_of[part] = index


@dataclass(frozen=True)
class ManualPlacement:
    """The partitions that the user chose.

    Args:
        partitions: by module name; modules whose parts are on several partitions are left out.
        split: the names of those.
    """

    partitions: Mapping[str, int]
    split: frozenset[str]

    def for_units(self, units: Collection[str]) -> dict[str, int]:
        """Return the partitions of units and of the modules around them; parts of a unit are where it is."""
        around = {""}  # the model's own name
        for unit in units:
            around.update(itertools.accumulate(unit.split("."), "{}.{}".format))
        return {name: index for name, index in self.partitions.items() if name in around}


def manual_placement(root: nn.Module) -> ManualPlacement:
    """Return the chosen partitions by module name."""
    names = {name: _partition_of[module] for name, module in root.named_modules() if module in _partition_of}
    split = {
        name
        for name, index in names.items()
        if any(other != index for inner, other in names.items() if inner.startswith(f"{name}." if name else ""))
    }
    return ManualPlacement({name: index for name, index in names.items() if name not in split}, frozenset(split))


def _is_manual() -> bool:
    return _num_partitions is not None or not state.cfg.auto_partition


def _check(index: int) -> None:
    num_chunks = 1 if _num_partitions is not None else state.cfg.virtual_pipeline_degree
    if _num_partitions is not None:
        what, of, limit = "planned partition", "", _num_partitions
    elif num_chunks > 1:
        what, limit = "virtual stage", state.pp_size * num_chunks
        of = f"; pipeline_parallel_degree is {state.pp_size}, virtual_pipeline_degree {num_chunks}"
    else:
        what, of, limit = "pipeline rank", f"; pipeline_parallel_degree is {state.pp_size}", state.pp_size
    is_integer = type(index) is int  # not a bool, which is an int to Python
    if not is_integer or index < 0 or (index >= limit and (_is_manual() or state.pp_size > 1)):
        raise UsageError(f"partition {index!r} is no {what}{of}", hint=f"valid are 0 to {limit - 1}")
