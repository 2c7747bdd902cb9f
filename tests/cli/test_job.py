from __future__ import annotations

from pathlib import Path

import click
from click.testing import CliRunner

from smpkit.cli.options import job_arguments, read_job
from smpkit.config.load import Override


@click.command()
@job_arguments
def show(file: Path, overrides: list[Override]) -> None:
    job = read_job(file, overrides)
    click.echo(f"{job.config.name} {job.config.compute.instance_count}")


def test_a_command_reads_its_job_with_overrides_and_warnings(folder: Path) -> None:
    arguments = ["job.yaml", "--set", "compute.instance_count=4", "--set", "name=other"]
    result = CliRunner().invoke(show, [*arguments, "--set", "distribution.parameters={use_times: 1}"])
    assert result.exception is not None  # `parameters` beside `smdistributed`
    result = CliRunner().invoke(show, arguments)
    assert (result.stdout, result.stderr) == ("other 4\n", "")
    use_times = "distribution.smdistributed.modelparallel.parameters.use_times=1"
    result = CliRunner().invoke(show, [*arguments, "--set", use_times])
    assert result.stderr.startswith("warning: --set distribution.")
