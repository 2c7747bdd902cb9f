"""What `smpkit tune` searches, and how it is shown: in tables, as JSON, in the job's file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click

from smpkit.cli import _console
from smpkit.cli._console import fold, table, width
from smpkit.cli._world import MEMORY_KINDS, World, describe, ranks_per_host, unit_of_table, world_of
from smpkit.config.load import Override, edited, file_of_parameters, load
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.words import printable
from smpkit.errors import SmpkitError, UsageError
from smpkit.plan.memory import ModelFacts
from smpkit.plan.tune.calibration import differences, read_calibration, this_machine
from smpkit.plan.tune.chain import Choice
from smpkit.plan.tune.features import peak_of
from smpkit.plan.tune.instances import INSTANCES
from smpkit.plan.tune.machine import Machine, from_calibration, published, with_memory
from smpkit.plan.tune.predict import Job, Prediction, RuledOut, usable_bytes
from smpkit.plan.tune.search import SearchResult, search
from smpkit.units import amount, seconds, things

_MOST_TENSOR_RANKS: Final = 16
_MOST_REASONS: Final = 6
_OF_THE_MODEL: Final = ("bf16", "fp16", "prescaled_batch", "optimize", "tensor_parallel_seed")
"""Parameters by which a model is described."""


def run(
    file: Path,
    *,
    overrides: Sequence[Override],
    optimizer: str,
    seconds: float,
    top: int,
    write: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Search, and print what was found; arguments as of the command."""
    flags = {flag for flag, _ in overrides} - {"-p"}
    if write and flags:
        hint = "write the setting into the file first; a parameter by `-p` is written"
        raise UsageError(f"`--write` cannot be given beside `{min(flags)}`, which the file would not have", hint=hint)
    own = world_of(file, ()) if write else None  # without the options, which the file does not have
    # The degrees of the file need not divide the ranks that are asked for: others are searched.
    world = world_of(file, [*overrides, *[("--ranks", "null")] * (options["ranks"] is not None)])
    facts = _machine(world, options["machine"], options["calibration"], options["tflops"])
    facts = with_memory(facts, options["memory_gib"], options["host_memory_gib"])
    hosts = options["hosts"] or world.hosts
    ranks = options["ranks"] or hosts * (world.per_host or facts.ranks_per_host)
    if own is not None and own.per_host and own.hosts * own.per_host != ranks:
        hint = "write the number into the file first, or leave out `--write`"
        raise UsageError(
            f"`--write` is for the {own.hosts * own.per_host} ranks of `{file}`, not for {ranks}", hint=hint
        )
    if options["hosts"] or not options["ranks"]:
        facts = _spread(facts, ranks, hosts)
    models = _models(world, options["model"], facts, ranks)
    samples = options["batch"] or _samples(world.parameters, models, ranks)
    job = Job(models, facts, ranks, samples, optimizer)
    if not world.parameters.auto_partition:
        _console.warn("places by hand are for one pipeline degree; others are searched, cut automatically")
    parameters = world.parameters.given()
    result = search(job, parameters, budget_seconds=seconds)
    if as_json:
        _console.print_json(_as_plain(world.name, job, result, parameters, top))
    else:
        click.echo("\n".join(_report(world.name, job, result, parameters, top)))
    if not result.best:
        raise _nothing_fits(result)
    if own is not None:
        _write(file, own.parameters.given(), result.best[0])
    elif not as_json:
        _console.hint(f"`--write` changes {file} to the first one; its comments stay")


def _nothing_fits(result: SearchResult) -> SmpkitError:
    if result.nearest is None:
        hint = "`--batch` must be divisible by the replicas and microbatches"
        return SmpkitError("no configuration fits", hint=hint)
    config, nearest = result.nearest
    degrees = f"pipeline {config.pipeline_parallel_degree} × tensor {config.tensor_parallel_degree}"
    lacks = f"lacks {amount(nearest.missing_bytes)}: {nearest.reason}"
    return SmpkitError(
        f"no configuration fits; the nearest, {degrees} with {things(config.microbatches, 'microbatch')}, {lacks}",
        hint="use more `--hosts`, smaller microbatches in the factory, or devices with more memory",
    )


# --- what is searched -------------------------------------------------------------------------------------------------


def _machine(world: World, named: str | None, path: Path | None, tflops: float | None) -> Machine:
    """Return the facts that the options name, or those of the job's machines."""
    kind = named or world.instance_type
    if path is None:
        if kind == "local":
            hint = "`smpkit calibrate` writes them; give its file as `--calibration`, or name a `--machine`"
            raise UsageError("nothing is known about this machine's speed yet", hint=hint)
        return published(kind, tflops=tflops)
    if tflops is not None:
        raise UsageError("`--tflops` says nothing beside `--calibration`, which has it", hint="remove one of them")
    calibration = read_calibration(path)
    measured = calibration.machine
    if kind == "local":
        refusal, others = differences(measured, this_machine())
        if refusal is not None:
            hint = "run `smpkit calibrate` here, or name the machine with `--machine`"
            raise UsageError(f"`{path}` cannot be used for this machine: it {refusal}", hint=hint)
        if others:
            _console.warn(f"`{path}` is of another machine: {'; '.join(others)}")
    elif kind not in INSTANCES:
        _console.warn(f"`{path}` was measured on `{measured.host}` ({measured.kind}); is `{kind}` like it?")
    elif (gpu := INSTANCES[kind].accelerator).model not in measured.kind:
        where = f"it was measured on `{measured.host}`, whose ranks compute on {measured.kind}"
        hint = f"measure on one, or leave `--calibration` out: published facts of `{kind}` are known"
        raise UsageError(f"`{path}` cannot be used for `{kind}`, which has {gpu.name}: {where}", hint=hint)
    return from_calibration(calibration)


def _spread(machine: Machine, ranks: int, hosts: int) -> Machine:
    """Return the machine with as many ranks as each of the hosts has."""
    per_host = ranks_per_host(ranks, hosts)
    if per_host > machine.ranks_per_host:
        message = f"{per_host} ranks on a host are more than {machine.name} has: {machine.ranks_per_host}"
        raise UsageError(message, hint="use more `--hosts`, or fewer ranks")
    return replace(machine, ranks_per_host=per_host)


def _models(world: World, target: str, machine: Machine, ranks: int) -> dict[int, ModelFacts]:
    """Describe the model at each tensor-parallel degree that it can be divided by."""
    most = min(machine.ranks_per_host, ranks, _MOST_TENSOR_RANKS)
    degrees = [degree for degree in (1, 2, 4, 8, 16) if degree <= most and ranks % degree == 0]
    kept = {key: value for key, value in world.parameters.given().items() if key in _OF_THE_MODEL}
    configs = [
        ModelParallelConfig.from_sources({**kept, "ddp": True, "tensor_parallel_degree": degree}, None)[0]
        for degree in degrees
    ]
    # Two processes at the same time: one describes the whole model at two sizes, the other its divided forms at one,
    # and how they grow is the same.
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(describe, target, world.folder, configs[1:], ranks) if configs[1:] else None
        [whole] = describe(target, world.folder, configs[:1], ranks, other_sizes=True)
        divided = [model.growing_as(whole) for model in others.result()] if others else []
    if not whole.traced or not whole.samples:
        hint = "return (model, arguments of one microbatch)"
        raise UsageError(f"`{target}` returns no arguments, so compute and activations are unknown", hint=hint)
    # A model of which nothing is divided gains nothing from tensor-parallel ranks.
    pairs = zip(degrees[1:], divided, strict=True)
    return {1: whole} | {n: model for n, model in pairs if any(tensor.pieces for tensor in model.tensors.values())}


def _samples(config: ModelParallelConfig, models: Mapping[int, ModelFacts], ranks: int) -> int:
    """Return the samples of a step as the job is: what the factory returns is one microbatch of it."""
    share = config.pipeline_parallel_degree * (config.tensor_parallel_degree if config.prescaled_batch else 1)
    return max(1, ranks // share) * config.microbatches * models[1].samples


# --- in the job's file ------------------------------------------------------------------------------------------------


def _write(file: Path, written: Mapping[str, Any], best: Prediction) -> None:
    """Change the file, where these parameters are `written`, in place, at once or not at all."""
    values = best.config.given()
    changed = _changes(best, written)
    gone = frozenset(written.keys() - values.keys())
    place, path = file_of_parameters(file)
    # `partitions` is the older name of the degree, by which the file may have it.
    remove = gone | {"partitions"} if "pipeline_parallel_degree" in changed else gone
    text = edited(place.read_text(encoding="utf-8"), str(place), path, changed, remove)
    new = place.with_name(f".{place.name}.tune{place.suffix}")
    try:
        new.write_text(text, encoding="utf-8")
        load(new)  # what is written can be read
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)
    words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items()) or "nothing"
    _console.note(f"Changed {place}: {words}{'; removed ' + ', '.join(sorted(gone)) if gone else ''}")


def _changes(best: Prediction, parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = best.config.given()
    return {key: value for key, value in values.items() if key not in parameters or parameters[key] != value}


# --- in tables --------------------------------------------------------------------------------------------------------


def _report(name: str, job: Job, result: SearchResult, parameters: Mapping[str, Any], top: int) -> Iterator[str]:
    """Yield a ranking, what the first of it takes and sets, and why others were ruled out."""
    model = next(iter(job.models.values()))
    where = f"{things(job.ranks, 'rank')} on {things(job.hosts, 'host')}"
    yield f"{name}{': ' * bool(name)}{where} of {job.machine.name}"
    yield from fold("facts     ", [job.machine.source], width())
    yield f"model     {model.name}, {job.samples} samples ({job.tokens} tokens) in a step"
    searched = f"{things(result.num_predicted, 'configuration')} predicted in {result.seconds:.1f} s"
    left = [f"one of the others could be {result.unseen_gap:.0%} faster at most"] if result.unseen_gap else []
    yield from fold("search    ", [f"{searched}{';' * bool(left)}", *left], width(), " ")
    if result.best:
        yield ""
        yield from _ranking(result, result.distinct[:top])
        yield ""
        yield from _details(result.best[0], job, parameters)
    if result.ruled_out:
        yield ""
        yield from _ruled_out(list(result.ruled_out.items()))
    for note in _notes(job):
        yield f"note      {printable(note)}"


def _notes(job: Job) -> list[str]:
    return list(dict.fromkeys(note.strip() for model in job.models.values() for note in model.notes))


def _ranking(result: SearchResult, best: Sequence[Prediction]) -> Iterator[str]:
    head = ["", "pp×tp×dp", "shared", "microbatches", "schedule", "layers", "step", "tokens/s"]
    rows = [[*head, "bubble", "communication", "stall", "memory", "limited by"]]
    rows += [[str(number), *_cells(prediction)] for number, prediction in enumerate(best, 1)]
    if isinstance(result.present, Prediction):
        rows.append(["as it is", *_cells(result.present)])
    yield from table(rows, width())
    if isinstance(result.present, RuledOut):
        yield f"as it is, the job has no step: {result.present.reason}"


def _cells(prediction: Prediction) -> list[str]:
    config, mesh, step = prediction.config, prediction.plan.mesh, prediction.step_seconds
    shared = "states" if config.shard_optimizer_state else "–"
    if config.sharded_data_parallel_degree > 1:
        shared = f"all/{config.sharded_data_parallel_degree}"
    chunks = f" ×{config.virtual_pipeline_degree}" if config.virtual_pipeline_degree > 1 else ""
    names = sorted(map(str, prediction.choices.values()))
    return [
        f"{mesh.pp_size}×{mesh.tp_size}×{mesh.rdp_size}",
        shared,
        f"{config.microbatches} of {prediction.samples_per_microbatch}",
        "–" if mesh.pp_size == 1 else f"{config.pipeline}{chunks}",
        ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "–",
        seconds(step),
        f"{prediction.tokens_per_second:,.0f}",
        *(f"{prediction.parts[name] / step:.0%}" for name in ("bubble", "communication", "stall")),
        amount(peak_of(prediction.plan)),
        prediction.binds,
    ]


def _details(best: Prediction, job: Job, parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the first one takes, holds and sets."""
    usable = usable_bytes(job.machine)
    yield from fold("step      ", [f"{name} {seconds(length)}" for name, length in best.parts.items()], width(), " · ")
    kinds = {
        name: kind for name, kind in MEMORY_KINDS.items() if any(getattr(stage, kind) for stage in best.plan.memory)
    }
    unit, size_of_unit = unit_of_table(memory.total_bytes for memory in best.plan.memory)
    rows = [[unit, *kinds, "total", f"of {amount(usable)}"]]
    for stage, memory in enumerate(best.plan.memory):
        sizes = [*(getattr(memory, kind) or 0 for kind in kinds.values()), memory.total_bytes]
        rows.append(
            [f"stage {stage}", *(f"{size / size_of_unit:.2f}" for size in sizes), f"{memory.total_bytes / usable:.0%}"]
        )
    yield from table(rows, width())
    proven = f"another could be {best.gap:.1%} faster" if best.gap else "no other choice fits and is faster"
    yield from fold("layers    ", [*_layer_lines(best.choices), f"({proven})"], width(), "; ")
    settings = [
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in _changes(best, parameters).items()
    ]
    yield from fold("settings  ", settings or ["as they are"], width())
    # Other degrees divide the same samples over other replicas, and it is the script that reads them.
    passes = parameters.get("microbatches", 1) * job.models[1].samples
    if (needed := best.config.microbatches * best.samples_per_microbatch) != passes:
        yield f"batch     the script must pass {things(needed, 'sample')} to a step on each rank, not {passes}"


def _layer_lines(choices: Mapping[str, Choice]) -> list[str]:
    """Return for each choice the layers that do it, in words: `recompute: layers.0–2, layers.5`."""
    names: dict[Choice, list[str]] = {}
    for name, choice in choices.items():
        names.setdefault(choice, []).append(name)
    return [f"{choice}: {', '.join(_runs(layers))}" for choice, layers in names.items()]


def _runs(names: Sequence[str]) -> list[str]:
    """Write `layers.0`, `layers.1`, `layers.2` as `layers.0–2`."""
    ends = [name.rpartition(".")[::2] for name in names]
    runs = []
    for (stem, _), run in groupby(
        enumerate(ends), lambda pair: (pair[1][0], int(pair[1][1]) - pair[0] if pair[1][1].isdecimal() else pair[1][1])
    ):
        tails = [tail for _, (_, tail) in run]
        prefix = f"{printable(stem)}." if stem else ""
        runs.append(f"{prefix}{tails[0]}" if len(tails) == 1 else f"{prefix}{tails[0]}–{tails[-1]}")
    return runs


def _ruled_out(reasons: Sequence[tuple[str, int]]) -> Iterator[str]:
    yield "ruled out"
    for reason, count in reasons[:_MOST_REASONS]:
        yield from fold(f"{count:>8}  ", [printable(reason)], width())
    if others := reasons[_MOST_REASONS:]:
        yield f"{sum(count for _, count in others):>8}  for {len(others)} other reasons"


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_plain(name: str, job: Job, result: SearchResult, parameters: Mapping[str, Any], top: int) -> dict[str, Any]:
    """Return what is shown, as JSON has it."""
    present, nearest = result.present, result.nearest
    return {
        "name": name or None,
        "ranks": job.ranks,
        "hosts": job.hosts,
        "machine": {"name": job.machine.name, "source": job.machine.source},
        "usable_bytes": usable_bytes(job.machine),
        "samples": job.samples,
        "tokens": job.tokens,
        "predicted": result.num_predicted,
        "seconds": result.seconds,
        "unseen_gap": result.unseen_gap,
        "best": [_prediction_as_plain(prediction, parameters) for prediction in result.distinct[:top]],
        "present": _prediction_as_plain(present, parameters) if isinstance(present, Prediction) else None,
        "present_reason": present.reason if isinstance(present, RuledOut) else None,
        "ruled_out": result.ruled_out,
        "nearest": None if nearest is None else {"parameters": nearest[0].given(), **asdict(nearest[1])},
        "notes": _notes(job),
    }


def _prediction_as_plain(prediction: Prediction, parameters: Mapping[str, Any]) -> dict[str, Any]:
    assert prediction.plan.assignment is not None
    return {
        "parameters": prediction.config.given(),
        "changes": _changes(prediction, parameters),
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "parts_seconds": prediction.parts,
        "samples_per_microbatch": prediction.samples_per_microbatch,
        "binds": prediction.binds,
        "layers": dict(prediction.choices),
        "gap": prediction.gap,
        "stages": [
            {
                "units": list(prediction.plan.assignment.names(stage)),
                **asdict(memory),
                "total_bytes": memory.total_bytes,
            }
            for stage, memory in enumerate(prediction.plan.memory)
        ],
    }
