"""`smpkit plan --compare` and `--sweep`: several plans in one table, the best one marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from smpkit.cli._console import table, width
from smpkit.cli._planned import GIB, Planned, World, describe_each, plan_of, world_of
from smpkit.config.words import printable
from smpkit.errors import ConfigError, UsageError

__all__ = ["Row", "compared", "plain", "report", "swept"]

_MOST: Final = 64
"""Combinations of a sweep: more are for `smpkit tune`."""


@dataclass(frozen=True)
class Row:
    """One of the plans."""

    name: str
    values: dict[str, Any]
    """What it differs in."""
    planned: Planned | None
    refusal: str = ""
    """Why there is none."""

    @property
    def seconds(self) -> float | None:
        """Of the simulated step, for each sample: with fewer replicas a step has fewer; None without a model."""
        from smpkit.plan.tune.features import step_of

        if self.planned is None:
            return None
        plan = self.planned.plan
        if plan.model is None or not plan.model.traced:
            return None
        samples = plan.model.samples * plan.mesh.rdp_size * plan.timeline.schedule.num_microbatches
        return step_of(plan) / samples if samples else None


def compared(files: Sequence[Path], overrides: Sequence[str], options: dict[str, Any]) -> list[Row]:
    """Plan each of the files; what is invalid is an error, as it is for one."""
    worlds = [world_of(file, overrides, options) for file in files]
    first, second = (world.parameters.values() for world in worlds)
    differing = [key for key in first if first[key] != second[key]]
    given = {key for world in worlds for key in world.parameters.given()}
    shown = [key for key in differing if key in given]
    named = [
        (str(file), {key: world.parameters.values()[key] for key in shown})
        for file, world in zip(files, worlds, strict=True)
    ]
    return _planned([(*pair, world) for pair, world in zip(named, worlds, strict=True)], options)


def swept(file: Path, sweeps: Sequence[str], overrides: Sequence[str], options: dict[str, Any]) -> list[Row]:
    """Plan the file with each combination of values; those that the schema refuses are rows with the reason."""
    axes = [_axis(sweep) for sweep in sweeps]
    combinations = list(itertools.product(*([(key, place, value) for value in values] for key, place, values in axes)))
    if len(combinations) > _MOST:
        raise UsageError(f"the sweep has {len(combinations)} plans, more than {_MOST}", hint="use `smpkit tune`")
    rows: list[tuple[str, dict[str, Any], World | str]] = []
    for combination in combinations:
        changes = [f"{place}={value}" for _, place, value in combination]
        name = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, _, value in combination)
        values = {key: value for key, _, value in combination}
        try:
            rows.append((name, values, world_of(file, [*overrides, *changes], options)))
        except ConfigError as error:
            rows.append((name, values, f"{error.problems[0].where} {error.problems[0].message}".strip()))
    return _planned(rows, options)


def _axis(sweep: str) -> tuple[str, str, list[str]]:
    """Read `KEY=V1,V2`: the key as given, the setting that it means, and the values."""
    from smpkit.config.modelparallel import ModelParallelConfig

    key, separator, text = sweep.partition("=")
    values = [value.strip() for value in text.split(",") if value.strip()]
    key = key.strip()
    if not separator or not key or not values:
        raise UsageError(f"`--sweep {printable(sweep)}` has no values", hint="write `--sweep microbatches=4,8,16`")
    is_parameter = key in ModelParallelConfig.keys()  # noqa: SIM118 - a class, not a mapping
    return key, f"-p {key}" if is_parameter else key, values


def _planned(rows: Sequence[tuple[str, dict[str, Any], World | str]], options: dict[str, Any]) -> list[Row]:
    worlds = [world for _, _, world in rows if isinstance(world, World)]
    models: list[Any] = [None] * len(worlds)
    if options["model"]:
        models = list(_described(worlds, options["model"]))
    remaining = iter(models)
    found = []
    for name, values, world in rows:
        if isinstance(world, str):
            found.append(Row(name, values, None, world))
            continue
        try:
            found.append(Row(name, values, plan_of(world, options, next(remaining))))
        except ConfigError as error:
            found.append(Row(name, values, None, error.problems[0].message))
    return found


def _described(worlds: Sequence[World], target: str) -> Iterator[Any]:
    """Yield the model of each world; those that cut, divide and cast it alike share a description.

    What can be described together is, by one process, since each imports the user's module and torch.
    """
    groups: dict[Any, dict[Any, World]] = {}
    keys = [_keys_of(world) for world in worlds]
    for world, (group, key) in zip(worlds, keys, strict=True):
        groups.setdefault(group, {}).setdefault(key, world)
    known = {}
    for group, members in groups.items():
        first, configs = next(iter(members.values())), [world.parameters for world in members.values()]
        found = describe_each(target, first.source, configs, first.ranks)
        known[group] = dict(zip(members, found, strict=True))
    for group, key in keys:
        yield known[group][key]


def _keys_of(world: World) -> tuple[Any, Any]:
    """Return what worlds have in common that one process can describe, and those that share a description."""
    cfg = world.parameters
    cut = (cfg.pipeline_parallel_degree, cfg.virtual_pipeline_degree)
    kinds = (cfg.bf16, cfg.fp16, cfg.prescaled_batch, cfg.optimize, cfg.tensor_parallel_degree)
    group = (world.source, world.ranks, () if cfg.auto_partition else cut)
    return group, (cut, cfg.memory_weight, kinds, cfg.sharded_data_parallel_degree > 1)


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table."""
    best = _best(rows)
    has_model = any(row.planned is not None and row.planned.plan.memory for row in rows)
    has_limit = any(row.planned is not None and row.planned.limit_gib is not None for row in rows)
    timed = any(row.seconds is not None for row in rows)
    head = ["", "pp×tp×dp", "microbatches", "schedule", "bubble", "live"]
    head += ["per sample"] * timed + ["fullest rank"] * has_model + ["fits"] * (has_limit and has_model)
    lines = [head]
    for row in rows:
        name = f"{row.name}{' (best)' if row is best else ''}"
        if row.planned is None:
            lines.append([name, *[""] * (len(head) - 1)])
            continue
        made, mesh = row.planned, row.planned.plan.mesh
        timeline = made.plan.timeline
        cells = [f"{mesh.pp_size}×{mesh.tp_size}×{mesh.rdp_size}", str(timeline.schedule.num_microbatches)]
        cells += [timeline.schedule.name, f"{timeline.bubble:.1%}", str(max(timeline.peak_live_microbatches))]
        if timed:
            cells.append("" if row.seconds is None else f"{1e3 * row.seconds:.3g} ms")
        if has_model:
            cells.append(f"{_peak(made) / GIB:.2f} GiB")
        if has_limit and has_model:
            cells.append("yes" if _fits(made) else "no")
        lines.append([name, *cells])
    yield from table(lines, width())
    for row in rows:
        if row.planned is None:
            yield f"{row.name}: refused: {row.refusal}"
    differing = {key: [row.values.get(key) for row in rows] for key in rows[0].values} if len(rows) == 2 else {}
    for key, (one, other) in differing.items():
        yield f"{key}: {_word(one)} → {_word(other)}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _peak(made: Planned) -> int:
    return max((memory.total_bytes for memory in made.plan.memory), default=0)


def _fits(made: Planned) -> bool:
    return all(made.fits(stage) for stage in range(len(made.plan.memory)))


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest that fits; without a model the one with the smallest bubble, of several the shallowest."""
    able = [row for row in rows if row.planned is not None and _fits(row.planned)]

    def order(row: Row) -> tuple[float, float, int]:
        assert row.planned is not None
        timeline = row.planned.plan.timeline
        return row.seconds or 0.0, timeline.bubble, max(timeline.peak_live_microbatches)

    return min(able, key=order) if len(able) > 1 else None


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the plans for programs, each as `smpkit plan --json` has it."""
    from smpkit.cli._plan_json import plain as one

    best = _best(rows)
    return [
        {
            "name": row.name,
            "values": row.values,
            "best": row is best,
            "seconds_per_sample": row.seconds,
            "refusal": row.refusal or None,
            "plan": None if row.planned is None else one(row.planned),
        }
        for row in rows
    ]
