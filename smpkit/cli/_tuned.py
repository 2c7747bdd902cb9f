"""What `smpkit tune` works on: the job, its model at each tensor-parallel degree, the machine; and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli import _console
from smpkit.cli._planned import describe_each
from smpkit.errors import UsageError

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.plan.memory import ModelFacts
    from smpkit.plan.tune.machine import Machine
    from smpkit.plan.tune.predict import Job
    from smpkit.plan.tune.search import Found

__all__ = ["Tuned", "find"]

_MOST_TENSOR_RANKS: Final = 16


@dataclass(frozen=True)
class Tuned:
    """A search and what it was about."""

    name: str
    job: Job
    found: Found
    given: dict[str, Any]
    """Parameters that the job has."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """What the file says."""

    name: str
    parameters: ModelParallelConfig
    hosts: int
    per_host: int | None
    instance_type: str
    folder: Path


def find(file: Path, overrides: Sequence[str], options: Mapping[str, Any]) -> Tuned:
    """Read everything and search."""
    from smpkit.plan.tune.machine import with_memory
    from smpkit.plan.tune.predict import Job, half_of
    from smpkit.plan.tune.search import search

    source = _read(file, overrides)
    machine = with_memory(_machine(source, options), options["memory_gib"], options["host_memory_gib"])
    hosts = options["hosts"] or source.hosts
    ranks = options["ranks"] or hosts * (source.per_host or machine.ranks_per_host)
    given = source.parameters.given()
    models = _models(source, options["model"], machine, ranks)
    samples = options["batch"] or _samples(source.parameters, models, ranks)
    job = Job(models, machine, ranks, samples, options["optimizer"], half_of(source.parameters))
    if not source.parameters.auto_partition:
        _console.current().warn("places by hand are for one pipeline degree; others are searched, cut automatically")
    found = search(job, given, budget_seconds=options["seconds"], precisions=options["precisions"])
    notes = list(dict.fromkeys(note.strip() for model in models.values() for note in model.notes))
    return Tuned(source.name, job, found, given, tuple(notes))


def _read(file: Path, overrides: Sequence[str]) -> _Source:
    from smpkit.config.distribution import Distribution
    from smpkit.config.load import LoadedJob, load
    from smpkit.config.modelparallel import ModelParallelConfig

    loaded = load(file, overrides)
    config = loaded.config
    if isinstance(loaded, LoadedJob):
        job = loaded.config
        place = loaded.locate(job.source_dir)
        folder = place if isinstance(place, Path) else file.parent
        parameters = job.distribution.model_parallel or ModelParallelConfig()
        kinds = {job.compute.instance_type}
        kind = kinds.pop() if len(kinds) == 1 else "local"
        per_host = job.distribution.processes_per_host
        return _Source(job.name, parameters, job.compute.instance_count, per_host, kind, folder)
    if isinstance(config, Distribution):
        parameters = config.model_parallel or ModelParallelConfig()
        return _Source("", parameters, 1, config.processes_per_host, "local", file.parent)
    assert isinstance(config, ModelParallelConfig)
    return _Source("", config, 1, None, "local", file.parent)


def _machine(source: _Source, options: Mapping[str, Any]) -> Machine:
    """Return the facts that the options name, or those of the job's machines."""
    from smpkit.plan.tune.calibration import differences, read_calibration, this_machine
    from smpkit.plan.tune.instances import INSTANCES
    from smpkit.plan.tune.machine import from_calibration, published

    path, kind = options["calibration"], options["machine"] or source.instance_type
    if path is None:
        if kind == "local":
            hint = "`smpkit calibrate` writes them; give its file as `--calibration`, or name a `--machine`"
            raise UsageError("the job is for this machine, of which no facts are given", hint=hint)
        return published(kind, tflops=options["tflops"])
    calibration = read_calibration(path)
    measured = calibration.machine
    console = _console.current()
    if kind == "local":
        refusal, others = differences(measured, this_machine())
        if refusal is not None:
            hint = "run `smpkit calibrate` here, or name the machine with `--machine`"
            raise UsageError(f"`{path}` cannot be used for this machine: it {refusal}", hint=hint)
        if others:
            console.warn(f"`{path}` is of another machine: {'; '.join(others)}")
    elif kind in INSTANCES:
        name = INSTANCES[kind].accelerator.name
        short = name.split()[1]
        if short not in measured.kind:
            said = f"it was measured on `{measured.host}`, whose ranks compute on {measured.kind}"
            hint = f"measure on one, or leave `--calibration` out: published facts of `{kind}` are known"
            raise UsageError(f"`{path}` cannot be used for `{kind}`, which has {name}: {said}", hint=hint)
    else:
        console.warn(f"`{path}` was measured on `{measured.host}` ({measured.kind}); is `{kind}` like it?")
    return from_calibration(calibration)


def _models(source: _Source, target: str, machine: Machine, ranks: int) -> dict[int, ModelFacts]:
    """Describe the model at each tensor-parallel degree that it can be divided by."""
    from smpkit.config.modelparallel import ModelParallelConfig

    degrees = [1]
    while degrees[-1] * 2 <= min(machine.ranks_per_host, ranks, _MOST_TENSOR_RANKS) and ranks % (degrees[-1] * 2) == 0:
        degrees.append(degrees[-1] * 2)
    kept = {
        key: value
        for key, value in source.parameters.given().items()
        if key in ("bf16", "fp16", "prescaled_batch", "optimize", "tensor_parallel_seed")
    }
    jobs = []
    for degree in degrees:
        config, _ = ModelParallelConfig.from_sources({**kept, "ddp": True, "tensor_parallel_degree": degree}, None)
        jobs.append(config)
    # Two processes at the same time: one describes the whole model at two sizes, the other its divided forms at one,
    # and how they grow is the same.
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(describe_each, target, source.folder, jobs[1:], ranks) if jobs[1:] else None
        [first] = describe_each(target, source.folder, jobs[:1], ranks, other_sizes=True)
        divided_forms = [model.growing_as(first) for model in others.result()] if others else []
    models = dict(zip(degrees, [first, *divided_forms], strict=True))
    if not first.traced or not first.samples:
        hint = "return (model, arguments of one microbatch)"
        raise UsageError(f"`{target}` returns no arguments, so compute and activations are unknown", hint=hint)
    # A model of which nothing is divided gains nothing from tensor-parallel ranks.
    divided = {degree for degree, model in models.items() if any(each.pieces for each in model.tensors.values())}
    return {degree: models[degree] for degree in degrees if degree == 1 or degree in divided}


def _samples(config: ModelParallelConfig, models: Mapping[int, ModelFacts], ranks: int) -> int:
    """Return the samples of a step as the job is: what the factory returns is one microbatch of it."""
    share = config.pipeline_parallel_degree * (config.tensor_parallel_degree if config.prescaled_batch else 1)
    return max(1, ranks // share) * config.microbatches * models[1].samples
