"""`smpkit tune`: search for the configuration of a job whose step is shortest on a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from smpkit.cli import _console
from smpkit.cli.options import override_options
from smpkit.cli.plan import _OPTIMIZERS
from smpkit.errors import SmpkitError

if TYPE_CHECKING:
    from smpkit.plan.tune.predict import Prediction

__all__ = ["tune"]

_PRECISIONS: Final = ("bf16", "fp16", "fp32")


@click.command()
@click.argument("file", metavar="JOB", type=click.Path(path_type=Path))
@override_options
@click.option("--model", required=True, metavar="MODULE:FACTORY", help="What returns the model and a microbatch.")
@click.option("--machine", metavar="TYPE", help="Instance type with published facts. Default: what JOB says.")
@click.option("--calibration", type=click.Path(path_type=Path), help="What `smpkit calibrate` has written.")
@click.option("--hosts", type=click.IntRange(1), help="Number of hosts. Default: what JOB says.")
@click.option("--ranks", type=click.IntRange(1), help="Number of all ranks. Default: all that the hosts have.")
@click.option("--batch", type=click.IntRange(1), help="Samples of a step, over all ranks. Default: those of JOB.")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(_PRECISIONS), help="Search these, too.")
@click.option("--optimizer", type=click.Choice(_OPTIMIZERS), default="adamw", help="Whose states to count (adamw).")
@click.option("--memory-gib", type=click.FloatRange(0, min_open=True), help="Memory of one rank's device.")
@click.option("--host-memory-gib", type=click.FloatRange(0, min_open=True), help="Memory of a host.")
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="What a device reaches in training, TFLOP/s.")
@click.option("--seconds", type=click.FloatRange(0), default=12.0, help="How long to predict (12).")
@click.option("--top", type=click.IntRange(1), default=5, help="How many to show (5).")
@click.option("--write", is_flag=True, help="Change JOB to the best one; comments stay.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def tune(file: Path, overrides: tuple[str, ...], write: bool, as_json: bool, **options: Any) -> None:
    """Search for the fastest configuration of a job.

    Degrees, microbatches, schedule, sharing of states, offloading, and what each layer keeps are searched under the
    memory of device and host, by the plans and simulators that run jobs. Nothing is started and no tensor is made.

    MODULE:FACTORY is as for `smpkit plan`, and returns the arguments of one microbatch, too. The samples of a step stay
    as they are.
    """
    from smpkit.cli._tune_text import plain, report
    from smpkit.cli._tuned import find

    tuned = find(file, overrides, options)
    if as_json:
        click.echo(json.dumps(plain(tuned, options["top"]), indent=2))
    else:
        click.echo("\n".join(report(tuned, options["top"])))
    if not tuned.found.best:
        nearest, config = tuned.found.nearest, tuned.found.nearest_config
        reason = ""
        if nearest is not None and config is not None:
            degrees = f"pipeline {config.pipeline_parallel_degree} × tensor {config.tensor_parallel_degree}"
            lacks = f"lacks {nearest.missing_bytes / 2**30:.2f} GiB: {nearest.reason}"
            reason = f"; the nearest, {degrees} with {config.microbatches} microbatches, {lacks}"
        raise SmpkitError(f"no configuration fits{reason}", hint=_remedy(tuned.found.nearest is not None))
    if write:
        _write(file, tuned.found.best[0], tuned.given)
    elif not as_json:
        _console.current().hint(f"`--write` changes {file} to the first one; its comments stay")


def _remedy(lacks_memory: bool) -> str:
    if lacks_memory:
        return "use more `--hosts`, smaller microbatches in the factory, or devices with more memory"
    return "`--batch` must be divisible by the replicas and microbatches"


def _write(file: Path, best: Prediction, given: dict[str, Any]) -> None:
    """Change the file in place, at once or not at all."""
    from smpkit.config.load import edited, file_of_parameters, load

    place, path = file_of_parameters(file)
    values = best.config.given()
    changed = {key: value for key, value in values.items() if given.get(key) != value or key not in given}
    gone = frozenset(key for key in given if key not in values)
    if "pipeline_parallel_degree" in changed:
        gone |= {"partitions"}  # its older name, by which the file may have it
    text = edited(place.read_text(encoding="utf-8"), str(place), path, changed, gone)
    new = place.with_name(f".{place.name}.tune{place.suffix}")
    try:
        new.write_text(text, encoding="utf-8")
        load(new)  # what is written can be read
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)
    shown = gone & given.keys()
    words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items()) or "nothing"
    _console.current().note(f"Changed {place}: {words}{'; removed ' + ', '.join(sorted(shown)) if shown else ''}")
