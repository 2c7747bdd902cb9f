"""`Estimator`: SDK v2's estimator, with its argument names, for jobs of smpkit; needs boto3 and none of AWS's SDKs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.errors import ConfigError, UsageError
from smpkit_estimator.arguments import as_argument, channels, experiment_from, job_from_arguments
from smpkit_estimator.aws import Session, open_session
from smpkit_estimator.backend import Plan
from smpkit_estimator.job import Job, show
from smpkit_estimator.request import TrainingPlan
from smpkit_estimator.sagemaker import SageMaker


class Estimator:
    """A training job in the making, and the last one that it started.

    Takes the arguments of SDK v2's `PyTorch` estimator by the same names, except those that choose an AWS image: give
    `image_uri`. `distribution` may be the full dict of SageMaker, or the bare `smp_options` of many notebooks, with
    `mpi_options` inside or beside it. Everything is checked here, before anything is uploaded::

        estimator = Estimator(
            entry_point="train.py",
            role="SageMakerRole",
            image_uri="123456789012.dkr.ecr.eu-west-1.amazonaws.com/smpkit:latest",
            instance_type="ml.p4d.24xlarge",
            instance_count=2,
            distribution={"enabled": True, "parameters": {"pipeline_parallel_degree": 2, "microbatches": 4}},
            mpi_options={"enabled": True, "processes_per_host": 8},
        )
        job = estimator.fit("s3://bucket/data", wait=False)
        job.logs(follow=True)  # `job`, also `estimator.latest_training_job`, is waited for, stopped and resumed, too

    Args:
        entry_point: the script; relative to `source_dir` if that is given.
        source_dir: the folder that is packed; without it only the script and `dependencies` are.
        distribution, mpi_options: see above.
        session: a `boto3.Session`; made from the environment when first needed.
        sagemaker_session: a `Session` of SDK v2, whose boto3 session is taken.
        arguments: all others; the reference lists them.

    Raises:
        ConfigError: with all problems, each under the name of its argument.
    """

    def __init__(
        self,
        entry_point: str | Path,
        *,
        source_dir: str | Path | None = None,
        distribution: Mapping[str, Any] | None = None,
        mpi_options: Mapping[str, Any] | None = None,
        session: Session | None = None,
        sagemaker_session: Any = None,
        **arguments: Any,
    ) -> None:
        self._script_only = source_dir is None
        if source_dir is None:
            source_dir, entry_point = Path(entry_point).parent, Path(entry_point).name
        known = {"entry_point": entry_point, "source_dir": source_dir, **arguments}
        self.config: JobConfig = job_from_arguments(known, distribution, mpi_options)
        self._session = session or getattr(sagemaker_session, "boto_session", None)
        self._job: Job | None = None

    def __repr__(self) -> str:
        compute = self.config.compute
        started = "" if self._job is None else f", last started {self._job.name!r}"
        return f"Estimator({self.config.entry_point!r} on {compute.instance_count} × {compute.instance_type}{started})"

    @classmethod
    def attach(cls, job_name: str, session: Session | None = None) -> Job:
        """Return a job that exists already.

        Raises:
            UsageError: there is none of this name.
        """
        job = Job(job_name, SageMaker(session or open_session()))
        job.describe()
        return job

    def plan(
        self, inputs: Any = None, job_name: str | None = None, experiment_config: Mapping[str, str] | None = None
    ) -> TrainingPlan:
        """Return what `fit` would send, without sending anything: its `body` is the very request.

        Raises:
            ConfigError: the job cannot be sent as it is; lists all problems.
        """
        sent: TrainingPlan = self._planned(inputs, job_name, experiment_config).payload
        return sent

    def _planned(self, inputs: Any, job_name: str | None, experiment_config: Mapping[str, str] | None) -> Plan:
        updates: dict[str, Any] = {"inputs": {**self.config.inputs, **channels(inputs)}}
        mode = getattr(inputs, "mode", None) or getattr(inputs, "config", {}).get("InputMode")
        if experiment_config is not None:
            updates["experiment"] = experiment_from(experiment_config)
        if mode is not None:  # as SDK v2 does with one input that is no mapping
            updates["input_mode"] = mode
        config = self.config.model_copy(update=updates)
        try:
            return self._backend.plan(config, Path(), name=job_name, script_only=self._script_only)
        except ConfigError as error:
            problems = [
                replace(problem, path=("job_name",)) if job_name and problem.path == ("name",) else as_argument(problem)
                for problem in error.problems
            ]
            raise ConfigError(problems, subject=error.subject) from None

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: bool = True,
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> Job:
        """Start the job; with `wait`, stay until it is over, with `logs` showing its lines.

        An interrupt (Ctrl-C) ends the waiting, never the job.

        Args:
            inputs: an S3 URI, `TrainingInput` or `FileSystemInput`, which becomes the channel `training`; or a mapping
                of names to them.
            experiment_config: `ExperimentName`, `TrialName`, `TrialComponentDisplayName` and `RunName`, as in SDK v2.

        Raises:
            ConfigError: the job cannot be sent as it is; lists all problems.
            CloudError: the cloud refused or could not be reached.
            JobError: the job failed or was stopped, with the first failing rank's exception.
        """
        plan = self._planned(inputs, job_name, experiment_config)
        for notice in self.config.secret_notices():
            sys.stderr.write(f"warning: {notice}\n")
        for note in plan.notes:
            sys.stderr.write(f"note: {note}\n")
        self._backend.submit(plan)
        self._job = Job(plan.name, self._backend)
        if wait:
            self._watch(self._job, logs)
        return self._job

    def _watch(self, job: Job, logs: bool) -> None:
        try:
            if logs:
                show(job.logs(follow=True))
            else:
                job.wait()
        except KeyboardInterrupt:
            sys.stderr.write(f"job `{job.name}` goes on; `smpkit logs -f {job.name}` follows, `smpkit stop` stops it\n")
            raise
        job.check()

    @cached_property
    def _backend(self) -> SageMaker:
        return SageMaker(self._session or open_session())

    @property
    def latest_training_job(self) -> Job:
        """The job that `fit` started last.

        Raises:
            UsageError: there is none.
        """
        if self._job is None:
            raise UsageError("no job was started yet", hint="call `fit`, or `Estimator.attach(job_name)`")
        return self._job

    @property
    def model_data(self) -> str:
        """S3 URI of the last job's model."""
        return self.latest_training_job.model_data

    def resume(self, wait: bool = True, logs: bool = True) -> Job:
        """Start a new job that goes on from the last one's checkpoints; arguments and errors as of `fit`."""
        self._job = self.latest_training_job.resume()
        if wait:
            self._watch(self._job, logs)
        return self._job
