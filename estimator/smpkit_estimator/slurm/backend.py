"""The back end `slurm`: what its commands do to plan, start, watch and stop runs."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.backend import Slurm
from smpkit.config.confidential import HIDDEN, hide_in_line, masked
from smpkit.config.job import Checkpoints, JobConfig
from smpkit.config.section import KeyPath
from smpkit.errors import CloudError, Problem, UnreachableError
from smpkit.modules import module_command
from smpkit.units import things
from smpkit_estimator import scheduled
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
    run_below,
    tried,
    undone_if_refused,
    unique_name,
)
from smpkit_estimator.checkpoints import newest_in_folder
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.local import local_inputs, local_secrets
from smpkit_estimator.scheduled import limit_of
from smpkit_estimator.slurm.folder import (
    Run,
    all_runs,
    find_run,
    kept_job,
    make_run,
    named_places,
    read_json,
    run_log,
    runs_folder,
    unmake_run,
    write_json,
)
from smpkit_estimator.slurm.state import ask, controller_settings, id_by_name, listed_run, record_of, records, status_of
from smpkit_estimator.sources import Sources, job_sources, pack, packing_notes
from smpkit_estimator.status import JobStatus

_MAX_GRACE_SECONDS = 110  # as on SageMaker
_MARGIN_SECONDS = 5
_SHORT_GRACE_SECONDS = 60


class SlurmCluster:
    """The cluster that Slurm's commands here speak to, and the runs of this user; it needs no `Access`."""

    def __init__(self, _: Access | None = None) -> None:
        self.clock = Clock()
        self.pace = 2.0

    @property
    def title(self) -> str:
        try:
            return f"Slurm in cluster `{controller_settings()['ClusterName']}`"
        except CloudError:
            return "Slurm, which does not answer"

    def plan(self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False) -> Plan:
        unknown = StandIns(dry)
        settings: Mapping[str, str] = unknown.get(controller_settings, {}, ": `KillWait` is taken as 30 s")
        problems: list[Problem] = []
        sources = job_sources(job, folder, problems, instead_of_s3="name a local folder")
        inputs = dict(local_inputs(job, folder, problems))
        hidden = dict(local_secrets(job, problems))
        absolute = _with_absolute_places(job, folder, inputs)
        chosen = name or unique_name(job.name, self.clock.now())
        return _plan(absolute, chosen, settings, hidden, problems=problems, notes=unknown.notes, sources=sources)

    def submit(self, plan: Plan) -> dict[str, Any]:
        run: Run = plan.payload
        with preparing():
            make_run(run, self.clock.now())
        with undone_if_refused(lambda: unmake_run(run.folder)):
            number = self._sent(run.folder)
        write_json(run.folder / "slurm.json", {"id": number})
        return {"name": plan.name, "arn": f"slurm:{run.cluster}/{number}", "id": number, "folder": str(run.folder)}

    def _sent(self, run: Path) -> str:
        doing = f"cannot start job `{run.name}`"
        try:
            answer = ask("sbatch", "--parsable", f"--chdir={run}", str(run / "script.sh"), doing=doing)
        except UnreachableError as error:
            with contextlib.suppress(CloudError):
                if (number := id_by_name(run.name)) is not None:
                    return number
            raise in_doubt(error, run.name) from None
        return answer.strip().partition(";")[0]

    def describe(self, name: str) -> JobStatus:
        run = find_run(name)
        return status_of(run, record_of(run), self.clock.now())

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        return run_log(find_run(name), since, tail)

    def stop(self, name: str) -> None:
        run = find_run(name)
        record = record_of(run)
        if status_of(run, record, self.clock.now()).over:
            return
        (run / "stopped").touch()
        # Of a job that runs, the launchers alone are told: the batch script must see how they end.
        signal = ["--signal=TERM"] if record.state == "RUNNING" else []
        ask("scancel", *signal, record.id, doing=f"cannot stop job `{name}`")

    def list(self, query: Query) -> Iterator[JobStatus]:
        now = self.clock.now()
        runs = sorted(all_runs(), key=lambda run: (run / "job.json").stat().st_mtime, reverse=True)
        known = records() if runs else {}
        yield from query.of((listed_run(run, known, now) for run in runs), now)

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        old = find_run(name)
        kept = kept_job(old)["job"]
        if changes and "MaxRuntimeInSeconds" in changes:
            kept.get("backend", {}).get("slurm", {}).pop("time", None)
        job = scheduled.job_again(kept, changes, machine="backend.slurm.partition")
        checkpoints = Checkpoints(uri=str((old / "checkpoints").resolve()))
        job = job.model_copy(update={"checkpoints": checkpoints})
        variables = read_json(old / "variables.json")
        hidden = {key: variables[key] for key in job.secrets if key in variables}
        chosen = new_name or unique_name(base_name(name), self.clock.now())
        return _plan(job, chosen, controller_settings(), hidden, code=old / "code")

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        checks = [tried("slurm", _version)]
        if checks[0].state == "ok" and job is not None:
            checks.append(tried("partition", lambda: _partition(job)))
        if checks[0].state == "ok" and write:
            checks.append(tried("runs", lambda: _writable(job)))
        return checks

    def results(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        return run_below(find_run(name) / "output" / "data", name)

    def latest_checkpoint(self, place: str) -> str | None:
        return newest_in_folder(place, "a file system of the nodes")


# ---- from a job file to a run ----------------------------------------------------------------------------------------


def _plan(
    job: JobConfig,
    name: str,
    settings: Mapping[str, str],
    hidden: Mapping[str, str],
    *,
    problems: Sequence[Problem] = (),
    notes: Sequence[str] = (),
    sources: Sources | None = None,
    code: Path | None = None,
) -> Plan:
    """Decide everything about a run of a job file whose places are absolute.

    Args:
        settings: of the cluster.
        hidden: the variables that are secrets.
        code: the sources of a run that this one goes on from; `sources` are packed otherwise.
    """
    options = job.backend.slurm
    problems = [*_not_for_slurm(job, name), *problems]
    runtime = _container_runtime(options, job.image, problems)
    refuse(problems, "Slurm")
    if sources is not None:
        notes = [*notes, *packing_notes(pack(sources))]
    root = Path(options.folder) if options.folder else runs_folder()
    run = root / name
    inputs = {channel: Path(str(source.uri)) for channel, source in job.inputs.items()}
    places = [str(place.parent) for place in named_places(job).values()]
    mounts = [str(root), *map(str, inputs.values()), *places, *options.mounts]
    around, before = container_words(runtime, job.image, mounts, gpus=bool(options.gpus_per_node or options.gres))
    python = ["python3", "-P", "-m", "smpkit_container"] if around or before else module_command("smpkit_container")
    script = batch_script(job, run, [*around], [*before, *python, "train"])
    variables = scheduled.host_variables(
        job,
        name,
        base=f"{run}/nodes/{{host}}",
        machine=options.partition or "slurm",
        places={part: str(run / part) for part in ("input", "model", "output/data", "checkpoints")},
        grace_seconds=options.grace_seconds or _grace_seconds(settings),
        interface=options.interface,
    )
    variables |= {names.STOP_FILE: str(run / "stopped"), "SMPKIT_LOG_TIMES": "1"}
    sent = hyperparameters(
        job, submit_directory=str(run / "code"), job_name=name, launcher="torchrun", token_file=str(run / "token")
    )
    files = scheduled.config_files(job, sent)
    shown_script = "\n".join(map(hide_in_line, script.split("\n")))
    shown = {
        **scheduled.shown_files(files),
        "variables": {**masked("", variables), **dict.fromkeys(hidden, HIDDEN)},
    }
    texts = {file: json.dumps(content, indent=2, ensure_ascii=False) for file, content in shown.items()}
    comments = [f"# {file}.json\n{textwrap.indent(text, '# ')}\n" for file, text in texts.items()]
    cluster = settings.get("ClusterName", "")
    return Plan(
        name=name,
        machines=things(job.compute.instance_count, "node") + (f" of {options.partition}" if options.partition else ""),
        shown={"script": shown_script, "folder": str(run), **shown},
        payload=Run(run, script, job, files, {**variables, **hidden}, inputs, cluster, sources, code),
        max_seconds=None if options.time else scheduled.limit_of(job),
        notes=(*notes, *_notes(job, settings)),
        script="\n".join([shown_script, *comments]),
    )


def _with_absolute_places(job: JobConfig, folder: Path, inputs: Mapping[str, Path]) -> JobConfig:
    channels = {
        name: source.model_copy(update={"uri": str(inputs.get(name, source.uri))})
        for name, source in job.inputs.items()
    }
    updates: dict[str, Any] = {"inputs": channels}
    if job.output is not None and "://" not in job.output:
        updates["output"] = str((folder / job.output).absolute())
    if job.checkpoints is not None and "://" not in job.checkpoints.uri:
        kept = str((folder / job.checkpoints.uri).absolute())
        updates["checkpoints"] = job.checkpoints.model_copy(update={"uri": kept})
    options = job.backend.slurm
    if options.folder is not None:
        moved = options.model_copy(update={"folder": str((folder / options.folder).absolute())})
        updates["backend"] = job.backend.model_copy(update={"slurm": moved})
    return job.model_copy(update=updates)


def _not_for_slurm(job: JobConfig, name: str) -> Iterator[Problem]:
    yield from scheduled.not_for_schedulers(job, name)
    places: dict[KeyPath, str | None] = {("output",): job.output}
    places["checkpoints", "uri"] = job.checkpoints.uri if job.checkpoints is not None else None
    for path, uri in places.items():
        if uri is not None and "://" in uri:
            yield Problem(path, f"is not a folder that the nodes see: `{uri}`", "name a folder on a shared file system")


def _notes(job: JobConfig, settings: Mapping[str, str]) -> Iterator[str]:
    yield from scheduled.notes(job, "Slurm", "on Slurm, mpirun would start its processes with srun")
    options = job.backend.slurm
    if job.image is not None and options.container == "none":
        yield f"the image {job.image} is not used: `backend.slurm.container` is `none`"
    grace = options.grace_seconds or _grace_seconds(settings)
    if grace < _SHORT_GRACE_SECONDS and "SMPKIT_GRACE_SECONDS" not in job.environment:
        yield f"when the job is stopped or preempted, ranks have {grace} s to save (the cluster's `KillWait`)"


def _grace_seconds(settings: Mapping[str, str]) -> int:
    """Return how long ranks may save: Slurm sends SIGKILL `KillWait` seconds after SIGTERM."""
    seconds = re.match(r"\d+", settings.get("KillWait", "30"))
    return max(1, min(_MAX_GRACE_SECONDS, int(seconds[0]) - _MARGIN_SECONDS)) if seconds else 25


def _container_runtime(options: Slurm, image: str | None, problems: list[Problem]) -> str:
    """Return what starts the image: `pyxis`, `apptainer`, or `none` where the job names no image."""
    if image is None or options.container == "none":
        return "none"
    if options.container != "auto":
        return options.container
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options_of_srun = subprocess.run(["srun", "--help"], capture_output=True, text=True, timeout=20, check=False)
        if "--container-image" in options_of_srun.stdout:
            return "pyxis"
    if shutil.which("apptainer"):
        return "apptainer"
    hint = "name one with `backend.slurm.container`, or set it to `none` to run in the environment that submits"
    message = "is a container image, and neither pyxis nor Apptainer was found here to start it"
    problems.append(Problem(("image",), message, hint))
    return "none"


# ---- smpkit doctor ---------------------------------------------------------------------------------------------------


def _version() -> Finding:
    version = ask("sbatch", "--version", doing="cannot use Slurm").strip()
    return Finding("slurm", "ok", f"{version}: cluster `{controller_settings()['ClusterName']}` answers")


def _partition(job: JobConfig) -> Finding:
    """Ask Slurm whether it would take the job; nothing is started."""
    script = batch_script(job, runs_folder() / job.name, [], ["true"])
    with tempfile.NamedTemporaryFile("w", prefix="smpkit-", suffix=".sh") as file:
        file.write(script)
        file.flush()
        ask("sbatch", "--test-only", file.name, doing="this job cannot run")
    return Finding("partition", "ok", f"Slurm would start {job.compute.instance_count} nodes for the job")


def _writable(job: JobConfig | None) -> Finding:
    chosen = job.backend.slurm.folder if job is not None else None
    root = Path(chosen).absolute() if chosen else runs_folder()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"):
            pass
    except OSError as error:
        raise CloudError(f"cannot write to {root}: {error.strerror}", hint="set `backend.slurm.folder`") from None
    return Finding("runs", "ok", f"wrote to and deleted from {root}")


# ---- the batch script, whose text `smpkit submit --dry-run` prints and `sbatch` gets ---------------------------------


def batch_script(job: JobConfig, run: Path, around: Sequence[str], command: Sequence[str]) -> str:
    """Return the script; `around` are more options of `srun`, `command` is what every node runs."""
    options, nodes, cpus = job.backend.slurm, job.compute.instance_count, _cpus(job)
    srun = [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        # A launcher hears from the others why they ended; srun must not kill it meanwhile.
        *("--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"),
        *around,
    ]
    sbatch = "\n".join(f"#SBATCH {option}" for option in _sbatch_options(job, run))
    setup = "".join(f"{line}\n" for line in options.setup)
    requeue = '  scontrol requeue "$SLURM_JOB_ID" && sleep 60\n' if options.requeue else ""
    return f"""\
#!/bin/bash
{sbatch}

run={shlex.quote(str(run))}
began=$(date +%s)
trap 'echo "$? ${{SLURM_RESTART_COUNT:-0}} $began $(date +%s)" > "$run/ended"' EXIT
[ ! -e "$run/stopped" ] || exit 0
{setup}hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr "\\n" " ")
address=$(scontrol --oneliner show node "${{hosts%% *}}" | grep -o ' NodeAddr=[^ ]*')
export {names.HOSTS}="$hosts" {names.FIRST_HOST}="${{address#*=}}" {names.VARIABLES}="$run/variables.json"
# Below the ports of outgoing connections; jobs that share a node do not meet at one port.
export {names.PORT}=$((12000 + 2 * (SLURM_JOB_ID % 10000)))
attempt="$run/logs/${{SLURM_RESTART_COUNT:-0}}"
echo "$hosts" > "$attempt.hosts"
# %n is the number of the node.
{shlex.join(srun)} --output="$attempt-%n.log" {shlex.join(command)}
code=$?
# SIGTERM ended it: the job was preempted with a time of grace, or somebody stopped it. After the request to queue it
# again, Slurm ends this script, which must not end before with a code of its own.
if [ "$code" = {names.STOPPED} ]; then
  [ ! -e "$run/stopped" ] || exit 0
{requeue}fi
exit "$code"
"""


def _cpus(job: JobConfig) -> int | None:
    """Return the CPUs of each node; None leaves them to Slurm, which gives all of a node with `exclusive`."""
    options = job.backend.slurm
    return options.cpus_per_node or (None if options.exclusive else job.distribution.processes_per_host)


def _sbatch_options(job: JobConfig, run: Path) -> Iterator[str]:
    options, seconds = job.backend.slurm, limit_of(job)
    values = {
        "job-name": run.name,
        "nodes": job.compute.instance_count,
        "ntasks-per-node": 1,
        "cpus-per-task": _cpus(job),
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time or (_time_limit(seconds) if seconds is not None else None),
        "gpus-per-node": options.gpus_per_node,
        "gres": options.gres,
        "mem": options.memory,
        "constraint": options.constraint,
        "reservation": options.reservation,
    }
    yield from (f"--{name}={_word(str(value))}" for name, value in values.items() if value is not None)
    if options.exclusive:
        yield "--exclusive"
    yield "--requeue" if options.requeue else "--no-requeue"
    yield f"--output={_word(f'{run}/logs/slurm.log'.replace('%', '%%'))}"
    yield "--open-mode=append"
    yield from options.options


def _word(text: str) -> str:
    """Quote a value as sbatch reads it in a script."""
    if re.fullmatch(r"[\w%+,./:@=&|*()\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _time_limit(seconds: int) -> str:
    """Return a time limit in Slurm's form, which has whole minutes."""
    hours, minutes = divmod(-(-seconds // 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00"


def container_words(
    runtime: str, image: str | None, mounts: Sequence[str], *, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of srun, and the words before the command, that run it in an image."""
    if image is None or runtime == "none":
        return (), ()
    pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in dict.fromkeys(mounts)]
    if runtime == "pyxis":
        # As enroot has it: a `#` between the registry and the path.
        name = image if image.startswith(("/", ".")) else re.sub(r"^([^/]+[.:][^/]*)/", r"\1#", image)
        return (f"--container-image={name}", f"--container-mounts={','.join(pairs)}", "--no-container-mount-home"), ()
    name = image if image.startswith(("/", ".")) or "://" in image else f"docker://{image}"
    binds = [word for pair in pairs for word in ("--bind", pair)]
    return (), ("apptainer", "exec", *(("--nv",) if gpus else ()), *binds, name)
