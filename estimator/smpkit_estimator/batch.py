"""The back end `batch`: jobs on AWS Batch, multi-node, from the two requests to how they ended.

Every job has a definition of its own name, which is the beginning of the names of its log streams.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.backend import Batch, BatchVolume
from smpkit.config.confidential import masked
from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, ConfigError, Problem, UnreachableError, UsageError
from smpkit.units import things
from smpkit_estimator import scheduled
from smpkit_estimator.aws import Cloud, Session, open_session, request_shape
from smpkit_estimator.backend import (
    Access,
    Clock,
    Finding,
    LogLine,
    Plan,
    Query,
    StandIns,
    base_name,
    in_doubt,
    preparing,
    refuse,
    tried,
    undone_if_refused,
    unique_name,
)
from smpkit_estimator.checkpoints import newest_in_folder
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.limits import preflight
from smpkit_estimator.log_reader import LogReader
from smpkit_estimator.sources import Packed, job_sources, pack, packing_notes
from smpkit_estimator.status import FINAL, JobFailure, JobStatus, Machines, Phase, failure_of

_PLACE = "smpkit_place"
"""Parameter of the job: the S3 URI below which its files are."""

_BASE = "/opt/ml"
_DEFAULT_GROUP = "/aws/batch/job"
_SHORTEST_LIMIT = 60
"""Seconds; Batch takes none below."""
_PAGE = 100
"""Jobs that one call describes."""
_OLDEST = timedelta(days=30)
_PHASES = {
    "SUBMITTED": "Pending",
    "PENDING": "Pending",
    "RUNNABLE": "Pending",
    "STARTING": "Starting",
    "RUNNING": "Training",
}
_LIMIT = re.compile(r"attempt duration exceeded timeout", re.IGNORECASE)

Object = Mapping[str, Any]


@dataclass(frozen=True)
class _Sent:
    """What is uploaded and sent."""

    job: JobConfig
    place: str
    files: Mapping[str, bytes] = field(repr=False)
    """What goes below the place."""
    archive: str
    packed: Packed | None
    """None if the archive is in S3 already."""
    definition: Object
    submission: Object


class AwsBatch:
    """Jobs of one account and region."""

    def __init__(self, session: Session) -> None:
        self.cloud = Cloud(session)
        self.clock = Clock()
        self.pace = 5.0

    @property
    def title(self) -> str:
        return f"AWS Batch in {self.cloud.region}"

    def plan(self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False) -> Plan:
        chosen = name or unique_name(job.name, self.clock.now())
        problems = list(_not_for_batch(job, chosen))
        sources = job_sources(job, folder, problems)
        refuse(problems, "AWS Batch")
        archive, packed, notes = job.source_dir, None, list(_notes(job))
        if sources is not None:
            packed = pack(sources)
            archive = f"{_staging_of(job)}/sources/{packed.digest}/sourcedir.tar.gz"
            notes += packing_notes(packed)
        unknown = StandIns(dry)
        region = unknown.get(lambda: self.cloud.region, "<region>", ": `<region>` stands for it")
        return _plan(job, chosen, region, archive, packed, [*notes, *unknown.notes])

    def submit(self, plan: Plan) -> dict[str, Any]:
        sent: _Sent = plan.payload
        began, queue = self.clock.now(), str(sent.job.backend.batch.queue)
        if self._find(plan.name, [queue]) is not None:
            raise UsageError(f"there is a job `{plan.name}` already", hint="`--name` gives another name")
        with preparing():
            key = sent.job.encryption.output_key
            if sent.packed is not None:
                self.cloud.upload_sources(sent.packed, sent.archive, key)
            for file, content in sent.files.items():
                self.cloud.upload(io.BytesIO(content), f"{sent.place}/{file}", key)
        with undone_if_refused(lambda: self.cloud.discard(*(f"{sent.place}/{file}" for file in sent.files))):
            answer = self._start(plan.name, queue, sent, began)
        own = {"name": plan.name, "arn": answer["jobArn"], "id": answer["jobId"]}
        return {**own, "region": self.cloud.region, "source": sent.archive}

    def _start(self, name: str, queue: str, sent: _Sent, began: datetime) -> Object:
        doing = f"cannot start job `{name}`"
        defined = self.cloud.ask("batch", "register_job_definition", doing, **sent.definition)["jobDefinitionArn"]
        try:
            body = {**sent.submission, "jobDefinition": defined}
            return self.cloud.ask_once("batch", "submit_job", doing, **body)
        except UnreachableError as error:
            there = self._find(name, [queue])
            if there is None or there["createdAt"] < (began.timestamp() - 60) * 1000:  # clocks differ
                raise in_doubt(error, name) from None
            return there
        finally:
            # A job keeps what its definition said. One that may not be removed harms nobody: names are those of jobs.
            with contextlib.suppress(CloudError):
                self.cloud.ask("batch", "deregister_job_definition", "cannot remove it", jobDefinition=defined)

    def describe(self, name: str) -> JobStatus:
        job = self._job(name)
        failures = self._failures(_place(job)) if _state(job)[0] == "Failed" else []
        return status_of(job, failures, self.clock.now())

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        job = self._job(name)
        options = _container(job).get("logConfiguration", {}).get("options", {})
        group = options.get("awslogs-group", _DEFAULT_GROUP)
        hosts = _Hosts(job, self._described)
        reader = LogReader(self.cloud, f"{name}/default", since, tail=tail, group=group, host_of=hosts)
        return iter(reader.read, None)

    def stop(self, name: str) -> None:
        job = self._job(name)
        if _state(job)[0] not in FINAL:
            doing = f"cannot stop job `{name}`"
            self.cloud.ask("batch", "terminate_job", doing, jobId=job["jobId"], reason="smpkit stop")

    def list(self, query: Query) -> Iterator[JobStatus]:
        now = self.clock.now()
        since = round((now - (query.since or _OLDEST)).timestamp() * 1000)
        listed = self._listed(self._queues(), {"name": "AFTER_CREATED_AT", "values": [str(since)]})
        newest_first = sorted(listed, key=lambda job: int(job["createdAt"]), reverse=True)
        # Of jobs in a list Batch does not say that somebody stopped them.
        described = self._described([job["jobId"] for job in newest_first])
        yield from query.of((status_of(job, [], now) for job in described if _is_ours(job)), now)

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        kept = json.loads(self.cloud.read(f"{_place(self._job(name))}/job.json"))
        if changes and "InstanceType" in changes:
            kept["job"]["backend"]["batch"]["instance_type"] = changes["InstanceType"]
        job = scheduled.job_again(kept["job"], changes)
        chosen = new_name or unique_name(base_name(name), self.clock.now())
        refuse(_not_for_batch(job, chosen), "AWS Batch")
        return _plan(job, chosen, self.cloud.region, kept["sources"], None, list(_notes(job)))

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:  # noqa: ARG002
        reached = tried("credentials", self.cloud.credentials, needed=job is not None)
        if job is None or reached.state != "ok":
            return [reached]
        return [reached, tried("queue", lambda: self._queue(job.backend.batch.queue))]

    def _queue(self, queue: str | None) -> Finding:
        if queue is None:
            return Finding("queue", "problem", "the job names no queue", "set `backend.batch.queue`")
        doing = f"cannot look at the queue `{queue}`"
        queues = self.cloud.ask("batch", "describe_job_queues", doing, jobQueues=[queue])["jobQueues"]
        if not queues:
            hint = "`aws batch describe-job-queues` lists them"
            return Finding("queue", "problem", f"there is no queue `{queue}` in {self.cloud.region}", hint)
        state, status = queues[0]["state"], queues[0]["status"]
        if (state, status) != ("ENABLED", "VALID"):
            return Finding("queue", "problem", f"queue `{queue}` is {state}, {status}", "jobs would wait in it")
        return Finding("queue", "ok", f"queue `{queue}` takes jobs")

    def results(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        kept = json.loads(self.cloud.read(f"{_place(self._job(name))}/job.json"))
        return scheduled.run_in_volume(scheduled.job_again(kept["job"], None), name, "a volume of the nodes")

    def latest_checkpoint(self, place: str) -> str | None:
        return newest_in_folder(place, "a volume of the nodes")

    # ---- jobs and their places ---------------------------------------------------------------------------------------

    def _job(self, name: str) -> Object:
        """Return what Batch knows of a job, which it forgets some days after the end."""
        listed = self._find(name, self._queues())
        job = next(self._described([listed["jobId"]]), None) if listed is not None else None
        if job is None or not _is_ours(job):
            message = f"there is no job `{name}` in {self.cloud.region}"
            hint = "`smpkit jobs` lists them, for at least seven days after their end; `--region` looks elsewhere"
            raise UsageError(message, hint=hint)
        return job

    def _find(self, name: str, queues: Iterable[str]) -> Object | None:
        jobs = self._listed(queues, {"name": "JOB_NAME", "values": [name]})
        # The service's filter does not tell upper case from lower. Of several jobs, the last one is meant.
        named = [job for job in jobs if job["jobName"] == name]
        return max(named, key=lambda job: int(job["createdAt"]), default=None)

    def _queues(self) -> Sequence[str]:
        queues = self.cloud.pages("batch", "describe_job_queues", "jobQueues", "cannot look up queues")
        return [queue["jobQueueName"] for queue in queues]

    def _listed(self, queues: Iterable[str], wanted: Object) -> Iterator[Object]:
        for queue in queues:
            doing = "cannot look up jobs"
            yield from self.cloud.pages("batch", "list_jobs", "jobSummaryList", doing, jobQueue=queue, filters=[wanted])

    def _described(self, ids: Sequence[str]) -> Iterator[Object]:
        """Yield all that Batch says of jobs, in the order of their ids."""
        for first in range(0, len(ids), _PAGE):
            page = ids[first : first + _PAGE]
            answer = self.cloud.ask("batch", "describe_jobs", "cannot look up jobs", jobs=page)
            jobs = {job["jobId"]: job for job in answer["jobs"]}
            yield from (jobs[job_id] for job_id in page if job_id in jobs)

    def _failures(self, place: str) -> Sequence[tuple[datetime, str]]:
        folder = f"{place}/failures/"
        return [
            (written, self.cloud.read(folder + name).decode("utf-8", "replace"))
            for name, written in self.cloud.objects(folder).items()
        ]


def open_batch(access: Access) -> AwsBatch:
    return AwsBatch(open_session(access.profile, access.region))


class _Hosts:
    """Tells which node writes a log stream, of any attempt."""

    def __init__(self, job: Object, described: Callable[[Sequence[str]], Iterable[Object]]) -> None:
        self._nodes = [f"{job['jobId']}#{index}" for index in range(job["nodeProperties"]["numNodes"])]
        self._described = described
        self._known: dict[str, str] = {}

    def __call__(self, stream: str) -> str:
        if stream not in self._known:
            for node in self._described(self._nodes):
                for part in (node, *node.get("attempts", ())):
                    name = part.get("container", {}).get("logStreamName")
                    self._known[name] = f"node-{node['jobId'].rpartition('#')[2]}"
        return self._known.get(stream, "node-?")


# ---- from a job file to what is sent ---------------------------------------------------------------------------------


def _plan(job: JobConfig, name: str, region: str, archive: str, packed: Packed | None, notes: Sequence[str]) -> Plan:
    place = f"{_staging_of(job)}/jobs/{name}-{secrets.token_hex(4)}"  # a new one each time: names may be used again
    requests = {"RegisterJobDefinition": _definition(job, name, region, place), "SubmitJob": _submission(job, name)}
    for operation, body in requests.items():
        problems = preflight(body, request_shape("batch", operation))
        if problems:
            raise ConfigError(problems, subject=f"request of {operation}")
    count = job.compute.instance_count
    token_file = f"{place}/token" if count > 1 else None
    sent = hyperparameters(
        job, submit_directory=archive, job_name=name, region=region, launcher="torchrun", token_file=token_file,
        secret_entries=True,
    )  # fmt: skip
    files = scheduled.config_files(job, sent) | {"job": {"job": scheduled.job_to_keep(job), "sources": archive}}
    contents = {f"{file}.json": json.dumps(content, ensure_ascii=False).encode() for file, content in files.items()}
    hidden = {} if token_file is None else {"token": secrets.token_hex(32).encode()}
    shown = {
        "RegisterJobDefinition": _shown_definition(requests["RegisterJobDefinition"]),
        "SubmitJob": requests["SubmitJob"],
        **{f"{place}/{file}.json": content for file, content in scheduled.shown_files(files).items()},
        f"{place}/job.json": masked("", files["job"]),
    }
    options = job.backend.batch
    kind = f" of {options.instance_type}" if options.instance_type else ""
    return Plan(
        name=name,
        machines=f"{things(count, 'node')}{kind} of the queue {options.queue}",
        shown=shown,
        payload=_Sent(job, place, {**contents, **hidden}, archive, packed, *requests.values()),
        max_seconds=scheduled.limit_of(job),
        notes=tuple(notes),
    )


def _not_for_batch(job: JobConfig, name: str) -> Iterator[Problem]:
    options = job.backend.batch
    if job.image is None:
        yield Problem(("image",), "is required on AWS Batch", "push an image with smpkit to ECR, and name it")
    if options.queue is None:
        yield Problem(("backend", "batch", "queue"), "is required", "`aws batch describe-job-queues` lists them")
    if not _staging_of(job):
        yield Problem(("backend", "batch", "staging"), "is required", "an S3 URI that you write to and the role reads")
    role = options.role or job.role
    if role is None or not role.startswith("arn:"):
        hint = "`arn:aws:iam::<account>:role/<name>`, which ECS tasks may take"
        yield Problem(("backend", "batch", "role"), "must be the ARN of the job's role", hint)
    for variable, secret in job.secrets.items():
        if secret.entry is None:
            hint = f"write `{variable}: <name or ARN of the entry>`"
            yield Problem(("secrets", variable), "names no entry in AWS Secrets Manager", hint)
    yield from scheduled.not_for_schedulers(job, name)
    yield from scheduled.place_problems(job, [volume.mount for volume in options.volumes], "backend.batch.volumes")


def _notes(job: JobConfig) -> Iterator[str]:
    why = "the main node cannot start processes on the others"
    yield from scheduled.notes(job, "AWS Batch", why, "role", "tags", "code_location")
    if job.output is None:
        yield "the model stays in the containers and goes with them: `output` names a folder in a volume"
    if job.checkpoints is None and job.backend.batch.retries > 1:
        yield "without `checkpoints` in a volume, a job that is tried again begins anew"
    limit = scheduled.limit_of(job)
    if limit is not None and limit < _SHORTEST_LIMIT:
        yield f"the time limit is {_SHORTEST_LIMIT} s, not {limit}: Batch takes none below"


# ---- the two requests, as a pure function: what `smpkit submit --dry-run` prints and boto3 sends ---------------------


def _definition(job: JobConfig, name: str, region: str, place: str) -> dict[str, Any]:
    """Return the request of `RegisterJobDefinition`; `place` is the S3 URI below which the job's own files are."""
    options, count = job.backend.batch, job.compute.instance_count
    limit = scheduled.limit_of(job)
    nodes = {
        "targetNodes": f"0:{count - 1}",
        "container": _container_of(job, name, region, place),
        "instanceTypes": [options.instance_type] if options.instance_type is not None else None,
    }
    body: dict[str, Any] = {
        "jobDefinitionName": name,
        "type": "multinode",
        "parameters": {_PLACE: place},
        "nodeProperties": {"numNodes": count, "mainNode": 0, "nodeRangeProperties": [nodes]},
        "retryStrategy": {
            "attempts": options.retries,
            "evaluateOnExit": [
                # The machine is gone; or the launchers saved because it was about to go; or one host lost another.
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onExitCode": str(names.STOPPED), "action": "RETRY"},
                {"onExitCode": str(names.LOST), "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
            ],
        },
        "propagateTags": True,
        "tags": {"smpkit": "job", **job.tags},
        "timeout": {"attemptDurationSeconds": max(_SHORTEST_LIMIT, limit)} if limit is not None else None,
    }
    return scheduled.without_none(body)


def _submission(job: JobConfig, name: str) -> dict[str, Any]:
    """Return the request of `SubmitJob`, but for the definition's revision."""
    options = job.backend.batch
    more = {"shareIdentifier": options.share, "schedulingPriorityOverride": options.priority}
    body = {"jobName": name, "jobQueue": options.queue, "jobDefinition": name, **more, "tags": {"smpkit": "job"}}
    return scheduled.without_none(body)


def _shown_definition(body: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(body))
    for variable in shown["nodeProperties"]["nodeRangeProperties"][0]["container"]["environment"]:
        variable["value"] = masked(variable["name"], variable["value"])
    return shown


def _staging_of(job: JobConfig) -> str:
    """Return the S3 URI below which files are put; empty if the job file names none."""
    return (job.backend.batch.staging or job.code_location or "").rstrip("/")


def _container_of(job: JobConfig, name: str, region: str, place: str) -> dict[str, Any]:
    options = job.backend.batch
    amounts = [("VCPU", options.cpus), ("MEMORY", options.memory_mib), ("GPU", options.gpus)]
    variables = {
        **scheduled.host_variables(
            job,
            name,
            base=_BASE,
            machine=options.instance_type or "batch",
            places=scheduled.places_in_volumes(job, name),
            grace_seconds=options.grace_seconds,
            port=options.port,
        ),
        names.HOSTS: " ".join(f"node-{index}" for index in range(job.compute.instance_count)),
        names.CONFIG: place,
        names.MESSAGE: f"{place}/failures",
        "AWS_REGION": region,
    }
    logs = {"awslogs-group": options.log_group, "awslogs-stream-prefix": name}
    return {
        "image": job.image,
        "command": ["train"],  # behind the image's entry point
        "environment": [{"name": key, "value": value} for key, value in variables.items()],
        "resourceRequirements": [{"type": kind, "value": str(amount)} for kind, amount in amounts if amount],
        "linuxParameters": _linux(options),
        "jobRoleArn": options.role or job.role,
        "privileged": options.privileged,
        # EFA registers memory.
        "ulimits": [{"name": "memlock", "hardLimit": -1, "softLimit": -1}] if options.efa else None,
        "volumes": [_volume(index, volume) for index, volume in enumerate(options.volumes)] or None,
        "mountPoints": [
            {"sourceVolume": f"volume-{index}", "containerPath": volume.mount, "readOnly": volume.read_only}
            for index, volume in enumerate(options.volumes)
        ]
        or None,
        "logConfiguration": {"logDriver": "awslogs", "options": logs} if options.log_group != _DEFAULT_GROUP else None,
    }


def _linux(options: Batch) -> Mapping[str, Any]:
    shared = options.shared_memory_mib or max(64, options.memory_mib // 2)
    rights = ["READ", "WRITE", "MKNOD"]
    paths = [f"/dev/infiniband/uverbs{index}" for index in range(options.efa)]
    devices = [{"hostPath": path, "containerPath": path, "permissions": rights} for path in paths]
    return {"sharedMemorySize": shared, "devices": devices or None}


def _volume(index: int, volume: BatchVolume) -> dict[str, Any]:
    if volume.efs is not None:
        efs = {"fileSystemId": volume.efs, "transitEncryption": "ENABLED"}
        return {"name": f"volume-{index}", "efsVolumeConfiguration": efs}
    return {"name": f"volume-{index}", "host": {"sourcePath": volume.host_path}}


# ---- what a job is doing and how it ended ----------------------------------------------------------------------------


def status_of(job: Object, failures: Sequence[tuple[datetime, str]], now: datetime) -> JobStatus:
    """Return the state of a job that `DescribeJobs` describes; `failures` is what its launchers left, and when."""
    status, phase = _state(job)
    over = status in FINAL
    created = _time(job.get("createdAt")) or now
    # A job that waits for its next attempt has the time at which the last one began.
    started = _time(job.get("startedAt")) if over or phase in ("Training", "Stopping") else None
    environment = {variable["name"]: variable["value"] for variable in _container(job).get("environment", ())}
    places = json.loads(environment.get(names.PLACES, "{}"))
    bare = JobStatus(
        name=job["jobName"],
        arn=job["jobArn"],
        status=status,
        phase=phase,
        created=created,
        seen=now,
        ended=(_time(job.get("stoppedAt")) or started or created) if over else None,
        message=job.get("statusReason", ""),
        training_started=started,
        machines=(Machines("nodes", environment.get(names.MACHINE, "batch"), job["nodeProperties"]["numNodes"]),),
        failure=_failure(job, failures) if status == "Failed" else None,
        model_data=places.get("model"),
        checkpoints=places.get("checkpoints"),
        raw={key: value for key, value in job.items() if key != "ResponseMetadata"},
    )
    attempts = list(_attempts(job, current=started if over else None))
    return scheduled.status_with_phases(bare, interrupted=attempts, waiting="waiting for machines")


def _state(job: Object) -> tuple[str, str]:
    ended = bool(job.get("isTerminated") or job.get("isCancelled"))
    state = job["status"]
    if state == "SUCCEEDED":
        return "Completed", "Completed"
    if state == "FAILED":
        if _LIMIT.search(job.get("statusReason", "")):
            return "Stopped", "MaxRuntimeExceeded"
        return ("Stopped", "Stopped") if ended else ("Failed", "Failed")
    return ("Stopping", "Stopping") if ended else ("InProgress", _PHASES.get(state, state.capitalize()))


def _attempts(job: Object, current: datetime | None) -> Iterator[Phase]:
    """Yield the attempts that another one followed."""
    for number, attempt in enumerate(job.get("attempts") or (), 1):
        start, end = _time(attempt.get("startedAt")), _time(attempt.get("stoppedAt"))
        if start and end and start != current:
            yield Phase("Interrupted", f"attempt {number}: {attempt.get('statusReason', '')}", start, end)


def _failure(job: Object, failures: Sequence[tuple[datetime, str]]) -> JobFailure:
    container = job.get("container", {})
    code = f", exit code: {container['exitCode']}" if "exitCode" in container else ""
    words = container.get("reason") or job.get("statusReason") or "Batch does not say why"
    return failure_of(failures, f"{words}{code}")


def _container(job: Object) -> Object:
    container: Object = job["nodeProperties"]["nodeRangeProperties"][0]["container"]
    return container


def _is_ours(job: Object) -> bool:
    return _PLACE in job.get("parameters", {})


def _place(job: Object) -> str:
    place: str = job["parameters"][_PLACE]
    return place


def _time(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc) if milliseconds else None
