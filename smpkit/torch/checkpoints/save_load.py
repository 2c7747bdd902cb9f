"""`smp.save` and `smp.load`: one object per rank, in files named as in SMP v1.

Both are local, without communication, so scripts guard `save` themselves (`if smp.rdp_rank() == 0: ...`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.objects import read_file, write_file
from smpkit.torch.core.runtime import state


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: ModuleType | None = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save an object of this rank with `torch.save`; an old file is replaced only when all of the object is written.

    The name is `f_{mp_rank}` without tensor parallelism, `f_{pp_rank}_{tp_rank}` with it, and
    `f_{pp_rank}_{tp_rank}_{rdp_rank}` with `v3` (each replica its own shard). With `partial=False` it is `f`.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full.
    """
    name = _names(os.fspath(f), v3)[0] if partial else os.fspath(f)
    write_file(Path(name), obj, pickle_module, pickle_protocol)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: ModuleType | None = None,
    pickle_load_args: Mapping[str, Any] | None = None,
    partial: bool = True,
    back_compat: bool = False,
) -> Any:
    """Load what `save` wrote for this rank, under any of the names that releases of SMP v1 used.

    Reads with `weights_only=True`: tensors, plain values, and objects of classes that are known to be harmless or that
    the script's own source files define. An object of another class is an error that names it. If you trust a file,
    pass `pickle_load_args={"weights_only": False}`, or a `pickle_module`. The file is read into memory, not mapped
    (`{"mmap": True}` does that), because the script may overwrite it while it uses the result.

    Args:
        back_compat: accepted for SMP v1 scripts; the older names are always tried.

    Raises:
        CheckpointError: there is no such file, it is damaged, or `torch.save` has written it with an object in it that
            may not be loaded.
    """
    del back_compat
    # A whole file is read without smp.init().
    names = names_to_load(os.fspath(f)) if partial else [os.fspath(f)]
    path = next((Path(name) for name in names if Path(name).is_file()), None)
    if path is None:
        raise _not_found(os.fspath(f), names, partial)
    return read_file(path, map_location, pickle_module, **(pickle_load_args or {}))


def names_to_load(f: str) -> list[str]:
    """Return the names under which this rank's file may be, the first that exists to be read."""
    return _names(f, state.cfg.shard_optimizer_state or state.cfg.sharded_data_parallel_degree > 1)


def _names(f: str, v3: bool) -> list[str]:
    """Return the names of this rank's file: first the one to write, then those of other releases."""
    two = f"{f}_{state.pp_rank}_{state.tp_rank}"
    three = f"{two}_{state.rdp_rank}"
    plain = [f"{f}_{state.mp_rank}", two] if state.tp_size == 1 else [two]
    return [three, *plain] if v3 else [*plain, three]


def _not_found(f: str, names: list[str], partial: bool) -> CheckpointError:
    tried = ", ".join(f"`{name}`" for name in names)
    whole = partial and Path(f).is_file()
    hint = f"`{f}` itself exists: load it with partial=False" if whole else "was it saved with the same degrees?"
    return CheckpointError(f"there is no file {tried}", hint=hint if partial else None)
