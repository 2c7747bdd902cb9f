"""`smpkit plan`: what a job would do, without a GPU and without starting it: ranks, schedule, partition, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from smpkit.cli import _console, _plan_offload_model
from smpkit.cli._console import write_file
from smpkit.cli.options import override_options
from smpkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smpkit.plan.svg import Bars, Drawing

__all__ = ["plan"]

_OPTIMIZERS: Final = ("sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw")
"""Those of smpkit.plan.memory, again, so that `--help` imports nothing; a test keeps them equal."""


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@override_options
@click.option("--pipeline-parallel-degree", "--pp", type=int, help="Without FILE: ranks that a model is cut over.")
@click.option("--tensor-parallel-degree", "--tp", type=int, help="Without FILE: ranks that layers are split over.")
@click.option("--microbatches", type=int, help="Without FILE: into how many parts a batch is cut.")
@click.option("--ranks", type=int, help="Number of all ranks. Default: what FILE says, or one model.")
@click.option("--hosts", type=int, help="Number of hosts. Default: what FILE says, or 1.")
@click.option("--model", metavar="MODULE:FACTORY", help="What returns the model: also plan its parts and memory.")
@click.option("--optimizer", type=click.Choice(_OPTIMIZERS), default="adamw", help="Whose states to count (adamw).")
@click.option("--memory-gib", type=float, help="Memory of one rank's device: say whether the model fits.")
@click.option("--tflops", type=float, default=150.0, help="What a device reaches in training, TFLOP/s (150).")
@click.option("--link-gbs", type=float, default=25.0, help="Its link with the host, GB/s each way (25).")
@click.option("--compare", nargs=2, type=click.Path(path_type=Path), metavar="A B", help="Plan two files side by side.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=V1,V2,...", help="Plan FILE with each of these values.")
@_plan_offload_model.options
@click.option("--svg", "picture", metavar="FILE", type=click.Path(path_type=Path), help="Also draw it as an SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    picture: Path | None,
    compare: tuple[Path, Path] | None,
    sweeps: tuple[str, ...],
    **options: Any,
) -> None:
    """Show what a job would do: ranks, schedule, parts, memory.

    FILE is a job, a distribution, or modelparallel parameters; without it the degrees are options. Nothing is started
    and no GPU is needed. The schedule is the one that training follows.

    MODULE:FACTORY is imported from the job's `source_dir`, or the current folder. It returns a torch.nn.Module, or a
    pair of it and the arguments for one microbatch; then compute, activations and the values that travel between stages
    are known too. Its tensors have no data, so a model that fits no machine can be planned.

    KEY of `--sweep` is a parameter such as `microbatches`, or the place of any setting; several are combined.
    """
    drawings: Iterator[Drawing | Bars]
    if options["offload_model"]:
        drawings = _offload_model(file, options, as_json=as_json)
    elif compare or sweeps:
        drawings = _several(file, overrides, options, compare, sweeps, as_json=as_json)
    else:
        drawings = _one(file, overrides, options, as_json=as_json)
    if picture is not None:
        from smpkit.plan.svg import svg

        write_file(picture, svg(list(drawings)), "picture")
        _console.current().note(f"picture: {picture}")


def _one(
    file: Path | None, overrides: tuple[str, ...], options: dict[str, Any], *, as_json: bool
) -> Iterator[Drawing | Bars]:
    from smpkit.cli._plan_json import plain
    from smpkit.cli._plan_picture import of_plan
    from smpkit.cli._plan_text import advise, report
    from smpkit.cli._planned import plan_of, world_of

    made = plan_of(world_of(file, overrides, options), options)
    if as_json:
        click.echo(json.dumps(plain(made), indent=2))
    else:
        click.echo("\n".join(report(made)))
        advise(made)
    return of_plan(made)


def _offload_model(file: Path | None, options: dict[str, Any], *, as_json: bool) -> Iterator[Bars]:
    from smpkit.cli._planned import describe, speed_of

    if file is not None:
        raise UsageError("`--offload-model` plans one device, not a job", hint="leave the file out")
    speed_of(options)
    target = options["model"]

    def count() -> int:
        return sum(tensor.num_elements for tensor in describe(target, Path()).tensors.values())

    return _plan_offload_model.run(options, count if target else None, as_json=as_json)


def _several(
    file: Path | None,
    overrides: tuple[str, ...],
    options: dict[str, Any],
    compare: tuple[Path, Path] | None,
    sweeps: tuple[str, ...],
    *,
    as_json: bool,
) -> Iterator[Drawing | Bars]:
    from smpkit.cli._plan_picture import of_plans
    from smpkit.cli._plan_several import compared, plain, report, swept

    if compare and (file is not None or sweeps):
        raise UsageError("`--compare` names both of its files", hint="leave FILE and `--sweep` out")
    if compare:
        found = compared(compare, overrides, options)
    elif file is None:
        raise UsageError("`--sweep` changes settings of a file, and none is given", hint="name a job file")
    else:
        found = swept(file, sweeps, overrides, options)
    click.echo(json.dumps(plain(found), indent=2) if as_json else "\n".join(report(found)))
    return of_plans([(row.name, row.planned) for row in found if row.planned is not None])
