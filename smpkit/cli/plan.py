"""`smpkit plan`: what a job would do, without a GPU and without starting it: ranks, schedule, partition, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from smpkit.cli.options import HOSTS, POSITIVE, RANKS, override_options, refuse
from smpkit.plan.optimizers import OPTIMIZERS

_OF_A_MODEL: Final = ("optimizer", "memory_gib", "tflops", "link_gbs")
_DEGREES: Final = ("pipeline_parallel_degree", "tensor_parallel_degree", "microbatches")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@override_options
@click.option("--pipeline-parallel-degree", "--pp", type=int, help="Without FILE: ranks that a model is cut over.")
@click.option("--tensor-parallel-degree", "--tp", type=int, help="Without FILE: ranks that layers are split over.")
@click.option("--microbatches", type=int, help="Without FILE: into how many parts a batch is cut.")
@click.option("--ranks", type=RANKS, help="Number of all ranks. Default: what FILE says, or one model.")
@click.option("--hosts", type=HOSTS, help="Number of hosts. Default: what FILE says, or 1.")
@click.option("--model", metavar="MODULE:FACTORY", help="What returns the model: also plan its parts and memory.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="Whose states count (adamw).")
@click.option("--memory-gib", type=POSITIVE, help="Memory of one rank's device: fail if the plan does not fit.")
@click.option("--tflops", type=POSITIVE, default=150.0, help="What a device reaches in training, TFLOP/s (150).")
@click.option("--link-gbs", type=POSITIVE, default=25.0, help="Its link with the host, GB/s each way (25).")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Also draw the schedule as an SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(file: Path | None, **options: Any) -> int:
    """Show what a job would do: ranks, schedule, parts, memory.

    FILE is a job, a distribution, or modelparallel parameters; without it the degrees are options. Nothing is started
    and no GPU is needed. The schedule is the one that training follows.

    MODULE:FACTORY is imported from the job's `source_dir`, or the current folder. It returns a torch.nn.Module, or a
    pair of it and the arguments for one microbatch; then compute, activations and the values that travel between stages
    are known too, without those of a loss that the script computes itself. Its tensors have no data, so a model that
    fits no machine can be planned.
    """
    if file is not None:
        refuse(_DEGREES, "beside a file", "change a setting of it with `--set`")
    if not options["model"]:
        hint = "name what returns the model with `--model MODULE:FACTORY`"
        refuse(_OF_A_MODEL, "without a model", hint)
    from smpkit.cli._plan import run

    degrees = {name: value for name in _DEGREES if (value := options.pop(name)) is not None}
    return run(file, degrees, **options)
