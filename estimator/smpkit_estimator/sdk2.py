"""SageMaker's SDK v2 with smpkit's checks: a `PyTorch` estimator that takes `smp_options`.

For pipelines, tuners and steps that want an estimator of the SDK. Without the SDK, use `smpkit.Estimator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.errors import ConfigError, Problem, UnsupportedError
from smpkit_estimator.arguments import job_from_arguments
from smpkit_estimator.hyperparameters import distribution_hyperparameters
from smpkit_estimator.request import hyperparameters_over_limits

try:
    from sagemaker.pytorch import PyTorch as _PyTorch
except ModuleNotFoundError as error:
    raise UnsupportedError(
        "smpkit_estimator.sdk2 needs SageMaker's SDK v2",
        hint="`pip install 'smpkit[sdk2]'`, in an environment without SDK v3: the two cannot be installed together",
    ) from error


class PyTorch(_PyTorch):  # type: ignore[misc]  # the SDK has no types
    """SDK v2's `PyTorch`, for jobs of smpkit.

    Differs in this: the distribution may be the bare `smp_options`; everything about it is checked here and not after
    the upload; empty parameters do not switch the library off; `processes_per_host` counts for torchrun too; AWS's
    debugger and profiler are off, since the image is not AWS's.

    Args:
        smp_options: `{"enabled": True, "parameters": {...}}`, or the whole dict; instead of `distribution`.
        mpi_options: `{"enabled": True, "processes_per_host": 8}`, beside `smp_options`.
        arguments: those of the SDK's class; `image_uri` is required.

    Raises:
        ConfigError: with all problems of the distribution.
    """

    def __init__(
        self,
        entry_point: Any,
        smp_options: Mapping[str, Any] | None = None,
        mpi_options: Mapping[str, Any] | None = None,
        distribution: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        if smp_options is not None and distribution is not None:
            problem = Problem(("smp_options",), "is given together with `distribution`", "keep one of them")
            raise ConfigError([problem], subject="arguments of PyTorch")
        options = smp_options if smp_options is not None else distribution
        self._job = _checked(entry_point, arguments, options, mpi_options)
        off = {"debugger_hook_config": False, "disable_profiler": True}
        super().__init__(entry_point, distribution=_whole(self._job), **{**off, **arguments})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters to send; those about the distribution are smpkit's own."""
        sent: dict[str, Any] = super().hyperparameters()
        return {**sent, **distribution_hyperparameters(self._job)}


def _checked(
    entry_point: Any, arguments: Mapping[str, Any], distribution: Any, mpi_options: Mapping[str, Any] | None
) -> JobConfig:
    """Check only the arguments that smpkit uses: others may hold objects of the SDK, such as pipeline variables."""
    known = {
        name: arguments[name]
        for name in ("instance_count", "instance_type", "instance_groups")  # the last one is refused by name
        if isinstance(arguments.get(name), (int, str, list))
    }
    # Its kind alone: without a `source_dir`, the SDK takes a path from anywhere.
    script = Path(entry_point).name if isinstance(entry_point, (str, Path)) else "stand_in.py"
    job = job_from_arguments({"entry_point": script, **known}, distribution, mpi_options)
    problems = hyperparameters_over_limits(distribution_hyperparameters(job))
    if not arguments.get("image_uri"):
        hint = "AWS's images have no smpkit in them: push your own to ECR"
        problems.append(Problem(("image_uri",), "is required", hint))
    if problems:
        raise ConfigError(problems, subject="arguments of PyTorch")
    return job


def _whole(job: JobConfig) -> dict[str, Any] | None:
    """Return the dict that the SDK takes, in its full form."""
    distribution = job.distribution
    whole: dict[str, Any] = {}
    if distribution.smdistributed is not None:
        block = {"enabled": distribution.model_parallel is not None, "parameters": distribution.parameters_as_written}
        whole["smdistributed"] = {"modelparallel": block}
    for name in ("mpi", "torch_distributed"):
        options = getattr(distribution, name)
        if options is not None:
            whole[name] = options.model_dump(exclude_unset=True)
    return whole or None
