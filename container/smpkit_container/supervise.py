"""Run the ranks of one host: start them, show what they print, pass on signals, and end all when one fails.

Ranks are children of the launcher. A run goes through the phases of `Phase`::

    RUNNING ── a rank fails ──────► SETTLING ──► ASKING ──► ENDING ──► KILLING
       │                            the others    where      SIGTERM    SIGKILL
       │                            usually fail  are they?
       └── SIGTERM, SIGINT ───────► STOPPING (the ranks save; up to the grace period) ──► KILLING

Where a job asks for MPI, mpirun starts a stand-in (`stand_in.py`) in place of each rank: it sends the launcher the
environment that it got, the launcher starts the rank with that, and the stand-in ends as the rank does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from smpkit.modules import module_command
from smpkit.observe.status import STATUS_DIR, RankStatus, read_status
from smpkit.units import things
from smpkit_container.console import Console, LineSplitter, Live, Piece
from smpkit_container.peers import News, Peers
from smpkit_container.rank import LINK
from smpkit_container.root_cause import RankEnd, RankError, RootCause, find_root_cause

ADDRESS_VARIABLE = "SMPKIT_LAUNCHER"
"""Where the launcher of this host listens for stand-ins."""
STAND_IN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")))

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FOR_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends them to all processes of a job, such as by `--signal=USR1@90`: scripts save, the launcher goes on."""
_CHUNK_BYTES = 1 << 16
_KEPT_OUTPUT_BYTES = 16384
_KEPT_LINES = 20
_SWEEP_SECONDS = 1.0
_SWEEP_POLL_SECONDS = 0.02
_FOREVER = float("inf")


class Phase(Enum):
    """What the launcher of a host is waiting for. In every phase the run is over once no rank runs or is still to come.

    A second Ctrl-C leads from any phase but the first to `KILLING`.
    """

    # Ranks start and train. Deadline: `start`, for all of them to have started; none after that. Leaves when a rank or
    # another host fails, mpirun ends, or a signal asks the run to stop.
    RUNNING = auto()
    # Something failed. The other ranks usually notice and fail by themselves, with a traceback that says where they
    # were: signals sent now would destroy it. Deadline: `settle`.
    SETTLING = auto()
    # The ranks that still run were asked, by SIGUSR1, for their stacks: they hang, and the report shows where.
    # Deadline: `answer` until the last of them begins to answer, then `ask` more.
    ASKING = auto()
    # The ranks that still run have got SIGTERM because the run failed or did not start in time; also if the run was
    # asked to stop while it was failing: then there is nothing worth saving. Deadline: `end`.
    ENDING = auto()
    # The run was asked to stop: the ranks have got SIGTERM and save their state. Deadline: `grace`.
    STOPPING = auto()
    # The ranks that still run have got SIGKILL. Deadline: `end`; a rank that is there even then is left behind.
    KILLING = auto()


@dataclass(frozen=True)
class Timeouts:
    """How long each wait may take, in seconds."""

    start: float = 900.0
    """Until every rank has started."""
    settle: float = 2.0
    """For the other ranks to fail by themselves after the first one did."""
    ask: float = 0.5
    """For ranks that still run to finish writing their stacks, once the last of them has begun."""
    answer: float = 5.0
    """For all of them to begin: a busy machine takes its time, but a rank that cannot write must not delay the end."""
    end: float = 3.0
    """Between SIGTERM and SIGKILL when a run has failed."""
    grace: float = 110.0
    """Between SIGTERM and SIGKILL when the run was asked to stop; SageMaker kills the container after 120."""
    leave: float = 10.0
    """For mpirun to exit after the ranks."""
    hear: float = 10.0
    """For another host to say why it ended when ranks here noticed only that others were gone."""


@dataclass(frozen=True)
class Outcome:
    """All that is known when the ranks of this host are gone."""

    ends: tuple[RankEnd, ...]
    """How each rank ended that was started."""
    missing: tuple[int, ...] = ()
    """Ranks that never started."""
    mpirun_status: int = 0
    mpirun_output: str = ""
    stop_signal: int = 0
    """The signal that asked the run to stop; 0 if none did."""
    late: bool = False
    """Whether the run was given up because ranks did not start in time."""
    overdue: bool = False
    """Whether ranks had to be killed because the grace period was over."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether every rank was started and ended with exit code 0."""
        return not self.missing and all(end.status == 0 and not end.failed for end in self.ends)


@dataclass(frozen=True)
class Starter:
    """What starts the stand-ins of ranks: mpirun, or on other hosts than the first one the ssh server that it uses."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    serves: bool = False
    """Whether it is a server, which does not end by itself."""


def meeting_place() -> Path:
    """Make a folder for the socket of a host's launcher, with a short path: a socket's has at most about 100 bytes."""
    return Path(tempfile.mkdtemp(prefix="smpkit-", dir="/tmp" if Path("/tmp").is_dir() else None))  # noqa: S108


class _Rank:
    """One rank: its process, the pipes from it, and what came through them."""

    def __init__(self, number: int, program: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self.number = number
        self.splitters = {"out": LineSplitter(), "err": LineSplitter()}
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.notes = {"report": b"", "stack": b""}
        self.status: int | None = None
        self.ended_seconds = 0.0
        self.peak_bytes = 0
        self.was_cut_short = False
        """Whether it still ran when the launcher began to end a run that had failed."""
        self.doing: RankStatus | None = None
        """What it did as it ended, if it uses smpkit."""
        self.is_swept = False
        self._sweep_at = 0.0
        report, stack, life_line = os.pipe(), os.pipe(), os.pipe()
        theirs = (report[1], stack[1], life_line[0])
        try:
            self.process = subprocess.Popen(
                [*module_command("smpkit_container.rank"), *program],
                cwd=folder,
                env={**environ, LINK: ",".join(map(str, theirs))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=theirs,
                start_new_session=True,  # so that the terminal's Ctrl-C comes to the launcher only
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.pipes: dict[str, Any] = {
            "out": self.process.stdout,
            "err": self.process.stderr,
            "report": open(report[0], "rb", buffering=0),  # noqa: PTH123, SIM115
            "stack": open(stack[0], "rb", buffering=0),  # noqa: PTH123, SIM115
        }
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._life_line = life_line[1]

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def failed(self) -> bool:
        return bool(self.status) or bool(self.notes["report"])

    def signal(self, number: int) -> None:
        """Send a signal to the rank; SIGKILL goes to everything it started, too."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def reap(self) -> bool:
        """Note how the process ended; return False if it still runs."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return False
        self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.ended_seconds = time.time()
        self.peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self._sweep_at = time.monotonic() + _SWEEP_SECONDS
        self.sweep()
        return True

    def sweep(self) -> None:
        """Kill what the rank left running, after a moment for its helpers to clean up (shared memory, semaphores)."""
        is_due = time.monotonic() >= self._sweep_at
        try:
            os.killpg(self.process.pid, signal.SIGKILL if is_due else 0)
        except (ProcessLookupError, PermissionError):  # nothing is left
            is_due = True
        self.is_swept = is_due

    def close(self) -> None:
        """Kill it if it still runs, and close what is open."""
        self.signal(signal.SIGKILL)
        for pipe in self.pipes.values():
            pipe.close()
        os.close(self._life_line)

    def end(self) -> RankEnd:
        report = self.notes["report"]
        return RankEnd(
            rank=self.number,
            status=self.status,
            seconds=self.ended_seconds,
            # The last of several: a child that the script forked may have reported, too.
            error=RankError(**json.loads(report.splitlines()[-1])) if report.endswith(b"\n") else None,
            stopped=self.was_cut_short,
            last_lines=tuple(self.last_lines),
            peak_bytes=self.peak_bytes,
            stack=self.notes["stack"].decode("utf-8", errors="replace"),
            doing=self.doing,
        )


class Host:
    """The loop over everything that can happen on one host while a run lasts.

    Args:
        ranks: their numbers.
        program: the script that every rank runs, and its arguments.
        folder: where ranks work.
        environ_of: returns the environment of a rank, from its number and what mpirun has set for it.
        place: an empty folder for the socket and the ranks' status pages, such as `meeting_place` makes.
        starter: what starts stand-ins; None: ranks are started without any.
        peers: the other hosts of the job; if one of them fails or is lost, the run ends here, too.
    """

    def __init__(
        self,
        ranks: range,
        program: Sequence[str],
        folder: Path,
        environ_of: Callable[[int, Mapping[str, str]], Mapping[str, str]],
        place: Path,
        console: Console,
        timeouts: Timeouts,
        starter: Starter | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._expected, self._program, self._folder, self._environ_of = ranks, program, folder, environ_of
        self._place, self._console, self._timeouts = place, console, timeouts
        self._starter, self._peers = starter, peers
        self._live = Live(place, ranks, terminal=console.is_terminal)
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._mpirun_output = b""
        self._stand_ins: dict[socket.socket, bytes | int] = {}
        """By connection, the number of the rank; before it is known, what has come of the stand-in's environment."""
        self._began = time.monotonic()
        self._phase, self._deadline = Phase.RUNNING, self._began + timeouts.start
        self._stop_signal = 0
        self._has_output = self._is_late = self._is_overdue = self._hurry = False

    def run(self) -> Outcome:
        """Start the ranks, or what starts stand-ins for them, and see all to their end.

        Must be called in the main thread, because it handles SIGTERM, SIGINT, SIGHUP and SIGCHLD meanwhile. Raises
        OSError if a rank or `starter` cannot be started.
        """
        with _signals(self._console) as woken, socket.socket(socket.AF_UNIX) as listener, contextlib.closing(self):
            self._watch(woken, partial(self._read_signals, woken))
            for index, connection in self._peers.connections.items() if self._peers else ():
                self._watch(connection, partial(self._hear, index, connection))
            if self._starter is not None:
                self._start_mpirun(self._starter, listener)
            else:
                for number in self._expected:
                    self._start(number, {})
            while not self._is_over():
                sweeping = any(not rank.running and not rank.is_swept for rank in self._ranks)
                sweep = time.monotonic() + _SWEEP_POLL_SECONDS if sweeping else _FOREVER
                self._handle_events(min(self._deadline, self._live.due, sweep))
                self._advance()
                self._show_live()
            if self._peers is not None:
                self._conclude(self._peers)
            return self._finish()

    def close(self) -> None:
        """Leave no process and no descriptor behind, however the run ended."""
        for rank in self._ranks:
            rank.close()
        if self._mpirun is not None:
            with self._mpirun:  # closes its pipe and waits
                if self._mpirun.poll() is None:
                    os.killpg(self._mpirun.pid, signal.SIGKILL)
        for connection in self._stand_ins:
            connection.close()
        self._selector.close()

    # ---- phases --------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if any(rank.running for rank in self._ranks):
            # A process in an uninterruptible wait (a dead network disk) survives even SIGKILL for a while.
            return self._phase is Phase.KILLING and time.monotonic() >= self._deadline
        if not all(rank.is_swept for rank in self._ranks):
            return False
        return self._all_started() or self._phase not in (Phase.RUNNING, Phase.SETTLING)

    def _advance(self) -> None:
        """Go to the next phase if something happened that asks for it, or if the present one took too long."""
        for rank in self._ranks:
            if not rank.running and not rank.is_swept:
                rank.sweep()
        if self._console.broken and not self._stop_signal:
            self._stop(signal.SIGPIPE)
        if self._phase is Phase.RUNNING and self._something_failed():
            self._enter(Phase.SETTLING, self._timeouts.settle)
        if self._phase is Phase.ASKING and all(rank.notes["stack"] for rank in self._running()):
            self._deadline = min(self._deadline, time.monotonic() + self._timeouts.ask)
        if self._phase is not Phase.RUNNING and self._hurry:
            self._hurry = False
            self._kill()
        elif self._phase is Phase.RUNNING and self._all_started():
            self._deadline = _FOREVER  # a job may run for weeks
        elif time.monotonic() >= self._deadline:
            self._time_out()

    def _something_failed(self) -> bool:
        elsewhere = self._peers is not None and self._peers.news is not None
        mpirun_ended = self._mpirun is not None and self._mpirun.poll() is not None
        return elsewhere or mpirun_ended or any(rank.failed for rank in self._ranks)

    def _time_out(self) -> None:
        if self._phase is Phase.RUNNING:
            self._is_late = True
            self._terminate()
        elif self._phase is Phase.SETTLING:
            for rank in self._running():
                rank.was_cut_short = not rank.failed  # one that has raised may hang while it exits
                rank.signal(signal.SIGUSR1)  # faulthandler writes the stack to its pipe
            self._enter(Phase.ASKING, self._timeouts.answer)
        elif self._phase is Phase.ASKING:
            self._terminate()
        elif self._phase is not Phase.KILLING:
            self._is_overdue = self._phase is Phase.STOPPING
            self._kill()

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + seconds

    def _signal(self, number: int, phase: Phase, seconds: float) -> None:
        for rank in self._running():
            rank.signal(number)
        self._enter(phase, seconds)

    def _terminate(self) -> None:
        self._signal(signal.SIGTERM, Phase.ENDING, self._timeouts.end)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL, Phase.KILLING, self._timeouts.end)

    def _stop(self, number: int) -> None:
        """Ask the ranks to end within the grace period; a run that is failing already ends faster than that."""
        self._stop_signal = self._stop_signal or number
        if self._peers is not None:
            self._peers.stop(number)
        if self._phase in (Phase.SETTLING, Phase.ASKING):
            self._terminate()
        elif self._phase is Phase.RUNNING:
            running = len(self._running())
            self._console.say(
                f"{signal.Signals(number).name}: asked {things(running, 'rank')} to end, "
                f"waiting at most {self._timeouts.grace:g} s"
            )
            self._signal(signal.SIGTERM, Phase.STOPPING, self._timeouts.grace)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.running]

    def _all_started(self) -> bool:
        return len(self._ranks) == len(self._expected)

    def _show_live(self) -> None:
        if self._phase is not Phase.RUNNING:
            self._live.due = _FOREVER
            return
        line = self._live.next_line(len(self._ranks), has_output=self._has_output)
        if line is not None:
            running, all_ranks = self._running(), len(self._ranks)
            if 0 < len(running) < all_ranks:  # for as long as it likes: many scripts end with work for one rank
                ended = f"{all_ranks - len(running)} of {all_ranks} ranks have ended"
                line = f"{line}; {ended}, rank {running[0].number} still runs"
            self._console.live(line)

    # ---- events --------------------------------------------------------------------------------------------------

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _handle_events(self, deadline: float) -> None:
        timeout = None if deadline == _FOREVER else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) == key:  # an earlier callback may have closed it
                key.data()

    def _read_signals(self, woken: socket.socket) -> None:
        """Take in the signals that came; after SIGCHLD a rank may have ended."""
        for number in woken.recv(4096):
            if number in _STOP_SIGNALS:
                self._hurry = self._hurry or self._stop_signal == signal.SIGINT == number
                self._stop(number)
        for rank in self._running():
            if rank.reap():
                self._note_end(rank)
        if os.getpid() == 1:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """As the first process of a container, reap orphaned processes, which would pile up as zombies."""
        ours = {rank.process.pid for rank in self._running()} | {self._mpirun.pid if self._mpirun else 0}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    return
                os.waitpid(ended.si_pid, 0)

    def _start(self, number: int, theirs: Mapping[str, str]) -> None:
        """Start a rank; `theirs` is what mpirun has set for it."""
        environ = {**self._environ_of(number, theirs), STATUS_DIR: str(self._place)}
        rank = _Rank(number, self._program, self._folder, environ)
        self._ranks.append(rank)
        for name, pipe in rank.pipes.items():
            self._watch(pipe, partial(self._read_pipe, rank, name))

    def _read_pipe(self, rank: _Rank, name: str) -> bool:
        """Take what a pipe holds; return whether there may be more."""
        data = _read(rank.pipes[name])
        if data == b"":
            self._close_pipe(rank, name)
        elif data and name in rank.notes:
            rank.notes[name] += data
        elif data:
            self._show(rank, name, rank.splitters[name].feed(data))
        return bool(data)

    def _close_pipe(self, rank: _Rank, name: str) -> None:
        if name in rank.pipes:
            self._selector.unregister(rank.pipes[name])
            rank.pipes.pop(name).close()
            if name in rank.splitters:
                self._show(rank, name, rank.splitters[name].close())

    def _show(self, rank: _Rank, stream: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._has_output = True
            if not piece.passing:
                rank.last_lines.append(piece.text)
            self._console.show(rank.number, stream, piece)

    def _note_end(self, rank: _Rank) -> None:
        """Take the last of a rank's output; a helper it left behind may keep the pipes open."""
        for name in tuple(rank.pipes):
            while self._read_pipe(rank, name):
                pass
            self._close_pipe(rank, name)
        rank.doing = read_status(self._place, rank.number)

    def _hear(self, index: int, connection: Connection) -> None:
        assert self._peers is not None
        if not self._peers.hear(index):
            self._selector.unregister(connection)
        if self._peers.stop_signal and not self._stop_signal:
            self._stop(self._peers.stop_signal)

    # ---- mpirun --------------------------------------------------------------------------------------------------

    def _start_mpirun(self, starter: Starter, listener: socket.socket) -> None:
        """Start mpirun in a session of its own, so that the terminal's Ctrl-C comes to the launcher only."""
        address = str(self._place / "launcher")
        listener.bind(address)
        listener.listen(1024)
        self._watch(listener, partial(self._accept, listener))
        self._mpirun = subprocess.Popen(
            starter.command,
            cwd=self._folder,
            env={**starter.environ, ADDRESS_VARIABLE: address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._mpirun.stdout is not None
        os.set_blocking(self._mpirun.stdout.fileno(), False)
        self._watch(self._mpirun.stdout, partial(self._read_mpirun, self._mpirun.stdout))

    def _read_mpirun(self, pipe: Any) -> bool:
        """Keep the end of what mpirun says itself; it matters only if no rank tells why a run failed."""
        data = _read(pipe)
        self._mpirun_output = (self._mpirun_output + (data or b""))[-_KEPT_OUTPUT_BYTES:]
        if data == b"":
            self._selector.unregister(pipe)
        return bool(data)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._stand_ins[connection] = b""
        self._watch(connection, partial(self._listen, connection))

    def _listen(self, connection: socket.socket) -> None:
        """Start the rank of a stand-in when its environment has come; one that is gone is mpirun's to tell."""
        try:
            data = connection.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        before = self._stand_ins[connection]
        if not data or isinstance(before, int):
            self._selector.unregister(connection)
            del self._stand_ins[connection]
            connection.close()
            return
        self._stand_ins[connection] = before + data
        if data.endswith(b"\n") and self._phase in (Phase.RUNNING, Phase.SETTLING):
            theirs = json.loads(before + data)
            number = int(theirs["OMPI_COMM_WORLD_RANK"])
            self._stand_ins[connection] = number
            self._start(number, theirs)

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _conclude(self, peers: Peers) -> None:
        """Tell the other hosts how it ended here; the first one stays until all have ended.

        This comes before stand-ins may exit: mpirun ends all ranks when the first one exits, and its host must know the
        reason by then. The first host stays since the others need what runs on it until they have ended.
        """
        root_cause = find_root_cause([rank.end() for rank in self._ranks])
        if root_cause is not None and root_cause.culprit.is_consequence:
            self._wait(lambda: peers.news is not None, self._timeouts.hear)
        peers.conclude(None if self._stop_signal else self._reason(root_cause, peers.news))
        if peers.is_first:
            waits = _FOREVER  # hosts that are well may run for weeks; one that is lost is news
            if self._stop_signal:
                waits = self._timeouts.grace
            elif root_cause:
                waits = self._timeouts.hear
            self._wait(lambda: not peers.connections or peers.news is not None, waits)

    def _reason(self, root_cause: RootCause | None, news: News | None) -> str | None:
        if root_cause is not None and (news is None or root_cause.is_older_than(news.seconds)):
            return f"rank {root_cause.culprit.rank}: {root_cause.culprit.headline}"
        return None if news is not None or self._all_started() else "its ranks did not all start"

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            self._handle_events(min(deadline, time.monotonic() + 0.1))

    def _finish(self) -> Outcome:
        """Let the stand-ins exit as their ranks did, wait for mpirun, and sum up."""
        seconds = time.monotonic() - self._began
        ends = tuple(rank.end() for rank in sorted(self._ranks, key=lambda rank: rank.number))
        if self._mpirun is not None:
            self._let_mpirun_end(self._mpirun, {end.rank: end.exit_code for end in ends})
        self._console.clear()
        return Outcome(
            ends=ends,
            missing=tuple(sorted(set(self._expected) - {end.rank for end in ends})),
            mpirun_status=self._mpirun.returncode if self._mpirun is not None else 0,
            mpirun_output=self._mpirun_output.decode("utf-8", errors="replace").strip(),
            stop_signal=self._stop_signal,
            late=self._is_late,
            overdue=self._is_overdue,
            seconds=seconds,
        )

    def _let_mpirun_end(self, mpirun: subprocess.Popen[bytes], codes: Mapping[int, int]) -> None:
        for connection, number in self._stand_ins.items():
            with contextlib.suppress(OSError):  # it may be gone
                connection.sendall(f"{codes[number] if isinstance(number, int) else 1}\n".encode())
        if not self._all_started() and mpirun.poll() is None:
            mpirun.terminate()
        serves = self._starter is not None and self._starter.serves
        self._wait(lambda: mpirun.poll() is not None or (serves and not self._stand_ins), self._timeouts.leave)
        if mpirun.poll() is None:
            os.killpg(mpirun.pid, signal.SIGKILL)
        mpirun.wait()
        while mpirun.stdout in self._selector.get_map() and self._read_mpirun(mpirun.stdout):
            pass


def _read(pipe: Any) -> bytes | None:
    """Read what is there; None if nothing is at the moment, empty at the end."""
    try:
        return os.read(pipe.fileno(), _CHUNK_BYTES)
    except BlockingIOError:
        return None


@contextlib.contextmanager
def _signals(console: Console) -> Iterator[socket.socket]:
    """Turn the signals that matter into bytes on a socket; afterwards they do again what they did before.

    Who asks the run to stop is heard even where the launcher waits for somebody to read its output: from then on, a
    timer lets the console give up such waits.
    """

    def note(number: int, _frame: object) -> None:  # Python has written the number to the socket
        if number in _STOP_SIGNALS:
            signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # Keep SIG_IGN: nohup, background jobs.
    noted = [n for n in (*_STOP_SIGNALS, *_FOR_SCRIPTS, signal.SIGCHLD) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in noted}
    previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, console.give_up)
    try:
        yield reader
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_descriptor)
        reader.close()
        writer.close()
