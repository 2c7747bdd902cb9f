"""What `smpkit plan` and `smpkit tune` start from: what a file says, and the facts of its model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smpkit.cli import _console
from smpkit.cli._with_torch import ask
from smpkit.config.distribution import Distribution
from smpkit.config.job import JobConfig
from smpkit.config.load import Override, load
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.words import printable
from smpkit.errors import UsageError
from smpkit.plan.memory import ModelFacts
from smpkit.units import unit_of

_DEADLINE_SECONDS: Final = 600
MEMORY_KINDS: Final = {
    "parameters": "parameters_bytes",
    "gathered": "gathered_bytes",
    "gradients": "gradients_bytes",
    "reduction": "reduction_bytes",
    "masters": "masters_bytes",
    "states": "optimizer_bytes",
    "activations": "activations_bytes",
    "host": "host_bytes",
}
"""Columns of tables of memory, with the field of `RankMemory` that each shows."""


@dataclass(frozen=True)
class World:
    """What a file says about who takes part, and what is trained."""

    parameters: ModelParallelConfig
    name: str = ""
    hosts: int = 1
    per_host: int | None = None
    """Ranks of a host, where the file says it."""
    instance_type: str = "local"
    folder: Path = Path()
    """Where modules of the job are imported from."""
    ranks: int = 0
    """On all hosts; 0: not known yet."""


def world_of(file: Path, overrides: Sequence[Override]) -> World:
    """Read a job, a distribution or modelparallel parameters alone, and print its warnings."""
    loaded = load(file, overrides)
    for notice in loaded.notices:
        _console.warn(notice)
    config, folder = loaded.config, file.parent
    if isinstance(config, ModelParallelConfig):
        return World(config, folder=folder)
    distribution = config.distribution if isinstance(config, JobConfig) else config
    assert isinstance(distribution, Distribution)
    parameters, per_host = distribution.model_parallel or ModelParallelConfig(), distribution.processes_per_host
    if not isinstance(config, JobConfig):
        return World(parameters, per_host=per_host, folder=folder)
    if config.is_shell_script:
        message = f"`{printable(str(file))}` runs a shell script once on each host, and so has no ranks to plan"
        raise UsageError(message, hint="plan the job file of what the script starts, or degrees: `smpkit plan --pp 4`")
    compute = config.compute
    source = folder if "://" in config.source_dir else folder / config.source_dir
    return World(parameters, config.name, compute.instance_count, per_host, compute.instance_type, source)


def ranks_per_host(ranks: int, hosts: int) -> int:
    """Return how many ranks each of the hosts has; raise UsageError if not all have the same number."""
    if ranks % hosts:
        message = f"{ranks} ranks cannot be spread evenly over {hosts} hosts"
        raise UsageError(message, hint="change --ranks or --hosts")
    return ranks // hosts


def describe(
    target: str, folder: Path, configs: Sequence[ModelParallelConfig] = (), ranks: int = 1, *, other_sizes: bool = False
) -> list[ModelFacts]:
    """Describe a model for each of several jobs, or once with default parameters.

    That is done by one process that imports torch and the user's module; this one does neither.

    Args:
        target: `module:factory`.
        configs: of the jobs. They say how many places there are, whether the model's own choice of them counts, and
            what is divided.
        ranks: of each job.
        other_sizes: microbatches of other sizes will be planned, too.
    """
    places = max((config.pipeline_parallel_degree * config.virtual_pipeline_degree for config in configs), default=1)
    by_hand = any(not config.auto_partition for config in configs)
    arguments = [
        f"--by-hand={places}" if by_hand else f"--places={places}",
        *["--other-sizes"] * other_sizes,
        *(f"--job={ranks}:{config.model_dump_json(by_alias=True)}" for config in configs),
        target,
        str(folder.absolute()),
    ]
    what = f"`{target}` could not be described"
    answer = ask("smpkit.torch.describe", arguments, what, "planning a model", _DEADLINE_SECONDS)
    return [ModelFacts.from_json(line) for line in answer.splitlines()]


def unit_of_table(num_bytes: Iterable[int]) -> tuple[str, int]:
    """Return the unit of a table of memory and its bytes: GiB, or a smaller one where no entry has one of those."""
    return unit_of(min(max(num_bytes), 2**30))
