"""`FakeSageMaker`: what takes the place of a boto3 session, whose clients are fakes on one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.testing.fake_sagemaker.client import FakeClient, Faults, Handler
from smpkit.testing.fake_sagemaker.clock import FakeClock
from smpkit.testing.fake_sagemaker.jobs import FakeJob, FakeJobs
from smpkit.testing.fake_sagemaker.logs import FakeLogs
from smpkit.testing.fake_sagemaker.script import Script
from smpkit.testing.fake_sagemaker.storage import FakeStorage
from smpkit.testing.fake_sagemaker.store import load_jobs, save_jobs
from smpkit_estimator.backend import Clock

__all__ = ["FakeSageMaker"]


class FakeSageMaker:
    """A session whose clients are fakes.

    Args:
        script: what every job does; or a function of the request, for jobs that differ.
        clock: the fake's time. The default stands still until `clock.advance` or something sleeps.
        quotas: instance type -> how many there may be; others are not limited.
        region, account: where and who.
        page_events, empty_pages: see `FakeLogs`.
        file: keep jobs in this file, so that the next process finds them. Objects of S3 are not kept.
    """

    def __init__(
        self,
        script: Script | Callable[[Mapping[str, Any]], Script] | None = None,
        *,
        clock: Clock | None = None,
        quotas: Mapping[str, int] | None = None,
        region: str | None = "us-west-2",
        account: str = "123456789012",
        page_events: int = 10_000,
        empty_pages: int = 0,
        file: Path | None = None,
    ) -> None:
        self.clock: Any = clock or FakeClock()
        self.region_name = region
        self.account = account
        self.quotas = dict(quotas or {})
        self.faults = Faults()
        self._file = file
        chosen = script or Script()
        script_for = chosen if callable(chosen) else lambda _: chosen
        arn_prefix = f"arn:aws:sagemaker:{region}:{account}:training-job/"
        self._jobs = FakeJobs(self.clock, arn_prefix, script_for, self.quotas, self._save)
        self.logs = FakeLogs(self.clock, self._jobs, page_events, empty_pages)
        self.storage = FakeStorage(self.clock)
        if file is not None:
            self._jobs.jobs.update({job.name: job for job in load_jobs(file)})

    @property
    def jobs(self) -> dict[str, FakeJob]:
        """All jobs, by name."""
        return self._jobs.jobs

    @property
    def now(self) -> datetime:
        """The fake's present."""
        present: datetime = self.clock.now()
        return present

    def client(self, service_name: str, /, **_options: Any) -> FakeClient:
        """Return a client of SageMaker or of a service around it; as `boto3.Session.client`."""
        handlers: Mapping[str, Mapping[str, Handler]] = {
            "sagemaker": self._jobs.handlers,
            "logs": self.logs.handlers,
            "s3": self.storage.handlers,
            "sts": {"get_caller_identity": self._identity},
            "iam": {"get_role": self._role},
            "ecr": {
                "describe_images": lambda request: {"imageDetails": [{"repositoryName": request["repositoryName"]}]}
            },
            "service-quotas": {"list_service_quotas": self._quotas},
        }
        return FakeClient(service_name, self.faults, handlers.get(service_name, {}))

    def _identity(self, _: Mapping[str, Any]) -> dict[str, Any]:
        arn = f"arn:aws:sts::{self.account}:assumed-role/Research/you"
        return {"Account": self.account, "Arn": arn, "UserId": "AROAFAKE:you"}

    def _role(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["RoleName"]
        role = {
            "Path": "/",
            "RoleName": name,
            "RoleId": "AROAFAKEFAKEFAKEFAKE",
            "Arn": f"arn:aws:iam::{self.account}:role/{name}",
            "CreateDate": self.now,
        }
        return {"Role": role}

    def _quotas(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "Quotas": [
                {"ServiceCode": "sagemaker", "QuotaName": f"{kind} for training job usage", "Value": float(number)}
                for kind, number in self.quotas.items()
            ]
        }

    def _save(self) -> None:
        if self._file is not None:
            save_jobs(self._file, self.jobs.values())
