"""`smpkit export`: write a checkpoint for the merge scripts of other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import click

from smpkit.cli import _console

__all__ = ["export"]


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["deepspeed", "smp-v1"]),
    required=True,
    help="deepspeed: ZeRO stage 3, for `zero_to_fp32.py`; smp-v1: sharded data parallelism, for AWS's merge script.",
)
@click.option("--ranks", "num_ranks", type=int, default=1, show_default=True, help="How many parts to divide it into.")
def export(checkpoint: Path, target: Path, layout: str, num_ranks: int) -> None:
    """Write a checkpoint in the sharded layout of another library.

    CHECKPOINT is a folder that `smp.save_checkpoint` wrote, such as `checkpoints/step_100_partial`, or the folder it is
    in: then the newest. TARGET is a new folder. It gets the weights in float32 (master weights where there are some)
    and the buffers, under the names that the model has in the job. States of the optimizer are left out. The
    checkpoint's checksums are compared before anything is written.
    """
    from smpkit.cli._with_torch import ask

    arguments = [str(checkpoint.absolute()), str(target.absolute()), layout, str(num_ranks)]
    what = f"`{checkpoint}` could not be exported"
    # A large checkpoint takes its time: whoever waits sees the folder grow, and can interrupt.
    said = json.loads(ask("smpkit.torch.checkpoints.export", arguments, what, "exporting", None))
    _console.current().note(f"exported {said['checkpoint']} to {target}")
