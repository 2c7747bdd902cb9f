"""`smpkit doctor`: check this machine, and for a job file the back end it needs; each line says what to do."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import click

import smpkit
from smpkit.cli import _console
from smpkit.cli.options import ACCESS, BackendChoice, backend_options, read_job, refuse
from smpkit.errors import UsageError
from smpkit.units import things
from smpkit.version import commit

_PACKAGES = ("click", "pydantic", "ruamel.yaml", "torch", "boto3")
_MARKS = {"ok": ("✓", "green"), "problem": ("✗", "red"), "info": ("–", "yellow")}


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--write", is_flag=True, help="Also put and delete a small object where results will go.")
@click.option("--report", is_flag=True, help="Only print versions of this machine, to paste into a report.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@backend_options
def doctor(file: Path | None, write: bool, report: bool, as_json: bool, chosen: BackendChoice) -> int:
    """Check this machine, the cloud or cluster, and everything the job file refers to.

    With the job file FILE of a managed job also its role, bucket, image and quota are looked at; on Slurm its
    partition, nodes, folders and container runtime; on Kubernetes its rights, queue and claims.

    The exit code is 1 if there is a problem: something that the job FILE cannot do without. Nothing is changed, unless
    `--write` is given.
    """
    from smpkit.cli._machine import check_machine, runs_here
    from smpkit_estimator.backend import Finding

    if report:
        refuse(("file", "write", *ACCESS), "beside `--report`, which is of this machine", "remove it")
        versions = _versions()
        if as_json:
            _console.print_json(versions)
        else:
            click.echo("\n".join(f"{name} {version}" for name, version in versions.items()))
        return 0
    if file is None:
        refuse(("write",), "without a job file", "name the one whose results go there")
    job = read_job(file, ()).config if file is not None else None
    findings = check_machine(job)
    if job is None or chosen.name is not None or not runs_here(job):
        try:
            findings += chosen.open(job).check(job, write=write)
        except UsageError as error:  # as where AWS_PROFILE names none
            if job is not None or chosen.asked or chosen.name is not None:
                raise
            findings.append(Finding("credentials", "info", error.message, error.hint))
    problems = sum(finding.state == "problem" for finding in findings)
    if as_json:
        _console.print_json(findings)
    else:
        for finding in findings:
            mark, color = _MARKS[finding.state]
            click.echo(f"{click.style(mark, fg=color)} {finding.text}")
            if finding.hint:
                click.echo(f"    {click.style('hint:', fg='cyan')} {finding.hint}")
        _console.note(things(problems, "problem") if problems else "no problems")
    return int(problems > 0)


def _versions() -> dict[str, str]:
    """Return the versions that a report of a bug needs, by name."""
    from smpkit.cli._machine import version_of

    source = commit()
    versions = {"smpkit": smpkit.__version__} | ({"commit": source} if source else {})
    versions["Python"] = f"{sys.version.split()[0]} on {platform.platform()}"
    return versions | {package: version_of(package) or "not installed" for package in _PACKAGES}
