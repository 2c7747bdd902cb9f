"""Run a script as one rank: `python -m smpkit_container.rank SCRIPT ARGUMENTS`, started by the launcher of its host.

An uncaught exception is reported to the launcher as data instead of being printed, so that the launcher can show the
first failing rank's traceback once.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import fcntl
import io
import json
import os
import select
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

LINK = "SMPKIT_RANK_LINK"
"""Three descriptors: where the rank reports what it raised, where it writes its stack, and its life line."""

_SIGNAL_OF_DESCRIPTOR = 10  # F_SETSIG of Linux
_MAX_TEXT = 60_000  # characters of a traceback, message or error that are sent: the last ones, which say most

_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"


def main(program: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Run the script; return or raise SystemExit as the script would."""
    link = environ.pop(LINK, None)  # not for the script: a launcher it starts has ranks of its own
    if link is None:
        raise SystemExit(f"{LINK} is not set: this program is started by `python -m smpkit_container`")
    report, stack, life_line = map(int, link.split(","))
    _die_with_launcher(life_line)
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.set_inheritable(report, False)
    os.set_inheritable(stack, False)  # a shell, and a script that starts itself anew with exec, keep the life line
    # The folder of the sources, wherever in it the script lies, and for what the script starts: as in AWS's images.
    environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [environ.get("PYTHONPATH")]), str(Path.cwd())])
    if program[0].endswith(".sh"):
        run_shell_script(program[0], program[1:])
    run_script(program[0], program[1:], report, _install_debugger(environ))


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


# ---- the script ------------------------------------------------------------------------------------------------------


def run_script(
    script: str, arguments: Sequence[str], report: int, debug: Callable[[BaseException], None] | None = None
) -> None:
    """Run `script` as `python script ...` would: its module is `__main__`, its folder comes first on the path.

    The folder of the sources, which is the present one, comes second.

    Args:
        report: a descriptor for what happened.
        debug: called with an exception that nobody catches, before it is reported.
    """
    path = Path(script).absolute()  # as Python itself does for the `__file__` of the main script
    sys.argv = [script, *arguments]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path[:0] = map(str, dict.fromkeys([path.resolve().parent, Path.cwd()]))
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    module.__dict__.update(__file__=str(path), __builtins__=builtins, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = module
    sys.excepthook = _silent
    try:
        with io.open_code(str(path)) as file:
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  this is what a launcher is for
    except SystemExit as error:
        if error.code is not None and _exit_code(error) != 0:  # of 256 Python itself makes 0
            error.__traceback__ = _until_library(_users_part(error.__traceback__))
            _report(report, error)
        raise
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        if debug is not None:
            debug(error)
        _shorten(error)
        _report(report, error)
        with contextlib.suppress(Exception):  # the script's own hook may log, save or clean up
            sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(_exit_code(error)) from None


def run_shell_script(script: str, arguments: Sequence[str]) -> NoReturn:
    """Become the shell that runs `script`."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher asks ranks for their stacks by it; a shell has none
    shell = shutil.which("bash") or "/bin/sh"
    os.execv(shell, [shell, script, *arguments])  # noqa: S606  the user's script is a shell's


def _silent(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print nothing: the launcher shows the first failing rank's traceback, once.

    Stands where Python's own hook does, so that hooks installed on top of it (torch.distributed's, which prints with
    the rank before each line, or smpkit's, which tells the other ranks) find it when they call the one before them.
    """


def _exit_code(error: BaseException) -> int:
    """Return the code with which Python ends after `error`."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drop the frames of this module, so that a traceback begins in the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _until_library(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drop the frames that end a traceback inside Python's own library, such as those of `argparse`."""
    if trace is not None:
        trace.tb_next = _until_library(trace.tb_next)
        if trace.tb_next is None and trace.tb_frame.f_code.co_filename.startswith(_LIBRARY):
            return None
    return trace


def _shorten(error: BaseException) -> None:
    """Shorten the traceback as smpkit's own hook would, which runs only after the report: it waits for other ranks.

    The module is looked up, not imported: the script may not use smpkit, and the launcher does not import torch.
    """
    with contextlib.suppress(Exception):
        sys.modules["smpkit.torch.distributed.tracebacks"].shorten(error)


def _report(descriptor: int, error: BaseException) -> None:
    """Write what happened to the launcher; never let the report hide the error itself."""
    with contextlib.suppress(Exception):
        try:
            described = _described(error)
        except Exception as later:  # a signal handler's: DataLoader's says that a worker was killed, maybe only now
            described = _described(later)
        data = json.dumps(described).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]


def _described(error: BaseException) -> dict[str, Any]:
    story = traceback.TracebackException(type(error), error, _users_part(error.__traceback__))
    kind, hint = type(error), getattr(error, "hint", None)
    chain = list(_chain(story))
    return {
        "name": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__."),
        "message": chain[0][-_MAX_TEXT:],
        "hint": hint if isinstance(hint, str) else None,
        "chain": [text[:_MAX_TEXT] for text in chain],
        "frames": [[f.filename, f.lineno or 0, f.name] for f in story.stack],
        "traceback": "".join(story.format())[-_MAX_TEXT:],
        "exit_code": _exit_code(error),
        "seconds": time.time(),
    }


def _chain(story: traceback.TracebackException | None) -> Iterator[str]:
    """Yield class and text of an error, then of what it was raised from or while handling, as far as Python shows it.

    An error whose own `__str__` fails has a text that says so.
    """
    while story is not None:
        yield "".join(story.format_exception_only()).strip()
        story = story.__cause__ or (None if story.__suppress_context__ else story.__context__)


# ---- its debugger ----------------------------------------------------------------------------------------------------
# `SMPKIT_PDB=RANK:TERMINAL`, which `smpkit run --pdb` sets. The rank's own input and output are the launcher's, so the
# debugger opens the terminal by its name. It comes where the script calls `breakpoint()`, and where an exception is
# about to end the rank, before anybody hears of it: until then other ranks wait, as long as it takes, since `smp.init`
# reads the variable, too.

_AfterError = Callable[[BaseException], None]


def _install_debugger(environ: Mapping[str, str]) -> _AfterError | None:
    """Let `breakpoint()` open the debugger if this rank is the one, and do nothing on others.

    Return what is to be called with an exception that nobody catches; None on other ranks.
    """
    rank, _, terminal = environ.get("SMPKIT_PDB", "").partition(":")
    if not terminal:
        return None
    if environ.get("RANK", "0") != rank:
        sys.breakpointhook = lambda *_, **__: None  # the other ranks have no terminal
        return None
    import pdb  # noqa: T100 - half of what a rank's start takes

    keys, screen = open(terminal, encoding="utf-8"), open(terminal, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    screen.write(f"\nbreakpoint() and errors of rank {rank} open the debugger here; the other ranks wait\n")
    screen.flush()
    debugger = pdb.Pdb(stdin=keys, stdout=screen, nosigint=True)
    debugger.prompt = f"(Pdb rank {rank}) "

    def stop(*_: object, **__: object) -> None:
        debugger.set_trace(sys._getframe(1))

    def after_error(error: BaseException) -> None:
        if isinstance(error, (SystemExit, KeyboardInterrupt)) or error.__traceback__ is None:
            return
        screen.write(f"\nrank {rank}: {type(error).__name__}: {error}\n")
        debugger.reset()
        debugger.interaction(None, error.__traceback__)

    sys.breakpointhook = stop
    return after_error


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
