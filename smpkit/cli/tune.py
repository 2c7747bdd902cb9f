"""`smpkit tune`: search for the configuration of a job whose step is shortest on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from smpkit.cli.options import COUNT, HOSTS, POSITIVE, RANKS, numbers, override_options
from smpkit.plan.optimizers import OPTIMIZERS


@click.command()
@click.argument("file", metavar="JOB", type=click.Path(path_type=Path))
@override_options
@click.option("--model", required=True, metavar="MODULE:FACTORY", help="What returns the model and a microbatch.")
@click.option("--machine", metavar="TYPE", help="Instance type with published facts. Default: what JOB says.")
@click.option("--calibration", type=click.Path(path_type=Path), help="What `smpkit calibrate` has written.")
@click.option("--hosts", type=HOSTS, help="Number of hosts. Default: what JOB says.")
@click.option("--ranks", type=RANKS, help="Number of all ranks. Default: all that the hosts have.")
@click.option("--batch", type=COUNT, help="Samples of a step, over all ranks. Default: those of JOB.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="Whose states count (adamw).")
@click.option("--memory-gib", type=POSITIVE, help="Memory of one rank's device.")
@click.option("--host-memory-gib", type=POSITIVE, help="Memory of a host.")
@click.option("--tflops", type=POSITIVE, help="What a device reaches in training, TFLOP/s.")
@click.option("--seconds", type=numbers(0, 10**6), default=12.0, help="How long to predict (12).")
@click.option("--top", type=COUNT, default=5, help="How many to show (5).")
@click.option("--write", is_flag=True, help="Change JOB to the best one; comments stay.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def tune(file: Path, **options: Any) -> None:
    """Search for the fastest configuration of a job.

    Degrees, microbatches, schedule, sharing of states, offloading, and what each layer keeps are searched under the
    memory of device and host, by the plans and simulators that run jobs. Nothing is started and no tensor is made.

    MODULE:FACTORY is as for `smpkit plan`, and returns the arguments of one microbatch, too. The samples of a step stay
    as they are.
    """
    from smpkit.cli._tune import run

    run(file, **options)
