"""The back end `batch`: what its commands do to plan, start, watch and stop jobs on AWS Batch."""

from __future__ import annotations

import io
import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, ConfigError, Problem, UnreachableError, UsageError
from smpkit_estimator.aws import Cloud, Session, StandIns, open_session
from smpkit_estimator.backend import Access, JobSummary, Log, Pace, Query
from smpkit_estimator.batch.plan import BatchPlan, plan_job, plan_resumed
from smpkit_estimator.batch.requests import PLACE, QUEUE, definition, submission
from smpkit_estimator.batch.status import state_of, status_of
from smpkit_estimator.described import shown_spec
from smpkit_estimator.doctor import check_cloud
from smpkit_estimator.files import Files, folder_here
from smpkit_estimator.finding import Finding, tried
from smpkit_estimator.log_reader import LogReader
from smpkit_estimator.names import base_name, unique_name
from smpkit_estimator.run_folder import run_in_volume
from smpkit_estimator.sources import pack
from smpkit_estimator.status import FINAL, JobStatus

__all__ = ["AwsBatch", "open_batch"]

_PAGE = 100
"""Jobs that one call describes."""
_OLDEST = timedelta(days=30)


class AwsBatch:
    """Jobs of one account and region."""

    def __init__(self, session: Session) -> None:
        self.cloud = Cloud(session)
        self.clock = self.cloud.clock
        self.pace = Pace()

    @property
    def place(self) -> str:
        return self.cloud.region

    @property
    def title(self) -> str:
        return f"AWS Batch in {self.place}"

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> BatchPlan:
        now = self.clock.now()
        region = StandIns(dry).get(lambda: self.cloud.region, "<region>", "it")
        return plan_job(job, folder, name or unique_name(job.name, now), now, region, script_only=script_only)

    def submit(self, plan: BatchPlan) -> dict[str, Any]:
        facts = plan.facts
        if self._definition(plan.name) is not None:
            raise UsageError(f"there is a job `{plan.name}` already", hint="`--name` gives another name")
        self._upload_sources(plan)
        files: dict[str, bytes] = {"spec.json": _packed(plan.spec), "job.json": _packed(plan.kept())}
        if facts.job.compute.num_hosts > 1:
            files["token"] = secrets.token_hex(32).encode()
        for name, content in files.items():
            self.cloud.upload(io.BytesIO(content), f"{facts.place}/{name}", facts.job.encryption.output_key)
        doing = f"cannot start job `{plan.name}`"
        self.cloud.ask("batch", "register_job_definition", doing, **definition(facts))
        try:
            answer = self.cloud.ask_once("batch", "submit_job", doing, **submission(facts))
        except UnreachableError as error:
            found = self._found(plan.name, str(facts.options.queue))
            if found is None:
                hint = f"`smpkit status {plan.name}` tells whether it was; look before you start another"
                raise UnreachableError(f"{error.message}; it may have been started all the same", hint=hint) from None
            answer = found
        except CloudError:
            self._forget(plan.name)
            raise
        facts_of_it = {"name": plan.name, "arn": answer["jobArn"], "id": answer["jobId"], "region": self.place}
        return {**facts_of_it, "source": plan.archive_uri}

    def describe(self, name: str) -> JobStatus:
        job, place = self._job(name)
        spec = json.loads(self.cloud.read(f"{place}/spec.json"))
        failures = self._failures(place) if state_of(job)[0] == "Failed" else []
        return status_of(name, job, spec, failures, self.clock.now())

    def details(self, name: str) -> dict[str, Any]:
        job, place = self._job(name)
        spec = json.loads(self.cloud.read(f"{place}/spec.json"))
        return {**shown_spec(spec), "batch": {key: each for key, each in job.items() if key != "ResponseMetadata"}}

    def logs(self, name: str, since: datetime | None = None) -> Log:
        job, _ = self._job(name)
        [nodes] = job["nodeProperties"]["nodeRangeProperties"]
        options = nodes["container"].get("logConfiguration", {}).get("options", {})
        group = options.get("awslogs-group", "/aws/batch/job")
        hosts = partial(self._host_of, job, {})
        return LogReader(self.cloud, f"{name}/default", since, group=group, host_of=hosts)

    def stop(self, name: str) -> None:
        job, _ = self._job(name)
        if state_of(job)[0] not in FINAL:
            doing = f"cannot stop job `{name}`"
            self.cloud.ask("batch", "terminate_job", doing, jobId=job["jobId"], reason="smpkit stop")

    def list(self, query: Query) -> Iterator[JobSummary]:
        names = {each["jobDefinitionName"]: each["parameters"][QUEUE] for each in self._definitions()}
        since = self.clock.now() - (query.since or _OLDEST)
        after = [{"name": "AFTER_CREATED_AT", "values": [str(round(since.timestamp() * 1000))]}]
        found = [
            job
            for queue in sorted(set(names.values()))
            for job in self._pages("list_jobs", "jobSummaryList", jobQueue=queue, filters=after)
            if job["jobName"] in names and (query.name is None or query.name in job["jobName"])
        ]
        count = 0
        for job in sorted(found, key=lambda job: int(job["createdAt"]), reverse=True):
            status, phase = state_of(job)
            if query.status is not None and status.lower() != query.status.lower():
                continue
            ended = job.get("stoppedAt") if status in FINAL else None
            created = datetime.fromtimestamp(job["createdAt"] / 1000, timezone.utc)
            over = datetime.fromtimestamp(ended / 1000, timezone.utc) if ended else None
            yield JobSummary(job["jobName"], job["jobArn"], status, phase, created, over)
            count += 1
            if count == query.limit:
                return

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> BatchPlan:
        _, place = self._job(name)
        kept = json.loads(self.cloud.read(f"{place}/job.json"))
        now = self.clock.now()
        chosen = new_name or unique_name(base_name(name), now)
        return plan_resumed(kept["job"], kept["sources"], chosen, now, self.cloud.region, changes or {})

    def files(self, place: str) -> Files:
        return folder_here(place, "a volume of the nodes")

    def run_folder(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        _, place = self._job(name)
        places = json.loads(self.cloud.read(f"{place}/spec.json"))["places"]
        return run_in_volume(places, name, "a volume of the nodes")

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        reached = check_cloud(self.cloud, needed=job is not None)
        if job is None or any(finding.state != "ok" for finding in reached):
            return reached
        options = job.backend.batch
        staging = (options.staging or job.code_location or "").rstrip("/")
        found = [tried("queue", lambda: self._queue(options.queue))]
        if write and staging:
            found.append(tried("staging", lambda: self._write(staging)))
        return [*reached, *found]

    def _queue(self, queue: str | None) -> Finding:
        if queue is None:
            return Finding("queue", "problem", "the job names no queue", "set `backend.batch.queue`")
        doing = f"cannot look at the queue `{queue}`"
        found = self.cloud.ask("batch", "describe_job_queues", doing, jobQueues=[queue])["jobQueues"]
        if not found:
            hint = "`aws batch describe-job-queues` lists them"
            return Finding("queue", "problem", f"there is no queue `{queue}` in {self.place}", hint)
        state, status = found[0]["state"], found[0]["status"]
        if (state, status) != ("ENABLED", "VALID"):
            return Finding("queue", "problem", f"queue `{queue}` is {state}, {status}", "jobs would wait in it")
        return Finding("queue", "ok", f"queue `{queue}` takes jobs")

    def _write(self, staging: str) -> Finding:
        uri = f"{staging}/doctor-{secrets.token_hex(4)}"
        self.cloud.upload(io.BytesIO(b""), uri)
        self.cloud.delete(uri)
        return Finding("staging", "ok", f"wrote to and deleted from {staging}")

    # ---- jobs and their places ---------------------------------------------------------------------------------------

    def _job(self, name: str) -> tuple[dict[str, Any], str]:
        """Return what Batch knows of a job, and where its files are.

        Raises:
            UsageError: there is no such job.
            CloudError: Batch has forgotten it, as it does some days after the end.
        """
        made = self._definition(name)
        if made is None:
            message = f"there is no job `{name}` in {self.place}"
            raise UsageError(message, hint="`smpkit jobs` lists them; `--region` looks elsewhere")
        found = self._found(name, made["parameters"][QUEUE])
        if found is None:
            hint = "Batch keeps them for at least seven days after their end"
            raise CloudError(f"AWS Batch no longer knows job `{name}`", hint=hint)
        return self._described([found["jobId"]])[0], made["parameters"][PLACE]

    def _definition(self, name: str) -> dict[str, Any] | None:
        found = self._pages("describe_job_definitions", "jobDefinitions", jobDefinitionName=name, status="ACTIVE")
        ours = (each for each in found if PLACE in each.get("parameters", {}))
        return next(ours, None)

    def _definitions(self) -> Iterator[dict[str, Any]]:
        for each in self._pages("describe_job_definitions", "jobDefinitions", status="ACTIVE"):
            if PLACE in each.get("parameters", {}):
                yield each

    def _found(self, name: str, queue: str) -> dict[str, Any] | None:
        named = [{"name": "JOB_NAME", "values": [name]}]
        for job in self._pages("list_jobs", "jobSummaryList", jobQueue=queue, filters=named):
            if job["jobName"] == name:  # the service's filter does not tell upper case from lower
                return job
        return None

    def _described(self, ids: Sequence[str]) -> Sequence[dict[str, Any]]:
        answer = self.cloud.ask("batch", "describe_jobs", "cannot look up jobs", jobs=ids)
        jobs: Sequence[dict[str, Any]] = answer["jobs"]
        return jobs

    def _forget(self, name: str) -> None:
        self.cloud.ask("batch", "deregister_job_definition", "cannot remove its definition", jobDefinition=f"{name}:1")

    def _pages(self, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self.cloud.ask("batch", operation, "cannot look up jobs", **arguments)
            yield from page.get(key, ())
            if not page.get("nextToken"):
                return
            arguments["nextToken"] = page["nextToken"]

    def _host_of(self, job: Mapping[str, Any], known: dict[str, str], stream: str) -> str:
        """Return the node that writes a log stream, of any attempt."""
        if stream not in known:
            ids = [f"{job['jobId']}#{index}" for index in range(job["nodeProperties"]["numNodes"])]
            for first in range(0, len(ids), _PAGE):
                for node in self._described(ids[first : first + _PAGE]):
                    host = f"node-{node['jobId'].rpartition('#')[2]}"
                    parts = [node, *node.get("attempts", ())]
                    streams = [part.get("container", {}).get("logStreamName") for part in parts]
                    known |= {each: host for each in streams if each}
        return known.get(stream, "node-?")

    def _failures(self, place: str) -> Sequence[str]:
        prefix = f"{place}/failures/"
        bucket = place.removeprefix("s3://").partition("/")[0]
        keys = [item.key for item in self.cloud.objects(prefix)]
        return [self.cloud.read(f"s3://{bucket}/{key}").decode("utf-8", "replace") for key in keys]

    def _upload_sources(self, plan: BatchPlan) -> None:
        if plan.sources is None or self.cloud.object_exists(plan.archive_uri):
            return
        with tempfile.TemporaryFile(prefix="smpkit-") as file:
            packed = pack(plan.sources, file)
            if plan.packed is not None and packed.digest != plan.packed.digest:
                message = "changed while the job was submitted"
                raise ConfigError([Problem(("source_dir",), message, "submit again")], subject="sources")
            self.cloud.upload(file, plan.archive_uri, plan.facts.job.encryption.output_key)


def open_batch(access: Access) -> AwsBatch:
    """Open it with the user's own credentials."""
    return AwsBatch(open_session(access.profile, access.region))


def _packed(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
