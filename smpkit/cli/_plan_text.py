"""`smpkit plan` in words, pictures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from smpkit.cli import _console, _plan_offload, _plan_values
from smpkit.cli._console import fold, table, width
from smpkit.cli._planned import GIB, Planned

__all__ = ["advise", "report"]

_MIB: Final = 1024**2
_MAX_GROUPS: Final = 8
_INDENT: Final = " " * len("schedule  ")


def report(made: Planned) -> Iterator[str]:
    world, mesh = made.world, made.plan.mesh
    hosts = f"{world.hosts} host{'s' * (world.hosts != 1)}"
    ranks = f"{world.ranks} rank{'s' * (world.ranks != 1)}"
    yield f"{f'{world.name}: ' if world.name else ''}{ranks} on {hosts}"
    yield ""
    yield f"mesh      pipeline {mesh.pp_size} × tensor {mesh.tp_size} × data {mesh.rdp_size}, {mesh.strategy}"
    yield from _indented(mesh.draw(width() - len(_INDENT)))
    yield ""
    yield from _groups(made)
    yield ""
    yield from _picture(made)
    if made.plan.model is not None:
        yield ""
        yield from _partition(made)
        yield ""
        if made.plan.recorded is not None:
            yield from _plan_values.report(made.plan.recorded)
            yield ""
        yield from _memory(made)
    if made.plan.forecasts and made.speed is not None:
        yield ""
        yield from _plan_offload.report(made.plan.forecasts, made.world.parameters, made.speed)
    if made.features:
        yield ""
        yield from _features(made)
    if made.automatic is not None:
        from smpkit.cli._tune_text import layer_lines

        yield ""
        yield from fold('strategy="auto" would ', layer_lines(made.automatic), width(), "; ")


def _features(made: Planned) -> Iterator[str]:
    """Yield what each feature saves and costs here, by the simulated schedule; those that are on have a mark."""
    rows = [["features", "saves of the fullest rank", "on the host", "time per sample"]]
    for each in made.features:
        host = f"+{_bytes(each.host_bytes)}" if each.host_bytes else ""
        mark = " (on)" if each.is_on else ""
        rows.append([f"{each.setting}{mark}", _bytes(each.saved_bytes), host, f"{each.cost:+.1%}"])
    yield from table(rows, width())


def _bytes(num_bytes: int) -> str:
    sign, size = "-" if num_bytes < 0 else "", abs(num_bytes)
    return f"{sign}{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{sign}{size / _MIB:.1f} MiB"


def _indented(text: str) -> Iterator[str]:
    yield from (f"{_INDENT}{line}".rstrip() for line in text.splitlines())


def _groups(made: Planned) -> Iterator[str]:
    from smpkit.plan.mesh import CommGroup

    per_host = made.world.per_host
    hosts = [range(host * per_host, (host + 1) * per_host) for host in range(made.world.hosts)]
    yield from fold("hosts     ", _listed([tuple(ranks) for ranks in hosts]), width())
    for name, kind in (("mp", CommGroup.MP_GROUP), ("dp", CommGroup.DP_GROUP), ("tp", CommGroup.TP_GROUP)):
        yield from fold(f"{name} groups ", _listed(made.plan.mesh.groups(kind)), width())


def _listed(groups: Sequence[Sequence[int]]) -> list[str]:
    shown = [_span(group) for group in groups[:_MAX_GROUPS]]
    more = [f"and {len(groups) - _MAX_GROUPS} more"] if len(groups) > _MAX_GROUPS else []
    return shown + more


def _span(ranks: Sequence[int]) -> str:
    """Write ranks as `0–3` or, with equal steps, `0,2–6`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"{ranks[0]},{ranks[1]}–{ranks[-1]}"
    return ",".join(map(str, ranks))


def _picture(made: Planned) -> Iterator[str]:
    from smpkit.plan.schedule.draw import draw

    cfg, schedule = made.world.parameters, made.plan.timeline.schedule
    count = f"{schedule.num_microbatches} microbatches, at most {cfg.active_microbatches} active"
    yield f"schedule  {schedule.name}, {count}, predicted bubble {made.plan.timeline.bubble:.1%}"
    yield from draw(schedule, width=width()).splitlines()
    live = [*map(str, made.plan.timeline.peak_live_microbatches), " (microbatches that each stage holds at its peak)"]
    yield from fold("live      ", live, width())


def _partition(made: Planned) -> Iterator[str]:
    model, assignment = made.plan.model, made.plan.assignment
    assert assignment is not None
    assert model is not None
    how = "by traced compute and memory" if model.traced else "by parameter sizes (as with skip_tracing)"
    yield f"parts     of {model.name}, {how}; the busiest has {assignment.compute_imbalance:.2f} × the mean"
    for stage, memory in enumerate(made.plan.memory):
        names = assignment.names(stage)
        count = _count(memory.num_parameters)
        head = f"stage {stage}   {count:>8} parameters in {len(names)} units: "
        yield from fold(head, _shortened(names), width(), " ")
    shared = sorted({name for unit in model.units for name in unit.cost.shared})
    if shared:
        yield from fold("shared    ", _shortened(shared), width(), " ")


def _shortened(names: Sequence[str]) -> list[str]:
    """Return the first names and the last, each but the last with its comma."""
    from smpkit.config.words import printable

    shown = [printable(name) for name in names]
    chosen = shown if len(shown) <= 4 else [shown[0], shown[1], f"… {shown[-1]}"]
    return [*(f"{name}," for name in chosen[:-1]), *chosen[-1:]]


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _memory(made: Planned) -> Iterator[str]:
    unit, size = ("GiB", GIB) if max(memory.total_bytes for memory in made.plan.memory) >= GIB else ("MiB", _MIB)
    gathers = any(memory.gathered_bytes for memory in made.plan.memory)
    masters = any(memory.masters_bytes for memory in made.plan.memory)
    head = [
        unit,
        "parameters",
        *["gathered"] * gathers,
        "gradients",
        "reduction",
        *["masters"] * masters,
        made.optimizer,
        "activations",
        "total",
    ]
    rows = [head if made.limit_gib is None else [*head, f"of {made.limit_gib:g} GiB"]]
    for stage, memory in enumerate(made.plan.memory):
        known = [memory.parameters_bytes, memory.gradients_bytes, memory.reduction_bytes, memory.optimizer_bytes]
        known[3:3] = [memory.masters_bytes] * masters
        known[1:1] = [memory.gathered_bytes] * gathers
        cells = [f"{num_bytes / size:.1f}" for num_bytes in known]
        cells.append("unknown" if memory.activations_bytes is None else f"{memory.activations_bytes / size:.1f}")
        cells.append(f"{memory.total_bytes / size:.1f}")
        if made.limit_gib is not None:
            cells.append("fits" if made.fits(stage) else "does not fit")
        rows.append([f"stage {stage}", *cells])
    yield from table(rows, width())
    dtypes = sorted({dtype for memory in made.plan.memory for dtype in memory.dtypes})
    peak = "at the peak of live microbatches"
    if any(memory.step_bytes > memory.gathered_bytes + (memory.activations_bytes or 0) for memory in made.plan.memory):
        peak = "in optimizer.step(), where the masters have gradients, instead of activations"
    yield f"(parameters and buffers in {', '.join(dtypes)}; {peak})"


def _remedy(made: Planned) -> str:
    """Return the one change by which the model fits, or what saves most."""
    from smpkit.plan.tune.features import remedy

    assert made.limit_gib is not None
    one = remedy(list(made.features), made.limit_gib * GIB)
    if one is not None:
        peak = f"{_bytes(one.peak_bytes)} on the fullest rank"
        return f"`{one.setting}` makes it fit: {peak}, and a sample takes {one.cost:+.1%}"
    useful = [each for each in made.features if not each.is_on and each.saved_bytes > 0]
    if not useful:
        return "raise `pipeline_parallel_degree`, or lower `active_microbatches`"
    most = useful[0]
    return f"no single change makes it fit; `{most.setting}` saves most, and `smpkit tune` searches for several"


def advise(made: Planned) -> None:
    console = _console.current()
    too_big = [str(stage) for stage in range(len(made.plan.memory)) if not made.fits(stage)]
    if too_big:
        console.warn(f"does not fit {made.limit_gib:g} GiB: stage {', '.join(too_big)}")
        console.hint(_remedy(made))
    if made.plan.model is not None and made.world.parameters.offload_activations:
        _plan_offload.advise(made.plan.forecasts, made.world.parameters, made.plan.model)
    for note in () if made.plan.model is None else made.plan.model.notes:
        console.note(f"note: {note.strip()}")
    if made.plan.model is not None and not made.plan.model.samples:
        console.note("note: for compute and activations, let the factory return (model, arguments of one microbatch)")
