"""Run a script as one rank: `python -m smpkit_container.rank`, started by torchrun or mpirun.

This process becomes the *watcher*: it forks, and the child is the rank. So the rank's exact exit status is known, the
launcher of the host can signal the rank itself (mpirun and torchrun kill too early), and a rank never outlives its
watcher. An uncaught exception is reported to the launcher as data instead of being printed, so that the launcher can
show the first failing rank's traceback once.

The launcher says what to run when both meet, and not on the command line: torchrun takes a hyperparameter `--log` for
an option of its own, and mpirun takes a value `:` for the end of the command.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from smpkit_container.channel import ADDRESS_VARIABLE, NUM_PIPES, Inbox, packed
from smpkit_container.debugger import install
from smpkit_container.script import run_script, run_shell_script

__all__ = ["main"]

_CONNECT_SECONDS = 60.0
_GROUP_SECONDS = 1.0
_GROUP_POLL_SECONDS = 0.02

_FROM_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def main(environ: dict[str, str] | os._Environ[str]) -> None:
    """Run the script that the launcher names; returns or raises SystemExit as the script would."""
    address = environ.pop(ADDRESS_VARIABLE, None)  # not for the script: a launcher it starts has ranks of its own
    if not address:
        raise SystemExit(f"{ADDRESS_VARIABLE} is not set: this program is started by `python -m smpkit_container`")
    name_ranks(environ)
    launcher, pipes, program = _meet_launcher(address, environ)
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        launcher.close()
        _prepare_rank(watcher, pipes)
        if program[0].endswith(".sh"):
            run_shell_script(program[0], program[1:], environ)
        run_script(program[0], program[1:], pipes[2], install(environ))
        return
    for descriptor in pipes:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the child does the same; the first call counts
        os.setpgid(pid, pid)
    _Watcher(pid, launcher, address).watch()


def name_ranks(environ: dict[str, str] | os._Environ[str]) -> None:
    """Give ranks started by mpirun torchrun's names too, so `init_process_group()` needs no MPI knowledge."""
    for name, mpi_name in _FROM_MPI.items():
        if mpi_name in environ:
            environ.setdefault(name, environ[mpi_name])


# ---- the rank itself ------------------------------------------------------------------------------------------


def _prepare_rank(watcher: int, pipes: Sequence[int]) -> None:
    """Make the forked child a process of its own: group, output, stack dumps, and death with its watcher."""
    os.setpgid(0, 0)  # signals sent to the launcher's group (Ctrl-C, mpirun) do not reach the script
    die_with_parent(signal.SIGKILL)
    if os.getppid() != watcher:
        os._exit(1)  # the watcher died before it could be watched
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(pipes[0], 1)
    os.dup2(pipes[1], 2)
    os.close(pipes[0])
    os.close(pipes[1])
    faulthandler.enable(file=pipes[3])
    faulthandler.register(signal.SIGUSR1, file=pipes[3], all_threads=False)


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process `number` when its parent dies; elsewhere the closed connection has to do."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number, 0, 0, 0)


# ---- the watcher ----------------------------------------------------------------------------------------------


def _meet_launcher(
    address: str, environ: dict[str, str] | os._Environ[str]
) -> tuple[socket.socket, list[int], list[str]]:
    """Connect, hand over the reading ends of the pipes, take over the host's variables.

    Returns:
        The connection, the writing ends, and the script with its arguments.
    """
    launcher = socket.socket(socket.AF_UNIX)
    launcher.settimeout(_CONNECT_SECONDS)
    launcher.connect(address)
    ends = [os.pipe() for _ in range(NUM_PIPES)]
    rank, local_rank = (int(environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    hello = packed("hello", rank=rank, local_rank=local_rank, pid=os.getpid())
    socket.send_fds(launcher, [hello], [reading for reading, _ in ends])
    for reading, _ in ends:
        os.close(reading)
    # mpirun gives every host the variables of the first one (SM_CURRENT_HOST!); the local launcher knows better.
    welcome = _welcome(launcher)
    environ.update(welcome["variables"])
    return launcher, [writing for _, writing in ends], welcome["program"]


def _welcome(launcher: socket.socket) -> dict[str, Any]:
    inbox = Inbox()
    while True:
        data = launcher.recv(65536)
        if not data:
            raise SystemExit(1)  # the launcher gave up meanwhile
        for message in inbox.feed(data):
            return message


class _Watcher:
    """Waits for the rank to end, and for messages of the launcher."""

    def __init__(self, pid: int, launcher: socket.socket, address: str) -> None:
        self._pid = pid
        self._launcher = launcher
        self._address = Path(address)
        self._inbox = Inbox()
        self._status: int | None = None

    def watch(self) -> NoReturn:
        """Serve until the launcher lets this process go, then exit as the rank did."""
        awake = self._install_handlers()
        self._launcher.setblocking(False)
        self._tell(packed("start", pid=self._pid))
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher, selectors.EVENT_READ)
            selector.register(awake, selectors.EVENT_READ)
            self._reap()  # it may have ended before the handlers were there
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._launcher:
                        self._listen()
                    else:
                        awake.recv(4096)
                        self._reap()

    def _install_handlers(self) -> socket.socket:
        awake, waker = socket.socketpair()
        awake.setblocking(False)
        waker.setblocking(False)
        self._waker = waker  # kept: signals are written to it as long as this process lives
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._signal(signal.SIGTERM))
        return awake

    def _listen(self) -> None:
        try:
            data = self._launcher.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave()
        for message in self._inbox.feed(data):
            if message["type"] == "leave":
                self._leave()
            self._signal(message["number"])

    def _signal(self, number: int) -> None:
        """Send a signal to the rank; SIGKILL goes to everything it started, too."""
        if self._status is not None:
            return  # the number may belong to another process by now
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, number)

    def _reap(self) -> None:
        if self._status is not None:
            return
        pid, status, usage = os.wait4(self._pid, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            ended = time.time()
            self._sweep()
            unit = 1 if sys.platform == "darwin" else 1024
            self._tell(packed("exit", status=self._status, seconds=ended, peak_bytes=usage.ru_maxrss * unit))

    def _sweep(self) -> None:
        """Kill what the rank left running, after a moment for its helpers to clean up (shared memory, semaphores)."""
        deadline = time.monotonic() + _GROUP_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._pid, 0)
                time.sleep(_GROUP_POLL_SECONDS)
            os.killpg(self._pid, signal.SIGKILL)

    def _tell(self, data: bytes) -> None:
        self._launcher.setblocking(True)
        with contextlib.suppress(OSError):
            self._launcher.sendall(data)
        self._launcher.setblocking(False)

    def _leave(self) -> NoReturn:
        """Exit as the rank did; if it still runs, the launcher is gone, and the rank must not outlive it."""
        if self._status is None:
            self._signal(signal.SIGKILL)
            os.waitpid(self._pid, 0)
            with contextlib.suppress(OSError):  # the first watcher removes what the launcher left
                self._address.unlink()
                self._address.parent.rmdir()
            os._exit(1)
        # Not sys.exit: nothing of the script's may run here (it was the child that had it).
        os._exit(self._status if self._status >= 0 else 128 - self._status)


if __name__ == "__main__":
    main(os.environ)
