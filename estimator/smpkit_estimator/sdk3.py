"""SageMaker's SDK v3 with smpkit: a `DistributedConfig` for `ModelTrainer`, whose driver is smpkit's launcher.

::

    from sagemaker.train import ModelTrainer
    from smpkit_estimator.sdk3 import Smpkit

    smp = Smpkit(smp_options={"enabled": True, "parameters": {...}}, mpi_options={"enabled": True, ...})
    trainer = ModelTrainer(
        training_image=image,
        source_code=SourceCode(source_dir="src", entry_script="train.py"),
        distributed=smp,
        hyperparameters=smp.hyperparameters("train.py", {"epochs": 3}),
    )
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.errors import ConfigError, UnsupportedError
from smpkit_estimator.arguments import job_from_arguments
from smpkit_estimator.hyperparameters import for_trainer, not_for_shell_files
from smpkit_estimator.request import hyperparameters_over_limits

try:
    from sagemaker.train.distributed import DistributedConfig
except ModuleNotFoundError as error:
    raise UnsupportedError(
        "smpkit_estimator.sdk3 needs SageMaker's SDK v3",
        hint="`pip install 'smpkit[sdk3]'`, in an environment without SDK v2: the two cannot be installed together",
    ) from error

_DRIVERS = "/opt/ml/input/data/sm_drivers/distributed_drivers"
_DRIVER = "smpkit_driver.py"


class Smpkit(DistributedConfig):  # type: ignore[misc]  # the SDK's types are not read
    """Run a `ModelTrainer` job with smpkit's launcher; the image must have smpkit in it.

    All ranks of all hosts are started (SDK v3's own `MPI` starts those of one host only).

    Raises:
        ConfigError: with all problems of the options.
    """

    smp_options: dict[str, Any] | None = None
    """`{"enabled": True, "parameters": {...}}`, or SageMaker's whole `distribution` dict."""
    mpi_options: dict[str, Any] | None = None
    """`{"enabled": True, "processes_per_host": 8}`: start with mpirun; torchrun otherwise."""

    def __init__(
        self, smp_options: dict[str, Any] | None = None, mpi_options: dict[str, Any] | None = None, **data: Any
    ) -> None:
        job_from_arguments({"entry_point": "stand_in.py"}, smp_options, mpi_options)
        super().__init__(smp_options=smp_options, mpi_options=mpi_options, **data)

    @property
    def driver_dir(self) -> str:
        """The folder that SDK v3 sends along."""
        return str(Path(__file__).with_name("sdk3_driver"))

    @property
    def driver_script(self) -> str:
        """The line with which SDK v3's start script starts the driver, followed by a line of our own.

        The shell that runs the start script is the container's first process: it gets SIGTERM and does not pass it on,
        so the ranks could not save before they are killed. The driver therefore only checks that smpkit is in the
        image, and the next line replaces the shell by the launcher, which then gets SIGTERM itself. (bash before 5.2
        runs the script in a child process, so there the first shell still keeps the signal.)
        """
        return f"{_DRIVER} check\nexec $SM_PYTHON_CMD {_DRIVERS}/{_DRIVER}"

    def hyperparameters(self, entry_script: str, values: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return the hyperparameters for `ModelTrainer`: the script's own and what the launcher needs.

        They are checked here. A job that is submitted without them takes the script's name and the options from what
        the trainer sends along, and fails in the container if they are wrong.

        Raises:
            ConfigError: a name or value that cannot be sent, or is too long; a script that the options cannot start.
        """
        settings = {"entry_point": entry_script, "hyperparameters": dict(values or {})}
        sent = for_trainer(job_from_arguments(settings, self.smp_options, self.mpi_options))
        problems = [*not_for_shell_files(sent), *hyperparameters_over_limits(sent)]
        if problems:
            raise ConfigError(problems, subject="hyperparameters")
        return sent
