"""Write a checkpoint in the layout of sharded training elsewhere, for the public scripts that merge its parts.

Both layouts hold weights in float32, divided over ranks element by element. Of a parameter of 10 elements, each of four
ranks has 3, filled up with zeros; its parts of all parameters follow each other in one flat tensor::

    w   | 0 1 2 | 3 4 5 | 6 7 8 | 9 . . |      rank 0:  | w 0 1 2 | b 0 |
    b   | 0 | 1 | 2 | 3 |                      rank 3:  | w 9 . . | b 3 |

    deepspeed: ZeRO 3, as `zero_to_fp32.py` reads it       smp-v1: sharded data parallelism, as AWS's script reads it

    TARGET/                                                TARGET/
      latest                                                 newest
      {tag}_partial/                                         {tag}_partial/
        zero_pp_rank_{i}_mp_rank_00_optim_states.pt            optimizer_{i}.pt       flat tensors
        zero_pp_rank_{i}_mp_rank_00_model_states.pt            model_0.pt             everything else
                                                               user_content.pt        shapes of the parameters

The flat tensors hold what the optimizer trains: its master weights if it has some. Everything else is in the model's
files, whole. States of the optimizer stay in the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from smpkit.config.words import quoted
from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.full_state import FileSlot, SlotWriter, reserve_file
from smpkit.torch.checkpoints.integrity import add_checksums
from smpkit.torch.checkpoints.reader import CheckpointReader, Target, read_into, read_whole
from smpkit.torch.checkpoints.state_entries import MODEL, STATES, Chunk
from smpkit.torch.precision.cast import MASTER_KEY

__all__ = ["LAYOUTS", "Contents", "contents_of", "export", "find_checkpoint", "main"]

_ZERO_STAGE: Final = 3


def export(checkpoint: Path, target: Path, layout: str, num_ranks: int) -> Path:
    """Write the weights of a partial checkpoint to a new folder, as `num_ranks` ranks of another library would.

    Args:
        checkpoint: `{tag}_partial`, or the folder that holds it; then its newest.
        target: appears in one rename, with everything in it.
        layout: one of `LAYOUTS`.

    Returns:
        The checkpoint that was read.

    Raises:
        UsageError: the layout, the number of ranks or the target is impossible; nothing is written then.
        CheckpointError: the checkpoint is missing or damaged, or the target cannot be written.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"there is no layout {quoted(layout)}", hint=f"use `{'` or `'.join(LAYOUTS)}`")
    if target.exists() or target.is_symlink():
        raise UsageError(f"`{target}` exists already", hint="name a new folder, or remove this one")
    if not target.parent.is_dir():
        raise UsageError(
            f"`{target}` cannot be made: there is no folder `{target.parent}`", hint="make that folder first"
        )
    found = find_checkpoint(checkpoint)
    contents = contents_of(found)
    _check_ranks(num_ranks, contents)
    contents.reader.check([*contents.divided.values(), *contents.whole.values()])
    staged = files.staging_folder(target.parent, target.name, files.new_save_id())
    try:
        with files.as_checkpoint_error(f"`{target}` cannot be written"):
            (staged / contents.name).mkdir(parents=True)
            LAYOUTS[layout](staged, contents, num_ranks)
            staged.rename(target)
            files.sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return found


# --- what there is to write -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The weights and buffers of a checkpoint.

    Args:
        name: of the checkpoint's folder.
        divided: the parameters to divide over ranks, by name; where the checkpoint has the value of each.
        whole: all other tensors of the model's state, likewise.
        tied: other names of the divided parameters -> the name in `divided`.
    """

    reader: CheckpointReader
    name: str
    divided: Mapping[str, str]
    whole: Mapping[str, str]
    tied: Mapping[str, str]

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter that is divided."""
        return self.tensor(self.divided[name]).size

    def tensor(self, entry: str) -> TensorStorageMetadata:
        """Return what the checkpoint says of a tensor."""
        found = self.reader.metadata.state_dict_metadata[entry]
        assert isinstance(found, TensorStorageMetadata)
        return found

    @property
    def shapes(self) -> OrderedDict[str, torch.Size]:
        """The shapes of what is divided, in the order of the flat tensors."""
        return OrderedDict((name, self.shape(name)) for name in self.divided)


def find_checkpoint(path: Path) -> Path:
    """Return the folder of the partial checkpoint that a path means: itself, or the newest one in it.

    Raises:
        CheckpointError: there is none, or the newest is damaged.
    """
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
    return files.folder_of(path, next(iter(survey.usable)))


def contents_of(folder: Path) -> Contents:
    """Return what a partial checkpoint holds of the model, by the names that its ranks gave.

    Raises:
        CheckpointError: it is damaged.
        UsageError: a parameter is of a type that float32 cannot hold.
    """
    tag = files.read_index(folder).tag
    files.check_tag(tag)  # it becomes the name of a folder, and may be forged
    reader = CheckpointReader(folder)
    entries = reader.metadata.state_dict_metadata
    tensors = {
        name.removeprefix(MODEL): name
        for name, found in entries.items()
        if name.startswith(MODEL) and isinstance(found, TensorStorageMetadata)
    }
    if not tensors:
        raise CheckpointError(f"{folder} holds no weights")
    tied = {name: first for name, first in _tied(reader, tensors).items() if first != name}
    contents = Contents(reader, f"{tag}{files.PARTIAL}", {}, {}, {})
    trained = {name.removeprefix(STATES).rpartition(".")[0] for name in entries if name.startswith(STATES)}
    first_names = dict.fromkeys(name for name in tensors if name not in tied)
    # Without a state of its own (SGD, or a job without an optimizer) nothing tells a parameter from a buffer.
    divided = [
        name
        for name in first_names
        if 0 not in contents.tensor(tensors[name]).size
        and (name in trained if trained else contents.tensor(tensors[name]).properties.dtype.is_floating_point)
    ]
    sources = {}
    for name in divided:
        master = f"{STATES}{name}.{MASTER_KEY}"
        sources[name] = master if master in entries else tensors[name]
        _check_dtype(name, contents.tensor(sources[name]).properties.dtype)
    tied = {name: first for name, first in tied.items() if first in sources}
    whole = {name: entry for name, entry in tensors.items() if name not in sources and name not in tied}
    return Contents(reader, contents.name, sources, whole, tied)


def _tied(reader: CheckpointReader, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return for each name the first name of the same tensor: tied weights are one storage in a file."""
    places = reader.identities(tensors.values())
    first: dict[object, str] = {}
    return {name: first.setdefault(places[entry], name) for name, entry in tensors.items()}


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or dtype.itemsize > torch.float32.itemsize:
        raise UsageError(
            f"parameter `{name}` is {str(dtype).removeprefix('torch.')}, and both layouts hold float32",
            hint="`smp.CheckpointReader` reads it as it is",
        )


def _check_ranks(num_ranks: int, contents: Contents) -> None:
    largest = max((shape.numel() for shape in contents.shapes.values()), default=0)
    if not 1 <= num_ranks <= largest:
        raise UsageError(
            f"the checkpoint cannot be divided over {num_ranks} ranks",
            hint=f"use 1 to {largest}, the elements of the largest parameter" if largest else "it holds no parameters",
        )


def _read_run(contents: Contents, entry: str, start: int, stop: int) -> torch.Tensor:
    """Return a run of a row-major tensor, float32 [elements]; only the rows that hold it are read."""
    shape = contents.tensor(entry).size
    if not shape or start >= stop:
        return read_whole(contents.reader, entry, torch.float32).reshape(-1)[start:stop]
    row = math.prod(shape[1:])
    first, last = start // row, -(-stop // row)
    value = torch.empty((last - first, *shape[1:]), dtype=torch.float32, device="cpu")
    zeros = (0,) * len(shape)
    chunk = Chunk((first, *zeros[1:]), tuple(value.shape), zeros)
    read_into(contents.reader, {entry: Target(value, [chunk])})
    return value.reshape(-1)[start - first * row : stop - first * row]


# --- the layouts ------------------------------------------------------------------------------------------------------


def _write_deepspeed(staged: Path, contents: Contents, num_ranks: int) -> None:
    folder = staged / contents.name
    model = {
        "module": {name: read_whole(contents.reader, entry) for name, entry in contents.whole.items()},
        "buffer_names": list(contents.whole),
        "param_shapes": [contents.shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(contents.tied),
        "ds_version": f"smpkit {metadata.version('smpkit')}",
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
    }
    for rank in range(num_ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        # The model's files are the same on all ranks, but for frozen parameters, of which we have none.
        _write(folder / f"{name}_model_states.pt", model)
        _write_flat(
            folder / f"{name}_optim_states.pt",
            contents,
            (rank, num_ranks),
            lambda sharded: {"optimizer_state_dict": sharded},
        )
    _write_text(staged / "latest", contents.name)


def _write_smp_v1(staged: Path, contents: Contents, num_ranks: int) -> None:
    folder = staged / contents.name
    # Its readers know of no tied weights: the other names are whole tensors beside the buffers.
    beside = {**contents.whole, **{name: contents.divided[first] for name, first in contents.tied.items()}}
    module = {name: read_whole(contents.reader, entry) for name, entry in beside.items()}
    _write(folder / "model_0.pt", {"module": module})
    _write(folder / "user_content.pt", {"buffer_names": list(beside), "param_shapes": [contents.shapes]})
    for rank in range(num_ranks):
        _write_flat(folder / f"optimizer_{rank}.pt", contents, (rank, num_ranks), dict)
    _write_text(staged / files.NEWEST, contents.name)


LAYOUTS: Final[Mapping[str, Callable[[Path, Contents, int], None]]] = {
    "deepspeed": _write_deepspeed,
    "smp-v1": _write_smp_v1,
}


def _write_flat(
    path: Path, contents: Contents, place: tuple[int, int], nest: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Write the file of one rank with its parts of all parameters, one part in memory at a time.

    Args:
        place: the rank, and how many there are.
        nest: puts the sharded keys where the layout has them.
    """
    rank, num_ranks = place
    lengths = {name: -(-shape.numel() // num_ranks) for name, shape in contents.shapes.items()}
    with FakeTensorMode():
        flat = torch.empty(sum(lengths.values()), dtype=torch.float32, device="cpu")
    content = nest({"zero_stage": _ZERO_STAGE, "partition_count": num_ranks, "fp32_flat_groups": [flat]})
    (slot,) = (leaf for leaf in tree_leaves(reserve_file(path, content)) if isinstance(leaf, FileSlot))
    with contextlib.closing(SlotWriter()) as writer:
        start = 0
        for name, length in lengths.items():
            size = contents.shape(name).numel()
            part = torch.zeros(length, dtype=torch.float32, device="cpu")
            run = _read_run(contents, contents.divided[name], min(rank * length, size), min((rank + 1) * length, size))
            part[: run.numel()] = run
            writer.write(slot, [Chunk((start,), (length,), (0,))], part)
            start += length
        writer.finish()
    add_checksums(path)


def _write(path: Path, content: Any) -> None:
    files.fsync_write(path, lambda file: torch.save(content, file))


def _write_text(path: Path, text: str) -> None:
    files.fsync_write(path, lambda file: file.write(text.encode()))


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Export `CHECKPOINT TARGET LAYOUT RANKS` for `smpkit export`; print what was read, or the error, as JSON."""
    checkpoint, target, layout, num_ranks = arguments
    try:
        found = export(Path(checkpoint), Path(target), layout, int(num_ranks))
    except SmpkitError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "exit_code": error.exit_code}))  # noqa: T201
        return error.exit_code
    print(json.dumps({"checkpoint": os.fspath(found)}))  # noqa: T201  stdout is the answer
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
