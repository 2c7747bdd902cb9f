"""The `distribution` dict of SageMaker's estimators, verbatim, with the traps of its SDK turned into plain errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.mpi_options import parse_custom_options
from smpkit.config.section import KeyPath, Section, refusal
from smpkit.config.words import quoted, typed
from smpkit.errors import ConfigError, Problem

INSTANCE_GROUPS = (
    "would mix machines of several kinds: smpkit's ranks run on hosts of one kind",
    "submit a job for each kind",
)
"""Why instance groups (a heterogeneous cluster) are refused, and what to do."""

BLOCK_PATH: KeyPath = ("smdistributed", "modelparallel")
"""Where a distribution holds the library's block; in its short form the block is the distribution."""


class Switched(Section):
    """A block that says itself whether it counts."""

    enabled: bool
    """Must be the literal `true`, or SageMaker's SDK silently ignores the block."""

    hints: ClassVar[Mapping[str, str]] = {"enabled": "write `enabled: true`; without it SageMaker ignores the block"}

    @field_validator("enabled", mode="before")
    @classmethod
    def _literal(cls, value: object) -> object:
        if isinstance(value, bool):
            return value
        message = f"must be the literal true or false, got {typed(value)}, which SageMaker takes as false"
        raise refusal([Problem((), message, "write `enabled: true`")])


def misplaced(where: str) -> dict[str, tuple[str, str]]:
    """Return refusals, as `Section.refused` has them, of parameters that belong to another section, `where`."""
    names = (*ModelParallelConfig.keys(), "partitions")
    return {name: (f"belongs to {where}", f"write `parameters: {{{name}: ...}}`") for name in names}


class ModelParallelBlock(Switched):
    """SMP v1, on or off, and its parameters."""

    parameters: ModelParallelConfig = Field(default_factory=ModelParallelConfig)
    """The library's parameters, or in a job file the path of a JSON file beside it that holds them.

    Empty: all defaults (SageMaker's SDK switches the library off).
    """

    refused: ClassVar[Mapping[str, tuple[str, str]]] = misplaced("`parameters`")

    @field_validator("parameters", mode="before")
    @classmethod
    def _not_a_path(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        message = f"is the path of a file ({quoted(value)}), which only a file may name"
        raise refusal([Problem((), message, "give the parameters themselves")])


class SmDistributed(Section):
    """SageMaker's distributed libraries, of which smpkit serves `modelparallel`."""

    modelparallel: ModelParallelBlock
    """The model-parallel library."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        **misplaced("`parameters` of `modelparallel`"),
        "parameters": ("belongs to `modelparallel`", "write `modelparallel: {parameters: ...}`"),
        "enabled": ("belongs to `modelparallel`", "write `modelparallel: {enabled: ...}`"),
        "dataparallel": (
            "is SageMaker's data-parallel library, which smpkit does not replace; a job names only one library",
            "remove it, and set `ddp: true` in the parameters of `modelparallel`",
        ),
    }


_PARAMETERS = ("belongs to `smdistributed.modelparallel`", "write `smdistributed: {modelparallel: {parameters: ...}}`")


class MpiOptions(Switched):
    """Launch with mpirun."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {"parameters": _PARAMETERS}

    processes_per_host: int | None = Field(default=None, ge=1, le=4096)
    """Ranks per host. Default: one per GPU, or one."""

    custom_mpi_options: str = ""
    """More options for mpirun, in one text; quotes work, nothing is expanded."""

    @field_validator("custom_mpi_options", mode="after")
    @classmethod
    def _check_custom_options(cls, value: str) -> str:
        """Refuse here what the launcher would refuse on machines that are paid for."""
        try:
            parse_custom_options(value)
        except ConfigError as error:
            raise refusal(replace(problem, path=()) for problem in error.problems) from None
        return value


class TorchDistributedOptions(Switched):
    """Launch with torchrun."""

    processes_per_host: int | None = Field(default=None, ge=1, le=4096)
    """Ranks per host. Default: one per GPU, or one. *smpkit's own.*"""


_SMDISTRIBUTED = ("belongs to `smdistributed`", "write `smdistributed: {modelparallel: ...}`")
_SAGEMAKER_ONLY = "is a launcher that SageMaker keeps for other frameworks"


class Distribution(Section):
    """How a job is distributed, as SageMaker's estimators take it.

    The bare block `{"enabled": True, "parameters": {...}}` (`smp_options` in many notebooks) may stand beside `mpi` or
    `torch_distributed`.
    """

    smdistributed: SmDistributed | None = None
    """SageMaker's libraries."""

    mpi: MpiOptions | None = None
    """Launch with mpirun."""

    torch_distributed: TorchDistributedOptions | None = None
    """Launch with torchrun, as when neither launcher is enabled."""

    foreign: ClassVar[Mapping[str, tuple[str, str]]] = {
        "instance_groups": INSTANCE_GROUPS,
        "processes_per_host": (
            "belongs to the launcher, `mpi` or `torch_distributed`",
            "write `torch_distributed: {enabled: true, processes_per_host: ...}`",
        ),
        "pytorchddp": (
            "is SageMaker's name for plain data parallelism",
            "use `torch_distributed`, and set `ddp: true` in the parameters of `modelparallel`",
        ),
        "multi_worker_mirrored_strategy": (_SAGEMAKER_ONLY, "use `torch_distributed` or `mpi`"),
        "parameter_server": (_SAGEMAKER_ONLY, "use `torch_distributed` or `mpi`"),
    }
    """Names that say that a mapping is a distribution, and are refused."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        **misplaced("`parameters` of `smdistributed.modelparallel`"),
        **dict.fromkeys(("modelparallel", "model_parallel"), _SMDISTRIBUTED),
        **foreign,
    }

    _parameters: dict[str, Any] = PrivateAttr(default_factory=dict)
    _parameters_path: KeyPath = PrivateAttr(default=(*BLOCK_PATH, "parameters"))

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_written(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        distribution = handler(data)
        if isinstance(data, Mapping):
            path: KeyPath = ("parameters",) if _is_bare(data) else (*BLOCK_PATH, "parameters")
            value: Any = data
            for key in path:  # anywhere on the way a model may stand in place of a mapping
                value = value.get(key) if isinstance(value, Mapping) else getattr(value, str(key), None)
            distribution._parameters_path = path
            distribution._parameters = value.given() if isinstance(value, ModelParallelConfig) else dict(value or {})
        return distribution

    @classmethod
    def spelled_out(cls, data: Any) -> Any:
        """Put the bare block where it belongs."""
        if not _is_bare(data):
            return data
        outside = {key for key in data if key in cls.model_fields or key in cls.foreign}
        block = {key: value for key, value in data.items() if key not in outside}
        return {"smdistributed": {"modelparallel": block}} | {key: data[key] for key in data if key in outside}

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Leave out the part of the path that a bare block does not have."""
        if _is_bare(data) and problem.path[:2] == BLOCK_PATH:
            return Problem(problem.path[2:], problem.message, problem.hint)
        return problem

    def broken_rules(self) -> Iterable[Problem]:
        """Refuse two launchers."""
        if len(self._launchers) == 2:
            message = "cannot be enabled together with mpi: a job has one launcher"
            hint = "keep `mpi` to launch with mpirun, or `torch_distributed` to launch with torchrun"
            yield Problem(("torch_distributed", "enabled"), message, hint)

    @property
    def model_parallel(self) -> ModelParallelConfig | None:
        """The library's parameters; None if it is not enabled."""
        block = self.smdistributed.modelparallel if self.smdistributed is not None else None
        return block.parameters if block is not None and block.enabled else None

    def degrees(self, num_ranks: int | None) -> str:
        """Say in words how ranks share a model: `pipeline 2 × tensor 1 × data 4`."""
        parameters = self.model_parallel
        if parameters is None:
            return "no modelparallel parameters"
        pipeline, tensor = parameters.pipeline_parallel_degree, parameters.tensor_parallel_degree
        data = f" × data {num_ranks // (pipeline * tensor)}" if num_ranks else ""
        return f"pipeline {pipeline} × tensor {tensor}{data}"

    @property
    def launcher_asked_for(self) -> str | None:
        """The launcher, or the library that needs one, that the job names; None if it leaves that open."""
        return next(iter(self._launchers), "modelparallel" if self.model_parallel is not None else None)

    @property
    def launcher(self) -> Literal["mpirun", "torchrun"]:
        """What starts the ranks: mpirun if `mpi` is enabled, torchrun otherwise."""
        return "mpirun" if "mpi" in self._launchers else "torchrun"

    @property
    def processes_per_host(self) -> int | None:
        """Ranks per host; None if the machine decides."""
        return next((launcher.processes_per_host for launcher in self._launchers.values()), None)

    @property
    def custom_mpi_options(self) -> str:
        """More options for mpirun; empty if it is not the launcher."""
        return self.mpi.custom_mpi_options if self.mpi is not None and self.mpi.enabled else ""

    @property
    def parameters_as_written(self) -> dict[str, Any]:
        """The parameters as written, for `mp_parameters`: Hugging Face looks for the very key `partitions`."""
        return dict(self._parameters)

    def notices(self) -> list[Problem]:
        """Say which settings have no effect; the paths start at the distribution."""
        raw, path = self.parameters_as_written, self._parameters_path
        if self.model_parallel is not None:
            notices = [problem.below(*path) for problem in self.model_parallel.notices(raw)]
        else:
            notices = [Problem(path, "has no effect: `enabled` is not true")] if raw else []
        for name, launcher in (("mpi", self.mpi), ("torch_distributed", self.torch_distributed)):
            if launcher is not None and not launcher.enabled:
                unused = launcher.model_fields_set - {"enabled"}
                notices += [Problem((name, key), "has no effect: `enabled` is not true") for key in sorted(unused)]
        return notices

    def world_problems(self, world_size: int) -> list[Problem]:
        """Say which degrees do not fit into `world_size` ranks; the paths start at the distribution."""
        parameters, raw = self.model_parallel, self.parameters_as_written
        problems = [] if parameters is None else parameters.world_problems(world_size)
        return [ModelParallelConfig.as_written(problem, raw).below(*self._parameters_path) for problem in problems]

    @property
    def _launchers(self) -> dict[str, MpiOptions | TorchDistributedOptions]:
        """Those that are enabled: one at most, if the rules hold."""
        blocks = {"mpi": self.mpi, "torch_distributed": self.torch_distributed}
        return {name: block for name, block in blocks.items() if block is not None and block.enabled}


def _is_bare(data: object) -> bool:
    return isinstance(data, Mapping) and "smdistributed" not in data and ("enabled" in data or "parameters" in data)
