"""`smpkit export`: the weights of a checkpoint for AWS's merge script of sharded data parallelism, or for the hub.

::

    smp-v1: TARGET/                                              hub: TARGET/
              newest                                                    model.safetensors
              {tag}_partial/
                optimizer_0.pt     one flat float32 tensor of all that is trained
                model_0.pt         everything else
                user_content.pt    shapes of what is trained, names of the rest

Names are those that the model has in the job. What is trained is exported as finely as it is kept: its master weights
if it has some. States of the optimizer stay in the checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from smpkit.config.words import quoted
from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.entries import MODEL, STATES
from smpkit.torch.checkpoints.reader import CheckpointReader, read_whole
from smpkit.torch.checkpoints.tensors import write_tensors
from smpkit.torch.precision.cast import MASTER_KEY

_ZERO_STAGE: Final = 3
"""Of the layout of SMP v1's files."""


def export(checkpoint: Path, target: Path, layout: str = "smp-v1") -> Path:
    """Write the weights of a partial checkpoint to a new folder, which appears in one rename; return what was read.

    Args:
        checkpoint: `{tag}_partial`, or the folder that holds it; then its newest.
        layout: one of `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"there is no layout {quoted(layout)}", hint=f"use `{'` or `'.join(LAYOUTS)}`")
    if target.exists() or target.is_symlink():
        raise UsageError(f"`{target}` exists already", hint="name a new folder, or remove this one")
    if not target.parent.is_dir():
        raise UsageError(
            f"`{target}` cannot be made: there is no folder `{target.parent}`", hint="make that folder first"
        )
    source = _find_checkpoint(checkpoint)
    # Not named as a save's: a job that still saves to the folder removes what looks left over from its saves.
    staged = target.with_name(f".{target.name}.{files.new_save_id()}.export")
    try:
        with files.as_checkpoint_error(f"`{target}` cannot be written"):
            staged.mkdir()
            LAYOUTS[layout](staged, source)
            staged.rename(target)
            files.sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return source


def _find_checkpoint(path: Path) -> Path:
    """Return the folder of the partial checkpoint that a path means: itself, or the newest one in it."""
    if not path.is_dir():
        raise CheckpointError(
            f"`{path}` is no folder", hint="name a checkpoint's folder, such as `checkpoints/step_100_partial`"
        )
    if (path / files.INDEX).exists() or path.name.endswith(files.PARTIAL):
        return path
    survey = files.survey(path, partial=True)
    for name, damage in survey.damaged.items():
        if name in (survey.newest, files.NEWEST):
            raise CheckpointError(f"`{path / name}` cannot be used: {damage}", hint="name an older checkpoint's folder")
    if not survey.usable:
        raise CheckpointError(
            f"`{path}` holds no partial checkpoint", hint="`smp.save_checkpoint(..., partial=True)` saves one"
        )
    return path / next(iter(survey.usable))


def _sources_in(reader: CheckpointReader) -> tuple[dict[str, str], list[str]]:
    """Return where a checkpoint has the finest value of each tensor of the model, by name; and which are trained."""
    tensors = {name.removeprefix(MODEL): name for name in reader.tensors if name.startswith(MODEL)}
    if not tensors:
        raise CheckpointError(f"{reader.folder} holds no weights")
    # A tied weight lies in the files once, and has states under the first of its names.
    places, first_names = reader.places(), dict[object, str]()
    sources = {}
    for name, entry in tensors.items():
        master = f"{STATES}{first_names.setdefault(places[entry], name)}.{MASTER_KEY}"
        sources[name] = master if master in reader.tensors else entry
    with_states = {
        entry.removeprefix(STATES).rpartition(".")[0] for entry in reader.tensors if entry.startswith(STATES)
    }
    # Without any state (SGD, or a job without an optimizer) nothing tells a parameter from a buffer.
    trained = [
        name
        for name in first_names.values()
        if 0 not in reader.tensors[tensors[name]].size
        and (name in with_states if with_states else reader.tensors[tensors[name]].properties.dtype.is_floating_point)
    ]
    return sources, trained


# --- the layouts ------------------------------------------------------------------------------------------------------


def _write_smp_v1(staged: Path, checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    sources, trained = _sources_in(reader)
    shapes = OrderedDict((name, reader.tensors[sources[name]].size) for name in trained)
    for name in trained:
        dtype = reader.tensors[sources[name]].properties.dtype
        if not dtype.is_floating_point or dtype.itemsize > torch.float32.itemsize:
            raise UsageError(
                f"parameter `{name}` is {str(dtype).removeprefix('torch.')}, and SMP v1's files hold float32",
                hint="`smp.CheckpointReader` reads it as it is",
            )
    flat = torch.empty(sum(shape.numel() for shape in shapes.values()), dtype=torch.float32, device="cpu")
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    for name, part in zip(shapes, parts, strict=True):
        part.copy_(read_whole(reader, sources[name]).reshape(-1))
    others = {name: read_whole(reader, source) for name, source in sources.items() if name not in shapes}
    folder = staged / checkpoint.resolve().name
    folder.mkdir()
    contents = {
        "optimizer_0.pt": {"zero_stage": _ZERO_STAGE, "partition_count": 1, "fp32_flat_groups": [flat]},
        "model_0.pt": {"module": others},
        "user_content.pt": {"buffer_names": list(others), "param_shapes": [shapes]},
    }
    for name, content in contents.items():
        files.fsync_write(folder / name, functools.partial(torch.save, content))
    files.fsync_write(staged / files.NEWEST, lambda file: file.write(folder.name.encode()))


def _write_hub(staged: Path, checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    sources, _ = _sources_in(reader)
    places = reader.places()
    first_names = {places[source]: name for name, source in reversed(sources.items())}
    tensors = {name: read_whole(reader, sources[name]) for name in sources if name in first_names.values()}
    files.fsync_write(staged / "model.safetensors", lambda file: write_tensors(file, tensors))


LAYOUTS: Final = {"smp-v1": _write_smp_v1, "hub": _write_hub}


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Export `CHECKPOINT TARGET LAYOUT` for `smpkit export`; print what was read, or the error, as JSON."""
    checkpoint, target, layout = arguments
    try:
        source = export(Path(checkpoint), Path(target), layout)
    except SmpkitError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "exit_code": error.exit_code}))  # noqa: T201
        return error.exit_code
    print(json.dumps({"checkpoint": os.fspath(source)}))  # noqa: T201  stdout is the answer
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
