"""The back end `slurm`: what its commands do to plan, start, watch and stop runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config.confidential import masked
from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UnsupportedError
from smpkit_estimator.backend import Access, JobSummary, Log, Pace, Query
from smpkit_estimator.clock import SystemClock
from smpkit_estimator.files import Files, Folder
from smpkit_estimator.finding import Finding
from smpkit_estimator.names import base_name, unique_name
from smpkit_estimator.run_folder import run_below
from smpkit_estimator.slurm.commands import Record, accounted, ask, controller_settings, records
from smpkit_estimator.slurm.doctor import check_cluster
from smpkit_estimator.slurm.folder import find_run, make_run, read_json, runs, unmake, write_json
from smpkit_estimator.slurm.log import RunLog
from smpkit_estimator.slurm.plan import SlurmPlan, plan_runs, resumed_run
from smpkit_estimator.slurm.status import status_of
from smpkit_estimator.status import FINAL, JobStatus

__all__ = ["SlurmCluster", "open_slurm"]

_KEPT_STATES = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"})
"""States in which Slurm leaves a job, so they may be kept; a job that is preempted or lost a node is queued again."""


class SlurmCluster:
    """The cluster that Slurm's commands here speak to, and the runs of this user."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.pace = Pace(poll=2.0, streams_per_second=100.0, settle=1.0, wait=2.0)

    @property
    def place(self) -> str:
        try:
            return f"cluster `{controller_settings().get('ClusterName', '')}`"
        except CloudError:
            return "no cluster that answers"

    @property
    def title(self) -> str:
        return f"Slurm in {self.place}"

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> SlurmPlan:
        now = self.clock.now()
        try:
            settings = controller_settings()
        except CloudError as error:
            if not dry:
                raise
            settings = {"KillWait": "30 sec", "": error.message}
        return plan_runs(job, folder, name or unique_name(job.name, now), now, settings, script_only=script_only)

    def submit(self, plan: SlurmPlan) -> dict[str, Any]:
        made: list[Path] = []
        try:
            for run in plan.runs:
                make_run(run.folder, run.spec, plan.script, plan.secrets, plan.sources, plan.code)
                made.append(run.folder)
            number = self._sent(plan)
        except UnreachableError:
            raise  # it may have been started, and needs its folder
        except (SmpkitError, OSError):
            for folder in made:
                unmake(folder)
            raise
        ids = [f"{number}_{index}" for index in range(len(plan.runs))] if plan.is_array else [number]
        for run, each in zip(plan.runs, ids, strict=True):
            write_json(run.folder / "slurm.json", {"id": each})
        names = plan.job_names
        arn = f"slurm:{plan.runs[0].spec['cluster']}/{number}"
        found = {"name": plan.name, "arn": arn, "id": number, "folder": str(plan.runs[0].folder)}
        return {**found, "jobs": list(names)} if plan.is_array else found

    def _sent(self, plan: SlurmPlan) -> str:
        script = plan.runs[0].folder / "script.sh"
        doing = f"cannot start job `{plan.name}`"
        try:
            answer = ask("sbatch", "--parsable", f"--chdir={plan.runs[0].folder}", str(script), doing=doing)
        except UnreachableError as error:
            number = self._found_by_name(plan.name)
            if number is None:
                hint = f"`smpkit status {plan.name}` tells whether it was; look before you start another"
                raise UnreachableError(f"{error.message}; it may have been started all the same", hint=hint) from None
            return number
        return answer.strip().partition(";")[0]

    def _found_by_name(self, name: str) -> str | None:
        try:
            text = ask("squeue", "--noheader", "--me", f"--name={name}", "--format=%A", doing="cannot look for it")
        except CloudError:
            return None
        return text.split()[0] if text.split() else None

    def describe(self, name: str) -> JobStatus:
        run = find_run(name)
        return status_of(name, run, _spec(run), self._record(name, run), self.clock.now())

    def details(self, name: str) -> dict[str, Any]:
        run = find_run(name)
        record = asdict(self._record(name, run))
        times = {key: value.isoformat() for key, value in record.items() if isinstance(value, datetime)}
        return {**_shown(_spec(run)), "folder": str(run), "slurm": {**record, **times}}

    def logs(self, name: str, since: datetime | None = None) -> Log:
        return RunLog(find_run(name), since)

    def stop(self, name: str) -> None:
        run = find_run(name)
        record = self._record(name, run)
        if status_of(name, run, _spec(run), record, self.clock.now()).status in FINAL:
            return
        (run / "stopped").touch()
        doing = f"cannot stop job `{name}`"
        if record.state == "RUNNING":
            # To the launchers alone: the batch script must see how they end.
            ask("scancel", "--signal=TERM", record.id, doing=doing)
        else:
            ask("scancel", record.id, doing=doing)

    def list(self, query: Query) -> Iterator[JobSummary]:
        now = self.clock.now()
        specs = {name: (run, _spec(run)) for name, run in runs() if query.name is None or query.name in name}
        found = sorted(specs.items(), key=lambda item: str(item[1][1]["created"]), reverse=True)
        if query.since is not None:
            found = [item for item in found if datetime.fromisoformat(item[1][1]["created"]) >= now - query.since]
        known = records() if any(not (run / "final.json").exists() for _, (run, _) in found) else {}
        count = 0
        for name, (run, spec) in found:
            try:
                status = status_of(name, run, spec, self._record(name, run, known), now)
            except UnreachableError:
                raise
            except CloudError:
                status = None  # Slurm has forgotten it, and nobody looked before
            state = status.status if status is not None else "Unknown"
            if query.status is not None and state.lower() != query.status.lower():
                continue
            created = datetime.fromisoformat(spec["created"])
            arn, phase, ended = (status.arn, status.phase, status.ended) if status is not None else ("", None, None)
            yield JobSummary(name, arn, state, phase, created, ended)
            count += 1
            if count == query.limit:
                return

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> SlurmPlan:
        changes = changes or {}
        if "InstanceType" in changes:
            hint = "submit the job file with another `backend.slurm.partition`, and the same `checkpoints`"
            raise UnsupportedError("`--instance-type` is not for Slurm, whose nodes have no types", hint=hint)
        run = find_run(name)
        spec = _spec(run)
        now = self.clock.now()
        name = new_name or unique_name(base_name(name), now)
        return resumed_run(run, spec, name, now, changes)

    def files(self, place: str) -> Files:
        if "://" in place:
            raise UnsupportedError(f"{place} is no folder that Slurm's nodes see")
        return Folder(Path(place))

    def run_folder(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        return run_below(Path(_spec(find_run(name))["places"]["output/data"]), name)

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        return check_cluster(job, write=write)

    def _record(self, name: str, run: Path, known: Mapping[str, Record] | None = None) -> Record:
        """Return what is known of a run: how it ended if that was seen, else what Slurm says, else its nodes."""
        final = read_json(run / "final.json")
        if final is not None:
            times = {name: _time(final[name]) for name in ("submitted", "started", "ended")}
            return Record(**{**final, **times})
        sent = read_json(run / "slurm.json")
        job_id = sent["id"] if sent is not None else self._found_by_name(name)
        if job_id is None:
            raise CloudError(f"job `{name}` was not started", hint=f"`rm -r {run}` forgets it")
        record = (known or {}).get(job_id) or _of(job_id, records([job_id])) or accounted(job_id) or _left(run, job_id)
        if record is None:
            raise CloudError(f"Slurm no longer knows job `{name}` ({job_id}), and its nodes left no end")
        if record.state in _KEPT_STATES and record.ended is not None:
            plain = asdict(record)
            write_json(
                run / "final.json", {k: v.isoformat() if isinstance(v, datetime) else v for k, v in plain.items()}
            )
        return record


def open_slurm(access: Access) -> SlurmCluster:  # noqa: ARG001 - Slurm's commands know the way
    """Open the cluster of this machine."""
    return SlurmCluster()


def _time(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)


def _spec(run: Path) -> dict[str, Any]:
    spec = read_json(run / "spec.json")
    if spec is None:
        raise CloudError(f"{run / 'spec.json'} is damaged", hint=f"`rm -r {run}` forgets the job")
    return spec


def _shown(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "environment": masked("", spec["environment"])}


def _of(job_id: str, found: Mapping[str, Record]) -> Record | None:
    """Return a job's record; the tasks of an array that wait have one together."""
    if job_id in found:
        return found[job_id]
    together = found.get(job_id.partition("_")[0])
    return replace(together, id=job_id) if together is not None and "_" in job_id else None


def _left(run: Path, job_id: str) -> Record | None:
    """Return how a run ended by what its nodes left, where Slurm has forgotten it."""
    ends = [end for path in run.glob("nodes/*/ended.json") if (end := read_json(path)) is not None]
    if not ends:
        return None
    last = max(end["attempt"] for end in ends)
    codes = [end["code"] for end in ends if end["attempt"] == last]
    state = "COMPLETED" if not any(codes) else "CANCELLED" if set(codes) == {143} else "FAILED"
    time = datetime.fromtimestamp(max(end["time"] for end in ends)).astimezone()
    return Record(job_id, state, "", None, time, time, last, "", "", len(codes))
