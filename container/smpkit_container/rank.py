"""Run a script as one rank: `python -m smpkit_container.rank SCRIPT ARGUMENTS`, started by the launcher of its host.

An uncaught exception is reported to the launcher as data instead of being printed, so that the launcher can show the
first failing rank's traceback once.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import MutableMapping, Sequence

from smpkit_container.script import run_script, run_shell_script

__all__ = ["LINK", "main"]

LINK = "SMPKIT_RANK_LINK"
"""Three descriptors: where the rank reports what it raised, where it writes its stack, and its life line."""

_SIGNAL_OF_DESCRIPTOR = 10  # F_SETSIG of Linux


def main(program: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Run the script; returns or raises SystemExit as the script would."""
    link = environ.pop(LINK, None)  # not for the script: a launcher it starts has ranks of its own
    if link is None:
        raise SystemExit(f"{LINK} is not set: this program is started by `python -m smpkit_container`")
    report, stack, life_line = map(int, link.split(","))
    _die_with_launcher(life_line)
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.set_inheritable(report, False)
    os.set_inheritable(stack, False)
    if program[0].endswith(".sh"):
        run_shell_script(program[0], program[1:])  # keeps the life line
    os.set_inheritable(life_line, False)
    debug = None
    if "SMPKIT_PDB" in environ:
        from smpkit_container.debugger import install  # pdb is half of what a rank's start takes

        debug = install(environ)
    run_script(program[0], program[1:], report, debug)


def _die_with_launcher(life_line: int) -> None:
    """Let this rank, and what it started, be killed when the launcher is gone, which holds the pipe's other end."""
    try:
        fcntl.fcntl(life_line, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_line, _SIGNAL_OF_DESCRIPTOR, signal.SIGKILL)
        fcntl.fcntl(life_line, fcntl.F_SETFL, os.O_ASYNC)
    except OSError:  # not Linux
        threading.Thread(target=_await_end_of_launcher, args=(life_line,), daemon=True).start()
        return
    if select.select([life_line], [], [], 0)[0]:
        os._exit(1)


def _await_end_of_launcher(life_line: int) -> None:
    os.read(life_line, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
