"""Launch one job: from the platform's description to the exit code, with the reason of a failure left behind."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smpkit.drop_in import asks_for_it, installed_one, with_drop_in
from smpkit.errors import ConfigError, LaunchError, Problem, UnsupportedError
from smpkit.modules import module_command
from smpkit.observe.runs import RUN_DIR
from smpkit_container.arguments import script_arguments
from smpkit_container.channel import ADDRESS_VARIABLE
from smpkit_container.command import (
    RANK_MODULE,
    find_mpirun,
    mpirun_command,
    runs_as_root,
    torchrun_command,
)
from smpkit_container.console import Console
from smpkit_container.environment import Environment
from smpkit_container.failure import Failure, launcher_failure, peer_failure, rank_failure, stop_failure, stop_words
from smpkit_container.gathering import Gathered, gather
from smpkit_container.host import run_host
from smpkit_container.log_files import LogFiles
from smpkit_container.outcome import Outcome, Timeouts
from smpkit_container.peers import News
from smpkit_container.root_cause import find_root_cause
from smpkit_container.token import digest, job_token
from smpkit_container.topology import DEFAULT_PORT, Topology, read_topology
from smpkit_container.variables import export, platform_variables, process_variables

__all__ = ["explain", "gpu_notice", "launch", "timeouts_from", "with_smdistributed"]

_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED")
"""What Python needs when it starts on another host; all other variables come from that host's launcher."""


@dataclass(frozen=True)
class _Plan:
    """All that is decided before anything is started."""

    topology: Topology
    command: tuple[str, ...]
    program: tuple[str, ...]
    """The script and its arguments."""
    code: Path
    environ: Mapping[str, str]
    variables: Mapping[str, str]


def launch(
    environment: Environment,
    environ: Mapping[str, str],
    console: Console,
    extra: Sequence[str] = (),
    *,
    stopped_code: int = 0,
    lost_code: int = 1,
) -> int:
    """Run the ranks of this host and return the exit code of the job.

    That is the script's own: of the first failing rank, 128 + n if signal n killed it. After SIGTERM it is
    `stopped_code` if every rank ended with 0; after Ctrl-C it is always 130; `lost_code` if another host was lost. A
    failure is reported on stderr and in `output/failure`.

    Raises:
        SmpkitError: the job cannot be started as described.
    """
    timeouts = timeouts_from(environ)
    topology = read_topology(environment)
    if environ.get(RUN_DIR):
        host = topology.name or topology.host
        console.files = LogFiles(Path(environ[RUN_DIR]), "" if topology.node_rank == 0 else host)
    environ = with_smdistributed(environment, environ, console)
    with _meeting_port(topology) as port:
        token = job_token(environment)
        plan = _planned(environment, topology, port, token, environ, extra, console.is_terminal)
        notice = gpu_notice(environment, topology, plan.environ)
        if notice:
            console.say(f"warning: {notice}")
        environment.folders.make_writable_ones()
        environment.folders.failure.unlink(missing_ok=True)
        with gather(topology, timeouts.start, token) as gathered:
            if gathered.topology is not None:
                environment = _with_hosts(environment, gathered.topology)
                plan = _planned(environment, gathered.topology, port, token, environ, extra, console.is_terminal)
            outcome = _run(plan, gathered, console, timeouts)
            news = gathered.peers.news if gathered.peers else None
    failure = explain(outcome, plan.topology, plan.code, timeouts, news, environment.checkpoints, lost_code)
    if failure is not None:
        console.say(f"\n{failure.screen}")
        write_failure(environment.folders.failure, failure.reason)
        return failure.exit_code
    if outcome.stop_signal:
        console.say(f"\n{stop_words(outcome, environment.checkpoints)}")
        return 128 + signal.SIGINT if outcome.stop_signal == signal.SIGINT else stopped_code
    return 0


def _with_hosts(environment: Environment, topology: Topology) -> Environment:
    """Return the environment with the names that the hosts told each other."""
    hosts = list(topology.hosts)
    raw = {**environment.resources.raw, "hosts": hosts, "current_host": topology.host}
    raw["network_interface_name"] = topology.interface
    resources = replace(
        environment.resources,
        hosts=topology.hosts,
        current_host=topology.host,
        groups=tuple({**group, "hosts": hosts} for group in environment.resources.groups),
        interface=topology.interface,
        raw=raw,
    )
    return replace(environment, resources=resources)


def with_smdistributed(environment: Environment, environ: Mapping[str, str], console: Console) -> Mapping[str, str]:
    """Return `environ` with smpkit's `smdistributed` importable if the script asks for one and none is installed."""
    asking = asks_for_it(environment.code, environment.mp_parameters)
    if asking is None:
        return environ
    name = asking.relative_to(environment.code)
    installed = installed_one()
    if installed is not None:
        console.say(f"`{name}` asks for smdistributed: {installed} is installed, and used instead of smpkit's")
        return environ
    console.say(f"`{name}` asks for smdistributed: smpkit's is on PYTHONPATH")
    return with_drop_in(environ)


def gpu_notice(environment: Environment, topology: Topology, environ: Mapping[str, str]) -> str:
    """Warn of ranks that share GPUs: that works, but probably not as intended. `environ` are the ranks' variables."""
    gpus, ranks = environment.num_gpus, topology.processes_per_host
    if not 0 < gpus < ranks:
        return ""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible})"
    return f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}{why}, over gloo, which is slower than nccl"


def explain(
    outcome: Outcome,
    topology: Topology,
    code: Path,
    timeouts: Timeouts,
    news: News | None = None,
    checkpoints: Path = Path(),
    lost_code: int = 1,
) -> Failure | None:
    """Return why a run failed; None if every rank ended with 0, whatever the exit code of torchrun or mpirun."""
    cut_short = news is not None and any(end.stopped for end in outcome.ends)  # though they may have ended with 0
    if outcome.clean and not cut_short:
        return None
    cause = find_root_cause(outcome.ends)
    if news is not None and (cause is None or cause.culprit.error is None or cause.culprit.is_consequence):
        return peer_failure(news, outcome, topology, lost_code)
    if outcome.stop_signal and (cause is None or cause.culprit.error is None):
        return stop_failure(outcome, topology, timeouts.grace, checkpoints)
    if cause is None:
        return launcher_failure(topology.launcher, outcome, timeouts.start)
    return rank_failure(cause, outcome, topology, code)


def write_failure(path: Path, reason: str) -> None:
    """Leave the reason where the platform looks for it, unless the script has left its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(reason, encoding="utf-8", errors="replace")


def timeouts_from(environ: Mapping[str, str]) -> Timeouts:
    """Return how long to wait; `SMPKIT_GRACE_SECONDS`, `..._SETTLE_...` and `..._START_...` override the defaults.

    Raises:
        ConfigError: one of them is not a number of seconds.
    """
    found: dict[str, float] = {}
    problems = []
    for name in ("grace", "settle", "start"):
        variable = f"SMPKIT_{name.upper()}_SECONDS"
        text = environ.get(variable)
        if not text:
            continue
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = -1
        if not 0 <= found[name] < float("inf"):
            problems.append(Problem(("environment", variable), f"must be a number of seconds, got `{text}`"))
    if problems:
        raise ConfigError(problems, subject="environment")
    return Timeouts(**found)


def _planned(
    environment: Environment,
    topology: Topology,
    port: int,
    token: bytes,
    environ: Mapping[str, str],
    extra: Sequence[str],
    terminal: bool,
) -> _Plan:
    code = environment.code.resolve()
    script = _checked_script(environment.script, code)
    passed = environ.get("SMPKIT_PASS_MP_PARAMETERS") == "1"
    arguments = script_arguments(environment.hyperparameters, extra, pass_mp_parameters=passed)
    variables = {
        **platform_variables(environment, topology, arguments),
        **process_variables(environ, topology, environment.num_cpus, has_efa=environment.has_efa),
        **({"SMPKIT_TERMINAL": "1"} if terminal else {}),
        "SMPKIT_JOB_TOKEN": digest(token, "ranks"),
    }
    if topology.launcher == "mpirun":
        variables |= {"MASTER_ADDR": topology.master, "MASTER_PORT": str(port), "SM_MASTER_PORT": str(port)}
    if topology.launcher == "shell":
        variables["RANK"] = str(topology.node_rank)  # for the launcher; the script does not get it
    # torchrun kills its ranks 30 s after SIGTERM unless told otherwise; the time they get is ours to decide.
    full = export(environ, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, variables)
    command = _command(environment, topology, token, full)
    return _Plan(topology, tuple(command), (script, *arguments), code, full, variables)


def _command(environment: Environment, topology: Topology, token: bytes, environ: Mapping[str, str]) -> list[str]:
    program = module_command(RANK_MODULE)
    if topology.launcher == "shell":
        return program
    if topology.launcher == "torchrun":
        return torchrun_command(topology, program, job=digest(token, "agents"))
    names = [ADDRESS_VARIABLE, *(name for name in _EXPORTED if name in environ)]
    return mpirun_command(
        find_mpirun(environ.get("PATH")),
        topology,
        program,
        custom_options=str(environment.framework.get("sagemaker_mpi_custom_mpi_options") or ""),
        exported=sorted(names),
        environ=environ,
        as_root=runs_as_root(),
    )


def _checked_script(script: str, code: Path) -> str:
    if not script:
        raise LaunchError("the job names no entry point", hint="set `entry_point` to the training script")
    if not (code / script).is_file():
        raise LaunchError(
            f"the entry point `{script}` is not in {code}", hint="`entry_point` is relative to `source_dir`"
        )
    if not script.endswith((".py", ".sh")):
        raise UnsupportedError(
            f"the entry point `{script}` is neither a Python nor a shell script",
            hint="name a file that ends in `.py` or `.sh`",
        )
    return script


def _run(plan: _Plan, gathered: Gathered, console: Console, timeouts: Timeouts) -> Outcome:
    first = plan.topology.node_rank * plan.topology.processes_per_host
    command = gathered.server or plan.command
    try:
        return run_host(
            command,
            program=plan.program,
            ranks=range(first, first + plan.topology.processes_per_host),
            folder=plan.code,
            environ={**plan.environ, **gathered.environ},
            # What ssh starts gets mpirun's variables, those of the first host; this one's own are given at the welcome.
            variables=plan.variables if gathered.place is None else plan.environ,
            console=console,
            timeouts=timeouts,
            peers=gathered.peers,
            place=gathered.place,
        )
    except OSError as error:
        raise LaunchError(f"`{shlex.join(command[:3])} ...` could not be started: {error}") from error


@contextlib.contextmanager
def _meeting_port(topology: Topology) -> Iterator[int]:
    """Yield the port at which ranks under mpirun meet; one that was chosen here stays reserved while they run.

    The reservation is a bound socket that never listens: nobody else is given the port, and rank 0 can still listen on
    it, because both set SO_REUSEADDR.
    """
    if topology.port or not topology.single_host:
        yield topology.port or DEFAULT_PORT
        return
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((topology.master, 0))
        yield int(reservation.getsockname()[1])
