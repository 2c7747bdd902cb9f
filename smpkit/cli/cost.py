"""`smpkit cost`: hours times your price, before a job and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from smpkit.cli._cloud import CloudChoice, cloud_options
from smpkit.cli._job import looks_like_a_file, read_job
from smpkit.cli._time import AMOUNT

__all__ = ["cost"]


@click.command()
@click.argument("job")
@click.option("--price", type=AMOUNT, required=True, help="Price of one instance for one hour.")
@click.option("--currency", default="USD", show_default=True, help="Currency of the price.")
@click.option("--hours", type=AMOUNT, help="For a job file: expected hours. Default: its longest time.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting, as of `validate`.")
@click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON.")
@cloud_options
def cost(
    job: str,
    price: float,
    currency: str,
    hours: float | None,
    overrides: tuple[str, ...],
    as_json: bool,
    cloud: CloudChoice,
) -> None:
    """Estimate what a job costs, before or after it.

    JOB is a job file that is not sent yet, or the name of a managed job, which is counted by its billable time.

    The price is yours to give: it depends on region, contract and, for spot, on the hour. Storage and traffic are not
    in it.
    """
    path = Path(job)
    estimate = _of_file(path, overrides, hours) if looks_like_a_file(job) else _of_job(job, cloud)
    estimate |= {"price_per_hour": price, "currency": currency}
    estimate["estimate"] = round(estimate["instances"] * estimate["hours"] * price, 2)
    if as_json:
        click.echo(json.dumps(estimate, indent=2))
        return
    amount = f"{estimate['estimate']:,.2f} {currency}"
    sum_of = (
        f"{estimate['instances']} × {estimate['instance_type']} × {estimate['hours']:,.2f} h × {price:g} {currency}"
    )
    click.echo(f"{amount} (estimate, {estimate['basis']}): {sum_of}")


def _of_file(path: Path, overrides: tuple[str, ...], hours: float | None) -> dict[str, Any]:
    compute = read_job(path, overrides).config.compute
    return {
        "basis": "at most" if hours is None else "as expected",
        "instances": compute.instance_count,
        "instance_type": compute.instance_type,
        "hours": compute.max_run_seconds / 3600 if hours is None else hours,
    }


def _of_job(name: str, cloud: CloudChoice) -> dict[str, Any]:
    from smpkit_estimator.job import Job

    status = Job(name, cloud.open()).status()
    return {
        "basis": "billable time" if status.over else "so far",
        "instances": status.instance_count,
        "instance_type": status.instance_type,
        "hours": status.billable_so_far / 3600,
    }
