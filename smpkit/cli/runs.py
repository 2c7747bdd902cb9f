"""`smpkit runs`: what ran here, how it ended, and how fast; two or more side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from smpkit.cli import _console
from smpkit.cli._layout import table, width
from smpkit.cli._run_completion import complete_run

if TYPE_CHECKING:
    from smpkit.observe.runs import Run
    from smpkit.observe.summary import RunSummary

__all__ = ["runs"]

_END_WIDTH: Final = 24
_NOTHING: Final = "–"


@click.command()
@click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("-n", "--last", type=click.IntRange(1), default=20, help="At most so many, the newest (20).")
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as JSON.")
def runs(names: tuple[str, ...], last: int, as_json: bool) -> None:
    """List the runs below this folder, or show one, or compare several.

    Without RUN it lists what is in `runs` here and up to two folders below, the newest last. RUN is a run's name, its
    folder, or a job's name for the last one of it. With one RUN it prints the block that the run ended with; with more
    it compares them, and the settings in which they differ.
    """
    from smpkit.observe.runs import find_runs, open_run

    chosen = [open_run(name) for name in names] if names else list(find_runs(Path.cwd())[-last:])
    summaries = [_summary(run) for run in chosen]
    if as_json:
        click.echo(json.dumps([_plain(*pair) for pair in zip(chosen, summaries, strict=True)], indent=2))
    elif len(names) == 1:
        click.echo("\n".join(_one(chosen[0], summaries[0])))
    elif names:
        click.echo("\n".join(_compared(chosen, summaries)))
    elif chosen:
        click.echo("\n".join(_listed(chosen, summaries)))
    else:
        _console.current().note("no runs here; `smpkit run JOB_FILE` makes one, in `runs` beside the job file")


def _summary(run: Run) -> RunSummary | None:
    """Read a summary; a run that goes on, or one that was killed with its command, has none."""
    from smpkit.observe.summary import SummaryError, read_summary

    if not (run.path / "summary.json").is_file():
        return None
    try:
        return read_summary(run.path)
    except SummaryError as error:
        _console.current().warn(str(error))
        return None


def _plain(run: Run, summary: RunSummary | None) -> dict[str, Any]:
    found = {"run": run.label, "folder": str(run.path), "name": run.name, "started": run.started.isoformat()}
    return {**found, "values": _last_values(run), "summary": None if summary is None else asdict(summary)}


def _listed(chosen: Sequence[Run], summaries: Sequence[RunSummary | None]) -> Iterator[str]:
    rows = [["run", "ended", "steps", "loss", "steps/s", "memory"]]
    for run, summary in zip(chosen, summaries, strict=True):
        figures = _figures(run, summary)
        rows.append([run.label, *(figures[name] for name in ("ended", "steps", "loss", "steps/s", "memory"))])
    yield from table(rows, width())


def _figures(run: Run, summary: RunSummary | None) -> dict[str, str]:
    from smpkit.units import amount, count

    loss = _last_values(run).get("loss")
    found = {"loss": _NOTHING if loss is None else f"{loss:.4g}"}
    if summary is None:
        return {"ended": "running or lost", "steps": _NOTHING, **found, "steps/s": _NOTHING, "memory": _NOTHING}
    held = max((rank.device_peak or rank.peak.on_device for rank in summary.ranks), default=0)
    end = summary.exit_reason
    return {
        "ended": end if len(end) <= _END_WIDTH else end[: _END_WIDTH - 1] + "…",
        "steps": f"{summary.steps:,}",
        **found,
        "steps/s": _NOTHING if summary.steps_per_s is None else count(summary.steps_per_s),
        "memory": amount(held) if held else _NOTHING,
    }


def _one(run: Run, summary: RunSummary | None) -> Iterator[str]:
    from smpkit.observe.summary_text import block

    yield f"{run.label}: {'running, or lost' if summary is None else summary.exit_reason}"
    if summary is not None:
        yield from block(summary)
    values = _last_values(run)
    if values and (summary is None or not summary.values):
        yield f"values  {', '.join(f'{name} {value:.4g}' for name, value in values.items())}"


def _compared(chosen: Sequence[Run], summaries: Sequence[RunSummary | None]) -> Iterator[str]:
    """Yield a table with a column for each run: figures, then the settings that differ."""
    rows = [["", *(run.label for run in chosen)]]
    figures = [{**_figures(run, summary), **_more(summary)} for run, summary in zip(chosen, summaries, strict=True)]
    names = dict.fromkeys(name for each in figures for name in each)
    rows += [[name, *(each.get(name, _NOTHING) for each in figures)] for name in names]
    settings = [_settings(run) for run in chosen]
    for name in sorted({name for each in settings for name in each}):
        values = [each.get(name, _NOTHING) for each in settings]
        if len(set(values)) > 1:
            rows.append([name, *values])
    yield from table(rows, width())


def _more(summary: RunSummary | None) -> dict[str, str]:
    from smpkit.units import count, seconds

    if summary is None or not summary.ranks:
        return {}
    found = {}
    if summary.samples_per_s is not None:
        found["samples/s"] = count(summary.samples_per_s)
    if summary.tokens_per_s is not None:
        found["tokens/s"] = count(summary.tokens_per_s)
    slowest = max(summary.ranks, key=lambda rank: rank.split.compute).split
    found["step"] = seconds(slowest.total)
    for part in ("compute", "bubble", "communication", "stall", "optimizer"):
        share = getattr(slowest, part)
        if share:
            found[part] = seconds(share)
    return found


def _settings(run: Run) -> dict[str, str]:
    """Return the settings of a run's job by their paths."""
    import yaml

    path = run.path / "job.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return dict(_flat(content, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        # The last keys: the first ones are the same in all, and long.
        yield ".".join(path.split(".")[-2:]), str(value)


def _last_values(run: Run) -> dict[str, float]:
    """Return the last value of each name that the run logged."""
    from smpkit.observe.values import read_values

    return {name: value for logged in read_values(run.path) for name, value in logged.values.items()}
