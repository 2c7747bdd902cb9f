"""`smpkit stop`: ask a managed job to end, with time to save."""

from __future__ import annotations

import click

from smpkit.cli import _console
from smpkit.cli.options import BackendChoice, backend_options
from smpkit.cli.status import newest_checkpoint


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait until it is over, and say what it saved.")
@backend_options
def stop(job: str, wait: bool, chosen: BackendChoice) -> None:
    """Stop a job, with time to save.

    Its ranks get SIGTERM, and have about 110 seconds, or what the job file's `backend` says.
    """
    from smpkit_estimator.job import Job

    handle = Job(job, chosen.open())
    before = handle.status()
    if before.over:
        _console.note(f"`{job}` is over already: {before.status}")
        return
    handle.stop(wait=wait)
    if not wait:
        _console.note(f"Asked `{job}` to stop; `smpkit status {job}` shows when it has")
        return
    _console.note(f"Stopped `{job}`")
    if before.checkpoints is not None:
        none = "no checkpoint was saved"
        newest = newest_checkpoint(handle, before="newest checkpoint: ", none=none)
        _console.note(newest)
        where = "starts from the beginning" if newest == none else "goes on from there"
        _console.hint(f"`smpkit resume {job}` {where}")
