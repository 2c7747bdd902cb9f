"""`smpkit export`: write the weights of a checkpoint for other programs."""

from __future__ import annotations

import glob
import json
import shutil
from pathlib import Path

import click

from smpkit.cli import _console


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["smp-v1", "hub"]),
    default="smp-v1",
    show_default=True,
    help="smp-v1: sharded data parallelism, for AWS's merge script; hub: one safetensors file.",
)
def export(checkpoint: Path, target: Path, layout: str) -> None:
    """Write the weights of a checkpoint for other programs.

    CHECKPOINT is a folder that `smp.save_checkpoint` wrote, such as `checkpoints/step_100_partial`, or the folder it is
    in: then the newest. TARGET is a new folder. It gets the weights (master weights where there are some) and the
    buffers, under the names that the model has in the job. States of the optimizer are left out. The checkpoint's
    checksums are compared.
    """
    from smpkit.cli._with_torch import ask

    arguments = [str(checkpoint.absolute()), str(target.absolute()), layout]
    what = f"`{checkpoint}` could not be exported"
    try:
        # A large checkpoint takes its time: whoever waits sees the folder grow, and can interrupt.
        answer = json.loads(ask("smpkit.torch.checkpoints.export", arguments, what, "exporting", None))
    except BaseException:  # a process that was killed, as for want of memory, leaves what it had written
        for half in target.absolute().parent.glob(f".{glob.escape(target.name)}.*.export"):
            shutil.rmtree(half, ignore_errors=True)
        raise
    _console.note(f"exported {answer['checkpoint']} to {target}")
