"""Launch one job: from the platform's description to the exit code, with the reason of a failure left behind."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from smpkit.config.mpi_options import exported_values
from smpkit.config.wire import MPI_OPTIONS
from smpkit.drop_in import asks_for_it, installed_one, with_drop_in
from smpkit.errors import ConfigError, LaunchError, Problem, UnsupportedError
from smpkit.observe.runs import RUN_DIR, SUMMARY
from smpkit.observe.summary import RankSummary, RunSummary, Split, SummaryError, read_summary, write_summary
from smpkit.units import things
from smpkit_container.aws import digest, job_token
from smpkit_container.console import Console
from smpkit_container.environment import Environment
from smpkit_container.failure import explain, stop_words, write_failure
from smpkit_container.mpi import Ssh, find_mpirun, mpirun_command
from smpkit_container.peers import News, meet
from smpkit_container.supervise import ADDRESS_VARIABLE, STAND_IN, Host, Outcome, Starter, Timeouts, meeting_place
from smpkit_container.topology import DEFAULT_PORT, Topology, interface_with, read_topology
from smpkit_container.variables import (
    mpi_rank_variables,
    platform_variables,
    process_variables,
    script_arguments,
    torchrun_variables,
)

_EXPORTED = ("PATH", "LD_LIBRARY_PATH")
"""What Python needs to start a stand-in on another host; its rank gets the variables of that host's launcher."""

_OF_SCHEDULERS = ("SLURM_", "PBS_")
"""Variables by which mpirun takes the hosts of an allocation, of which none has the names that it is given."""


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
    """
    job = _Launch(environment, environ, console)
    outcome, news = job.run(extra)
    code, checkpoints = environment.code.resolve(), environment.checkpoints
    failure = explain(outcome, job.topology, code, job.timeouts, news, checkpoints, lost_code)
    with _undisturbed():
        if failure is not None:
            console.say(f"\n{failure.screen}")
            write_failure(environment.folders.failure, failure.reason)
            job.leave_summary(outcome, f"failed: {failure.reason.splitlines()[0]}")
            return failure.exit_code
        if outcome.stop_signal:
            console.say(f"\n{stop_words(outcome, checkpoints)}")
            job.leave_summary(outcome, "stopped")
            return 128 + signal.SIGINT if outcome.stop_signal == signal.SIGINT else stopped_code
    return 0


class _Launch:
    """What is known of a job, which is more after its hosts have met."""

    def __init__(self, environment: Environment, environ: Mapping[str, str], console: Console) -> None:
        self.timeouts = timeouts_from(environ)
        self.topology = read_topology(environment)
        self._environment = environment
        self._console = console
        self._run = Path(environ[RUN_DIR]) if environ.get(RUN_DIR) else None
        if self._run is not None:
            console.keep_logs(self._run, "" if self.topology.node_rank == 0 else self.topology.host)
        self._environ = with_smdistributed(environment, environ, console)
        self._mpi_options = str(environment.framework.get(MPI_OPTIONS) or "")
        self._token = job_token(environment)

    def run(self, extra: Sequence[str]) -> tuple[Outcome, News | None]:
        """Meet the other hosts, and run the ranks of this one."""
        self._environment.folders.make_writable_ones()
        self._environment.folders.failure.unlink(missing_ok=True)
        if self._run is not None:  # of an attempt before
            (self._run / SUMMARY).unlink(missing_ok=True)
        first = self.topology.node_rank * self.topology.processes_per_host
        with _room(self._environment.folders.output), contextlib.ExitStack() as stack:
            port = stack.enter_context(meeting_port(self.topology))
            place = meeting_place()
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            ssh = peers = None
            if not self.topology.single_host:
                if self.topology.launcher == "mpirun":
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="smpkit-ssh-"))
                    ssh = Ssh(Path(folder), place, port + 2)
                facts = ssh.facts if ssh else {}
                peers = stack.enter_context(meet(self.topology, facts, self.timeouts.start, port + 1, self._token))
                self._find_interface(peers.own_address)
            program = self._program(extra)
            variables = self._variables(program[1:], port)
            starter = None
            if ssh is not None and peers is not None and not peers.is_first:
                command, place = ssh.server(peers)
                stack.callback(shutil.rmtree, place, ignore_errors=True)
                starter = Starter(command, self._environ, serves=True)
            elif self.topology.launcher == "mpirun":
                agent = ssh.client_environment(peers) if ssh and peers else {}
                starter = self._mpirun({**self._environ, **variables, **agent})

            def environ_of(rank: int, theirs: Mapping[str, str]) -> Mapping[str, str]:
                if starter is None:
                    own = {**self._environ, **variables}
                    if self.topology.launcher == "shell":
                        return own
                    return own | torchrun_variables(self.topology, rank, digest(self._token, "agents"), self._environ)
                # mpirun gives every host the variables of the first one (SM_CURRENT_HOST!), and those of its options.
                own = {**self._environ, **variables} if starter.serves else variables
                theirs = {**self._environ, **theirs}  # mpirun did not get all of them
                return {**theirs, **own, **exported_values(self._mpi_options), **mpi_rank_variables(theirs)}

            try:
                outcome = Host(
                    range(first, first + self.topology.processes_per_host),
                    program,
                    self._environment.code.resolve(),
                    environ_of,
                    place,
                    self._console,
                    self.timeouts,
                    starter,
                    peers,
                ).run()
            except OSError as error:
                raise LaunchError(f"the ranks could not be started: {error}") from error
            return outcome, peers.news if peers else None

    def _find_interface(self, own_address: str) -> None:
        """Take the interface of the launchers where none is named, or none that this host has.

        SDK v3's local mode says `ethwe`, as SageMaker once called it, whatever Docker has.
        """
        named, here = self.topology.interface, {name for _, name in socket.if_nameindex()}
        if here & {*named.split(",")}:
            return
        self.topology = replace(self.topology, interface=interface_with(own_address))
        if named:
            instead = f"`{self.topology.interface}` is used" if self.topology.interface else "torch chooses one"
            self._console.say(f"warning: this host has no network interface `{named}`: {instead}")

    def leave_summary(self, outcome: Outcome, exit_reason: str) -> None:
        """Note how a run ended in the summary that its rank 0 left, or in one of what ranks of the first host noted."""
        pages = {end.rank: end.doing for end in outcome.ends if end.doing is not None}
        if self._run is None or all(end.rank for end in outcome.ends):
            return
        if (self._run / SUMMARY).exists():
            with contextlib.suppress(SummaryError):
                write_summary(self._run, replace(read_summary(self._run), exit_reason=exit_reason))
            return
        if 0 not in pages:
            return
        length = max(page.step_seconds for page in pages.values())
        pipeline, tensor, data = pages[0].degrees or (1, 1, 1)
        held = {rank: page.held for rank, page in pages.items() if page.held is not None}
        step = min(page.step for page in pages.values())
        summary = RunSummary(
            name=self._environment.job_name or Path(self._environment.script).stem,
            started=time.time() - outcome.seconds,
            seconds=outcome.seconds,
            steps=min(page.num_trained for page in pages.values()),
            exit_reason=exit_reason,
            steps_per_s=1 / length if length else None,
            world_size=self.topology.world_size,
            pipeline=pipeline,
            tensor=tensor,
            data=data,
            ranks=tuple(
                RankSummary(rank, socket.gethostname(), Split(), most, most.on_device, None, pages[rank].planned)
                for rank, most in held.items()
            ),
            notes=(f"memory is the most up to step {step}, or in a step that failed",) if held else (),
        )
        with contextlib.suppress(SummaryError):  # a full disk, of which the logs have told
            write_summary(self._run, summary)

    def _program(self, extra: Sequence[str]) -> tuple[str, ...]:
        """Return the script and its arguments: hyperparameters, then `extra`."""
        script, code = self._environment.script, self._environment.code.resolve()
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
        passed = self._environ.get("SMPKIT_PASS_MP_PARAMETERS") == "1"
        return script, *script_arguments(self._environment.hyperparameters, extra, pass_mp_parameters=passed)

    def _variables(self, arguments: Sequence[str], port: int) -> dict[str, str]:
        """Return what all ranks of this host have beyond the launcher's own variables, and warn of shared GPUs."""
        environment, topology = self._environment, self.topology
        variables = {
            **platform_variables(environment, topology, arguments),
            **process_variables(self._environ, topology, environment.num_cpus),
            "SMPKIT_JOB_TOKEN": digest(self._token, "ranks"),
        }
        if self._console.is_terminal:
            variables["SMPKIT_TERMINAL"] = "1"
        if topology.launcher != "shell":
            variables |= {"MASTER_ADDR": topology.master, "MASTER_PORT": str(port), "SM_MASTER_PORT": str(port)}
        notice = gpu_notice(environment, topology, {**self._environ, **variables})
        if notice:
            self._console.say(f"warning: {notice}")
        return variables

    def _mpirun(self, environ: Mapping[str, str]) -> Starter:
        environ = {name: value for name, value in environ.items() if not name.startswith(_OF_SCHEDULERS)}
        command = mpirun_command(
            find_mpirun(environ.get("PATH")),
            self.topology,
            STAND_IN,
            custom_options=self._mpi_options,
            exported=sorted([ADDRESS_VARIABLE, *(name for name in _EXPORTED if name in environ)]),
            environ=environ,
        )
        return Starter(tuple(command), environ)


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
    return f"{ranks} ranks share {things(gpus, 'GPU')}{why}, over gloo, which is slower than nccl"


def timeouts_from(environ: Mapping[str, str]) -> Timeouts:
    """Return how long to wait; `SMPKIT_GRACE_SECONDS`, `..._SETTLE_...` and `..._START_...` override the defaults."""
    seconds: dict[str, float] = {}
    problems = []
    for name in ("grace", "settle", "start"):
        variable = f"SMPKIT_{name.upper()}_SECONDS"
        if text := environ.get(variable):
            with contextlib.suppress(ValueError):
                seconds[name] = float(text)
            if not 0 <= seconds.get(name, -1) < float("inf"):
                problems.append(Problem(("environment", variable), f"must be a number of seconds, got `{text}`"))
    if problems:
        raise ConfigError(problems, subject="environment")
    return Timeouts(**seconds)


@contextlib.contextmanager
def meeting_port(topology: Topology) -> Iterator[int]:
    """Yield the port at which ranks meet; one that was chosen here stays reserved while they run.

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


_ROOM_BYTES: Final = 16 << 10


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Hold a little of the disk while ranks run: where they fill it, the reason of the job's end must still fit."""
    file = folder / ".room"
    with contextlib.suppress(OSError):
        file.write_bytes(bytes(_ROOM_BYTES))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGTERM while the launcher tells how the ranks have ended: nothing is left to be stopped."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
