"""Run the ranks of one host: start torchrun or mpirun, show the output, pass on signals, and end all when one fails.

A run goes through the phases of `Phase`; each has a deadline, so nothing is waited for without end::

    RUNNING ── a rank fails ──────► SETTLING ──► ASKING ──► ENDING ──► KILLING
       │                            the others    where      SIGTERM    SIGKILL
       │                            usually fail  are they?
       └── SIGTERM, SIGINT ───────► STOPPING (the ranks save; up to the grace period) ──► KILLING

The launcher sends signals to the ranks itself. Given SIGTERM, mpirun kills its ranks a second later and torchrun after
thirty; so both are left alone until all ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from smpkit.observe.status import STATUS_DIR, read_status
from smpkit_container.channel import ADDRESS_VARIABLE, NUM_PIPES, packed
from smpkit_container.console import Console
from smpkit_container.lines import Piece
from smpkit_container.live import Live
from smpkit_container.outcome import Outcome, Timeouts
from smpkit_container.peers import News, Peers
from smpkit_container.rank_link import RankLink
from smpkit_container.root_cause import RootCause, find_root_cause
from smpkit_container.wakeup import STOP_SIGNALS, Wakeup, reap_orphans, wakeup

__all__ = ["Phase", "meeting_place", "run_host"]

_CHUNK_BYTES = 65536
_KEPT_OUTPUT_BYTES = 16384
_REPORT, _STACKS = 2, 3
_STREAMS = ("out", "err")


class Phase(Enum):
    """What the launcher of a host is waiting for. In every phase the run is over once no rank runs or is still to come.

    A second Ctrl-C leads from any phase but the first to `KILLING`.
    """

    # Ranks start and train. Deadline: `start`, for all of them to have started; none after that. Leaves when a rank or
    # another host fails, torchrun or mpirun ends, or a signal asks the run to stop.
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


def run_host(
    command: Sequence[str],
    *,
    program: Sequence[str],
    ranks: range,
    folder: Path,
    environ: Mapping[str, str],
    variables: Mapping[str, str],
    console: Console,
    timeouts: Timeouts,
    peers: Peers | None = None,
    place: Path | None = None,
) -> Outcome:
    """Start `command`, which must start `python -m smpkit_container.rank` for each of `ranks`, and see it to its end.

    Must be called in the main thread, because it handles SIGTERM, SIGINT, SIGHUP and SIGCHLD meanwhile.

    Args:
        program: the script that every rank runs, and its arguments.
        folder: the working folder of the ranks.
        environ: the environment of `command`.
        variables: what every rank of this host sets in its own environment, whatever the launcher passed on.
        peers: the other hosts of the job; if one of them fails or is lost, the run ends here, too.
        place: an empty folder to listen in, removed afterwards; default: one of a new name.

    Raises:
        OSError: `command` could not be started.
    """
    place = place or meeting_place()
    try:
        with (
            _listening(place / "launcher") as listener,
            selectors.DefaultSelector() as selector,
            wakeup() as awake,
            _started(command, folder, {**environ, ADDRESS_VARIABLE: str(place / "launcher")}) as process,
        ):
            return _Host(
                process,
                listener=listener,
                selector=selector,
                awake=awake,
                ranks=ranks,
                welcome=packed("welcome", program=list(program), variables={**variables, STATUS_DIR: str(place)}),
                place=place,
                console=console,
                timeouts=timeouts,
                peers=peers,
            ).run()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def meeting_place() -> Path:
    """Make a folder for the socket of a host's launcher, with a short path: a socket's has at most about 100 bytes."""
    return Path(tempfile.mkdtemp(prefix="smpkit-", dir="/tmp" if Path("/tmp").is_dir() else None))  # noqa: S108


@contextlib.contextmanager
def _started(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun or mpirun in a session of its own, so that the terminal's Ctrl-C comes to us only."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        listener.setblocking(False)
        yield listener


class _Host:
    """The loop over everything that can happen on this host while a run lasts."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        awake: Wakeup,
        ranks: range,
        welcome: bytes,
        place: Path,
        console: Console,
        timeouts: Timeouts,
        peers: Peers | None,
    ) -> None:
        self._process = process
        self._peers = peers
        self._expected = ranks
        self._welcome_message = welcome
        self._place = place
        self._live = Live(place, ranks, terminal=console.is_terminal)
        self._has_output = False
        self._listener = listener
        self._selector = selector
        self._awake = awake
        self._console = console
        self._timeouts = timeouts
        self._ranks: list[RankLink] = []
        self._launcher_output = bytearray()
        self._began = time.monotonic()
        self._phase = Phase.RUNNING
        self._deadline = self._began + timeouts.start
        self._stop_signal = 0
        self._late = False
        self._overdue = False
        self._hurry = False

    def run(self) -> Outcome:
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._watch(self._awake, self._read_signals)
        self._watch(self._listener, self._accept)
        self._watch(self._process.stdout, self._read_launcher_output)
        for connection in self._peers.connections if self._peers else ():
            self._watch(connection, partial(self._hear, connection))
        while not self._finished():
            self._handle_events(min([self._deadline, self._live.due, *(rank.silent_at for rank in self._ranks)]))
            self._rouse_watchers()
            self._advance()
            self._show_live()
        if self._peers is not None:
            self._conclude(self._peers)
        return self._dismiss()

    def _show_live(self) -> None:
        if self._phase is not Phase.RUNNING:
            self._live.due = float("inf")
            return
        started = sum(rank.started for rank in self._ranks)
        line = self._live.next_line(started, has_output=self._has_output)
        if line is not None:
            self._console.live(line)

    # ---- phases --------------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        if any(rank.running for rank in self._ranks):
            # A process in an uninterruptible wait (a dead network disk) survives even SIGKILL for a while.
            return self._phase is Phase.KILLING and time.monotonic() >= self._deadline
        return len(self._ranks) >= len(self._expected) or self._process.poll() is not None

    def _advance(self) -> None:
        """Go to the next phase if something happened that asks for it, or if the present one took too long."""
        if self._console.broken and not self._stop_signal:
            self._stop(signal.SIGPIPE)
        if self._phase is Phase.RUNNING and self._something_failed():
            self._enter(Phase.SETTLING, self._timeouts.settle)
        if self._phase is Phase.ASKING and all(rank.has_answered for rank in self._running()):
            self._deadline = min(self._deadline, time.monotonic() + self._timeouts.ask)
        if self._phase is not Phase.RUNNING and self._hurry:
            self._hurry = False
            self._kill()
        elif self._phase is Phase.RUNNING and self._all_started():
            self._deadline = float("inf")  # a job may run for weeks
        elif time.monotonic() >= self._deadline:
            self._time_out()

    def _something_failed(self) -> bool:
        elsewhere = self._peers is not None and self._peers.news is not None
        return elsewhere or self._process.poll() is not None or any(rank.failed for rank in self._ranks)

    def _time_out(self) -> None:
        if self._phase is Phase.RUNNING:
            self._late = True
            self._terminate()
        elif self._phase is Phase.SETTLING:
            for rank in self._running():
                rank.stopped = not rank.failed  # one that has raised may hang while it exits
                self._signal_rank(rank, signal.SIGUSR1)  # faulthandler writes the stack to its pipe
            self._enter(Phase.ASKING, self._timeouts.answer)
        elif self._phase is Phase.ASKING:
            self._terminate()
        elif self._phase is not Phase.KILLING:
            self._overdue = self._phase is Phase.STOPPING
            self._kill()

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + seconds

    def _terminate(self) -> None:
        self._signal_ranks(signal.SIGTERM)
        self._enter(Phase.ENDING, self._timeouts.end)

    def _kill(self) -> None:
        self._signal_ranks(signal.SIGKILL)
        self._enter(Phase.KILLING, self._timeouts.end)

    def _stop(self, number: int) -> None:
        """Ask the ranks to end within the grace period; a run that is failing already ends faster than that."""
        self._stop_signal = self._stop_signal or number
        if self._peers is not None:
            self._peers.stop(number)
        if self._phase not in (Phase.RUNNING, Phase.SETTLING, Phase.ASKING):
            return
        if self._phase is not Phase.RUNNING:
            self._terminate()
            return
        running = len(self._running())
        self._console.say(
            f"{signal.Signals(number).name}: asked {running} rank{'s' * (running != 1)} to end, "
            f"waiting at most {self._timeouts.grace:g} s"
        )
        self._signal_ranks(signal.SIGTERM)
        self._enter(Phase.STOPPING, self._timeouts.grace)

    def _signal_ranks(self, number: int) -> None:
        for rank in self._running():
            self._signal_rank(rank, number)
        if not self._all_started():
            # Ranks that have not started yet would not get it, so torchrun or mpirun must end as well.
            self._signal_launcher(number)

    def _signal_rank(self, rank: RankLink, number: int) -> None:
        rank.signal_watcher(signal.SIGCONT)  # one that was stopped would not pass anything on
        rank.tell("signal", number=number)

    def _signal_launcher(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _running(self) -> list[RankLink]:
        return [rank for rank in self._ranks if rank.running]

    def _all_started(self) -> bool:
        return sum(rank.started for rank in self._ranks) >= len(self._expected)

    # ---- events --------------------------------------------------------------------------------------------------

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _handle_events(self, deadline: float) -> None:
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) == key:  # an earlier callback may have closed it
                key.data()

    def _read_signals(self) -> None:
        for number in self._awake.read():
            if number in STOP_SIGNALS:
                again = self._stop_signal == signal.SIGINT == number
                self._hurry = self._hurry or again
                self._stop(number)
        reap_orphans(self._process)

    def _hear(self, connection: socket.socket) -> None:
        assert self._peers is not None
        if not self._peers.hear(connection):
            self._selector.unregister(connection)
        if self._peers.stop_signal and not self._stop_signal:
            self._stop(self._peers.stop_signal)

    def _read_launcher_output(self) -> None:
        """Keep the end of what torchrun or mpirun say themselves; it matters only if no rank tells why a run failed."""
        assert self._process.stdout is not None
        data = _read(self._process.stdout.fileno())
        if data is not None:
            self._launcher_output += data
            del self._launcher_output[:-_KEPT_OUTPUT_BYTES]
        if data == b"":
            self._selector.unregister(self._process.stdout)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            rank = RankLink(connection)
            self._watch(connection, lambda: self._listen(rank))

    def _listen(self, rank: RankLink) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(rank.connection, _CHUNK_BYTES, NUM_PIPES)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        rank.pipes += descriptors
        for message in rank.inbox.feed(data):
            self._handle_message(rank, message)
        if not data:
            self._selector.unregister(rank.connection)
            rank.connection.close()
            if rank.number >= 0 and rank.running:
                rank.status_is_lost = rank.is_silent
                self._ended(rank, -signal.SIGKILL, time.time())  # its watcher was killed, and the rank with it

    def _handle_message(self, rank: RankLink, message: Mapping[str, Any]) -> None:
        if message["type"] == "hello":
            rank.watcher = message.get("pid", 0)
            self._welcome(rank, message["rank"])
        elif message["type"] == "start":
            rank.started = True
            self._watch_process(rank, message["pid"])
            if self._phase in (Phase.ENDING, Phase.STOPPING):
                rank.tell("signal", number=signal.SIGTERM)
            elif self._phase is Phase.KILLING:
                rank.tell("signal", number=signal.SIGKILL)
        else:
            rank.peak_bytes = message.get("peak_bytes", 0)
            self._ended(rank, message["status"], message["seconds"])

    def _welcome(self, rank: RankLink, number: int) -> None:
        rank.number = number
        self._ranks.append(rank)
        for position, descriptor in enumerate(rank.pipes):
            os.set_blocking(descriptor, False)
            self._watch(descriptor, partial(self._read_pipe, rank, position))
        rank.send(self._welcome_message)

    def _watch_process(self, rank: RankLink, pid: int) -> None:
        """Notice the end of a rank also if its watcher, which is to tell how it ended, was stopped (Linux)."""
        try:
            rank.process = os.pidfd_open(pid)
        except ProcessLookupError:  # its watcher has waited for it already, and may be stopped before it says so
            self._await_watcher(rank)
        except (AttributeError, OSError):  # no such call here
            pass
        else:
            self._watch(rank.process, partial(self._await_watcher, rank))

    def _await_watcher(self, rank: RankLink) -> None:
        """Give the watcher of a rank that has ended a while to say how."""
        self._forget_process(rank)
        rank.silent_at = time.monotonic() + self._timeouts.watcher

    def _rouse_watchers(self) -> None:
        """Let watchers go on that do not say how their ranks ended; kill those that still do not."""
        for rank in self._ranks:
            if time.monotonic() < rank.silent_at:
                continue
            if not rank.is_silent:
                rank.is_silent, rank.silent_at = True, time.monotonic() + self._timeouts.watcher
                seconds = f"{self._timeouts.watcher:g} s"
                self._console.say(
                    f"rank {rank.number} ended {seconds} ago, and its watcher is stopped or hangs: woke it"
                )
                rank.signal_watcher(signal.SIGCONT)
            else:
                rank.silent_at = float("inf")
                rank.signal_watcher(signal.SIGKILL)

    def _forget_process(self, rank: RankLink) -> None:
        if rank.process >= 0:
            self._selector.unregister(rank.process)
            os.close(rank.process)
            rank.process = -1

    def _read_pipe(self, rank: RankLink, position: int) -> bool:
        """Take what a pipe holds; return whether there may be more."""
        data = _read(rank.pipes[position]) if rank.pipes[position] >= 0 else None
        if data is None:
            return False
        if not data:
            self._close_pipe(rank, position)
        elif position >= _REPORT:
            rank.notes[position - _REPORT] += data
        else:
            self._show(rank, _STREAMS[position], rank.splitters[position].feed(data))
        return bool(data)

    def _close_pipe(self, rank: RankLink, position: int) -> None:
        if rank.pipes[position] >= 0:
            self._selector.unregister(rank.pipes[position])
            os.close(rank.pipes[position])
            rank.pipes[position] = -1  # the number may soon be another pipe's

    def _show(self, rank: RankLink, stream: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._has_output = True
            if not piece.passing:
                rank.last_lines.append(piece.text)
            self._console.show(rank.number, stream, piece)

    def _ended(self, rank: RankLink, status: int, seconds: float) -> None:
        """Note the end of a rank, after the last of its output; a helper it left behind may keep the pipes open."""
        for position in range(len(rank.pipes)):
            while self._read_pipe(rank, position):
                pass
            self._close_pipe(rank, position)
        for stream, splitter in zip(_STREAMS, rank.splitters, strict=True):
            self._show(rank, stream, splitter.close())
        self._forget_process(rank)
        rank.status, rank.ended_seconds, rank.silent_at = status, seconds, float("inf")
        rank.doing = read_status(self._place, rank.number)

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _conclude(self, peers: Peers) -> None:
        """Tell the other hosts how it ended here; the first one stays until all have ended.

        This comes before the watchers may exit: mpirun ends all ranks when the first one exits, and its host must know
        the reason by then. The first host stays since the others need what it runs until they have ended: mpirun
        itself, or torchrun's store.
        """
        root_cause = find_root_cause([rank.end() for rank in self._ranks])
        if root_cause is not None and root_cause.culprit.is_consequence:
            self._wait(lambda: peers.news is not None, self._timeouts.hear)
        peers.conclude(None if self._stop_signal else self._reason(root_cause, peers.news))
        if peers.is_first and peers.running:
            waits = float("inf")
            if self._stop_signal:
                waits = self._timeouts.grace
            elif root_cause:
                waits = self._timeouts.hear
            self._wait(lambda: not peers.running or peers.news is not None, waits)

    def _reason(self, root_cause: RootCause | None, news: News | None) -> str | None:
        if news is not None:
            return str(news)
        if root_cause is not None:
            return f"rank {root_cause.culprit.rank}: {root_cause.culprit.headline}"
        return None if len(self._ranks) >= len(self._expected) else "its ranks did not all start"

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            self._handle_events(min(deadline, time.monotonic() + 1.0))

    def _dismiss(self) -> Outcome:
        """Let the watchers exit, wait for torchrun or mpirun, and sum up."""
        seconds = time.monotonic() - self._began
        ends = tuple(rank.end() for rank in sorted(self._ranks, key=lambda rank: rank.number))
        for rank in self._ranks:
            rank.tell("leave")
        self._end_launcher()
        for rank in self._ranks:
            rank.connection.close()
            for position in range(len(rank.pipes)):
                self._close_pipe(rank, position)
        self._console.clear()
        return Outcome(
            ends=ends,
            missing=tuple(sorted(set(self._expected) - {end.rank for end in ends})),
            launcher_status=self._process.wait(),
            launcher_output=self._launcher_output.decode("utf-8", errors="replace").strip(),
            stop_signal=self._stop_signal,
            late=self._late,
            overdue=self._overdue,
            seconds=seconds,
        )

    def _end_launcher(self) -> None:
        deadline = time.monotonic() + self._timeouts.leave
        while self._process.poll() is None and time.monotonic() < deadline:
            self._handle_events(min(deadline, time.monotonic() + 0.1))
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        while self._process.stdout.fileno() in self._selector.get_map():
            before = len(self._launcher_output)
            self._read_launcher_output()
            if len(self._launcher_output) == before:
                break


def _read(descriptor: int) -> bytes | None:
    """Read what is there; None if nothing is at the moment, empty at the end."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None
