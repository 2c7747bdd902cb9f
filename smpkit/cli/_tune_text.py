"""`smpkit tune` in words and tables, and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli._console import fold, table, width
from smpkit.config.words import printable

if TYPE_CHECKING:
    from smpkit.cli._tuned import Tuned
    from smpkit.plan.tune.chain import Choice
    from smpkit.plan.tune.predict import Prediction

__all__ = ["plain", "report"]

_GIB: Final = 2**30
_MOST_REASONS: Final = 6
_KINDS: Final = (
    ("parameters", "parameters_bytes"),
    ("gathered", "gathered_bytes"),
    ("gradients", "gradients_bytes"),
    ("reduction", "reduction_bytes"),
    ("masters", "masters_bytes"),
    ("states", "optimizer_bytes"),
    ("activations", "activations_bytes"),
    ("host", "host_bytes"),
)


def report(tuned: Tuned, top: int) -> Iterator[str]:
    """Yield what was found, the most important last but one: settings after the tables."""
    job, found = tuned.job, tuned.found
    name = f"{tuned.name}: " if tuned.name else ""
    hosts = f"{job.hosts} host{'s' * (job.hosts != 1)}"
    model = next(iter(job.models.values()))
    yield f"{name}{job.ranks} rank{'s' * (job.ranks != 1)} on {hosts} of {job.machine.name}"
    yield from fold("facts     ", [job.machine.source], width())
    yield f"model     {model.name}, {job.samples} samples ({job.tokens} tokens) in a step"
    searched = f"{found.num_predicted} of {found.num_candidates} configurations predicted in {found.seconds:.1f} s"
    left = f"one of the others could be {found.unseen_gap:.0%} faster at most" if found.unseen_gap else ""
    yield from fold("search    ", [f"{searched}{';' * bool(left)}", *([left] if left else [])], width(), " ")
    if found.best:
        yield ""
        yield from _ranking(tuned, found.best[:top])
        yield ""
        yield from _details(tuned, found.best[0])
    if found.ruled_out:
        yield ""
        yield from _ruled_out(found.ruled_out)
    for note in tuned.notes:
        yield f"note      {printable(note)}"


def _ranking(tuned: Tuned, best: Sequence[Prediction]) -> Iterator[str]:
    from smpkit.plan.tune.predict import Prediction

    head = ["", "pp×tp×dp", "shared", "microbatches", "schedule", "layers", "step", "tokens/s"]
    head += ["bubble", "communication", "stall", "GiB", "binds"]
    rows = [head]
    rows += [[str(number), *_cells(each)] for number, each in enumerate(best, 1)]
    present = tuned.found.present
    if isinstance(present, Prediction):
        rows.append(["as it is", *_cells(present)])
    yield from table(rows, width())
    if present is not None and not isinstance(present, Prediction):
        yield f"as it is, the job has no step: {present.reason}"


def _cells(each: Prediction) -> list[str]:
    config, mesh = each.config, each.plan.mesh
    step = each.step_seconds
    _, memory = each.fullest
    shared = "states" if config.shard_optimizer_state else "–"
    if config.sharded_data_parallel_degree > 1:
        shared = f"all/{config.sharded_data_parallel_degree}"
    return [
        f"{mesh.pp_size}×{mesh.tp_size}×{mesh.rdp_size}",
        shared,
        f"{config.microbatches} of {each.samples_per_microbatch}",
        _schedule(each),
        _counted(each.choices),
        _seconds(step),
        f"{each.tokens_per_second:,.0f}",
        *(f"{seconds / step:.0%}" for name, seconds in each.parts if name in ("bubble", "communication", "stall")),
        f"{memory.total_bytes / _GIB:.1f}",
        each.binds,
    ]


def _schedule(each: Prediction) -> str:
    config = each.config
    if config.pipeline_parallel_degree == 1:
        return "–"
    chunks = f" ×{config.virtual_pipeline_degree}" if config.virtual_pipeline_degree > 1 else ""
    return f"{config.pipeline}{chunks}"


def _counted(choices: Mapping[str, Choice]) -> str:
    counts = {str(choice): list(choices.values()).count(choice) for choice in choices.values()}
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "–"


def _details(tuned: Tuned, best: Prediction) -> Iterator[str]:
    """Yield what the first one takes, holds and sets."""
    from smpkit.plan.tune.predict import usable_bytes

    parts = [f"{name} {_seconds(seconds)}" for name, seconds in best.parts]
    yield from fold("step      ", parts, width(), " · ")
    kinds = [(name, field) for name, field in _KINDS if any(getattr(each, field) for each in best.plan.memory)]
    rows = [["GiB", *(name for name, _ in kinds), "total", f"of {usable_bytes(tuned.job.machine) / _GIB:.1f}"]]
    for stage, memory in enumerate(best.plan.memory):
        cells = [f"{(getattr(memory, field) or 0) / _GIB:.2f}" for _, field in kinds]
        share = memory.total_bytes / usable_bytes(tuned.job.machine)
        rows.append([f"stage {stage}", *cells, f"{memory.total_bytes / _GIB:.2f}", f"{share:.0%}"])
    yield from table(rows, width())
    proven = "no other choice fits and is faster" if not best.gap else f"another could be {best.gap:.1%} faster"
    yield from fold("layers    ", [*layer_lines(best.choices), f"({proven})"], width(), "; ")
    settings = [f"{key}: {_word(value)}" for key, value in _changes(best, tuned.given).items()]
    yield from fold("settings  ", settings or ["as they are"], width())


def layer_lines(choices: Mapping[str, Choice]) -> list[str]:
    """Return for each choice the layers that do it, in words."""
    return [f"{choice}: {', '.join(_runs(names))}" for choice, names in _by_choice(choices).items()]


def _by_choice(choices: Mapping[str, Choice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, choice in choices.items():
        found.setdefault(str(choice), []).append(name)
    return found


def _runs(names: Sequence[str]) -> list[str]:
    """Write `layers.0`, `layers.1`, `layers.2` as `layers.0–2`."""
    numbered = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in names]
    found = []
    pairs = enumerate(numbered)
    for (stem, _), run in groupby(
        pairs, lambda pair: (pair[1][0], int(pair[1][1]) - pair[0] if pair[1][1].isdecimal() else pair[1][1])
    ):
        tails = [tail for _, (_, tail) in run]
        prefix = f"{printable(stem)}." if stem else ""
        found.append(f"{prefix}{tails[0]}" if len(tails) == 1 else f"{prefix}{tails[0]}–{tails[-1]}")
    return found


def _changes(best: Prediction, given: Mapping[str, Any]) -> dict[str, Any]:
    values = best.config.given()
    return {key: value for key, value in values.items() if key not in given or given[key] != value}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ruled_out(reasons: Mapping[str, int]) -> Iterator[str]:
    yield "ruled out"
    shown = list(reasons.items())[:_MOST_REASONS]
    for reason, count in shown:
        yield from fold(f"{count:>8}  ", [printable(reason)], width())
    if len(reasons) > _MOST_REASONS:
        yield f"{sum(list(reasons.values())[_MOST_REASONS:]):>8}  for {len(reasons) - _MOST_REASONS} other reasons"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


# --- for programs -----------------------------------------------------------------------------------------------------


def plain(tuned: Tuned, top: int) -> dict[str, Any]:
    """Return what was found."""
    from smpkit.plan.tune.predict import Prediction, usable_bytes

    job, found = tuned.job, tuned.found
    present = found.present
    return {
        "name": tuned.name or None,
        "ranks": job.ranks,
        "hosts": job.hosts,
        "machine": {"name": job.machine.name, "source": job.machine.source},
        "usable_bytes": usable_bytes(job.machine),
        "samples": job.samples,
        "tokens": job.tokens,
        "candidates": found.num_candidates,
        "predicted": found.num_predicted,
        "seconds": found.seconds,
        "unseen_gap": found.unseen_gap,
        "best": [_plain(each, tuned.given) for each in found.best[:top]],
        "present": _plain(present, tuned.given) if isinstance(present, Prediction) else None,
        "present_reason": None if present is None or isinstance(present, Prediction) else present.reason,
        "ruled_out": dict(found.ruled_out),
        "nearest": None if found.nearest is None else {
            "reason": found.nearest.reason,
            "missing_bytes": found.nearest.missing_bytes,
        },
        "notes": list(tuned.notes),
    }  # fmt: skip


def _plain(each: Prediction, given: Mapping[str, Any]) -> dict[str, Any]:
    stages = []
    for stage, memory in enumerate(each.plan.memory):
        assert each.plan.assignment is not None
        kinds = {name: getattr(memory, field) for name, field in _KINDS}
        stages.append(
            {"units": list(each.plan.assignment.names(stage)), "total_bytes": memory.total_bytes, "bytes": kinds}
        )
    return {
        "parameters": each.config.given(),
        "changes": _changes(each, given),
        "step_seconds": each.step_seconds,
        "tokens_per_second": each.tokens_per_second,
        "parts_seconds": dict(each.parts),
        "samples_per_microbatch": each.samples_per_microbatch,
        "binds": each.binds,
        "layers": {name: str(choice) for name, choice in each.choices.items()},
        "gap": each.gap,
        "stages": stages,
    }
