"""`smpkit cost`: hours times your price, before a job and after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from smpkit.cli._backend import BackendChoice, backend_options
from smpkit.cli._job import looks_like_a_file, override_options, read_job
from smpkit.cli._show import HostsOfOneKind
from smpkit.cli._time import AMOUNT, PRICE
from smpkit.config.job import JobConfig
from smpkit.errors import UsageError

__all__ = ["cost"]


@click.command()
@click.argument("job")
@click.option(
    "--price",
    "prices",
    type=PRICE,
    multiple=True,
    metavar="[TYPE=]AMOUNT",
    help="Price of one instance or node for one hour; of each type, where there are several. Default: hours alone.",
)
@click.option("--currency", default="USD", show_default=True, help="Currency of the price.")
@click.option("--hours", type=AMOUNT, help="For a job file: expected hours. Default: its longest time.")
@override_options
@click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON.")
@backend_options
def cost(
    job: str,
    prices: tuple[tuple[str | None, float], ...],
    currency: str,
    hours: float | None,
    overrides: tuple[str, ...],
    as_json: bool,
    chosen: BackendChoice,
) -> None:
    """Estimate what a job costs, before or after it.

    JOB is a job file that is not sent yet, or the name of a managed job, which is counted by its billable time; on a
    cluster, the time for which it has its nodes.

    The price is yours to give: it depends on region, contract and, for spot, on the hour. Storage and traffic are not
    in it. Without a price, only the node-hours are told.
    """
    path = Path(job)
    estimate = _of_file(path, overrides, hours, chosen) if looks_like_a_file(job) else _of_job(job, chosen)
    machines = [
        {"instance_type": each.instance_type, "instances": each.instance_count, "price_per_hour": price}
        for each, price in _priced(estimate.pop("machines"), prices)
    ]
    per_hour = sum(each["instances"] * each["price_per_hour"] for each in machines) if prices else None
    alone = machines[0] if len(machines) == 1 else {}
    estimate |= {
        "instances": sum(each["instances"] for each in machines),
        "node_hours": sum(each["instances"] for each in machines) * estimate["hours"],
        "instance_type": alone.get("instance_type"),
        "price_per_hour": alone.get("price_per_hour"),
        "machines": machines,
        "currency": currency,
        "estimate": None if per_hour is None else round(per_hour * estimate["hours"], 2),
    }
    if as_json:
        click.echo(json.dumps(estimate, indent=2))
        return
    amount = f"{estimate['node_hours']:,.2f} node-hours"
    if per_hour is not None:
        amount = f"{estimate['estimate']:,.2f} {currency}"
    parts = (_part(each, estimate["hours"], currency) for each in machines)
    click.echo(f"{amount} (estimate, {estimate['basis']}): {' + '.join(parts)}")


def _part(machines: Mapping[str, Any], hours: float, currency: str) -> str:
    price = "" if machines["price_per_hour"] is None else f" × {machines['price_per_hour']:g} {currency}"
    return f"{machines['instances']} × {machines['instance_type']} × {hours:,.2f} h{price}"


_Machines = TypeVar("_Machines", bound=HostsOfOneKind)


def _priced(
    machines: Sequence[_Machines], prices: Iterable[tuple[str | None, float]]
) -> Iterator[tuple[_Machines, float | None]]:
    """Yield the hosts of each kind with their price; None if no price is given at all."""
    kinds = list(dict.fromkeys(each.instance_type for each in machines))
    given: dict[str, float] = {}
    for kind, price in prices:
        if kind is None and len(kinds) > 1:
            hint = " ".join(f"--price {each}=..." for each in kinds)
            raise UsageError(f"one price is given for machines of {len(kinds)} types", hint=f"`{hint}`")
        name = kinds[0] if kind is None else kind
        if name not in kinds:
            raise UsageError(f"the job has no machine of type `{name}`", hint=f"it has {', '.join(kinds)}")
        if name in given:
            raise UsageError(f"two prices are given for `{name}`", hint="give one for each instance type")
        given[name] = price
    missing = [kind for kind in kinds if kind not in given]
    if given and missing:
        raise UsageError(f"no price is given for `{missing[0]}`", hint=f"add `--price {missing[0]}=...`")
    yield from ((each, given.get(each.instance_type)) for each in machines)


def _of_file(path: Path, overrides: tuple[str, ...], hours: float | None, chosen: BackendChoice) -> dict[str, Any]:
    job = read_job(path, overrides).config
    backend, compute = chosen.name or job.backend.chosen or "sagemaker", job.compute
    machines: Sequence[HostsOfOneKind] = compute.machines
    seconds = compute.max_run_seconds
    if backend in _KINDS:
        slurm = job.backend.slurm
        machines = [_Hosts(_KINDS[backend](job), compute.num_hosts)]
        if backend == "slurm" and slurm.seconds is not None:
            seconds = slurm.seconds
    return {
        "basis": "at most" if hours is None else "as expected",
        "machines": machines,
        "hours": seconds / 3600 if hours is None else hours,
    }


@dataclass(frozen=True)
class _Hosts:
    instance_type: str
    instance_count: int


_KINDS: Mapping[str, Callable[[JobConfig], str]] = {
    "slurm": lambda job: job.backend.slurm.partition or "slurm",
    "kubernetes": lambda _: "pod",
    "batch": lambda job: job.backend.batch.instance_type or "batch",
}
"""What hosts are called where they are no instances of SageMaker; as `smpkit status` has it."""


def _of_job(name: str, chosen: BackendChoice) -> dict[str, Any]:
    from smpkit_estimator.job import Job

    status = Job(name, chosen.open()).status()
    return {
        "basis": "billable time" if status.over else "so far",
        "machines": status.machines,
        "hours": status.billable_so_far / 3600,
    }
