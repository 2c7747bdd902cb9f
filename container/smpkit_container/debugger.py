"""A debugger for one rank: `SMPKIT_PDB=RANK:TERMINAL`, which `smpkit run --pdb` sets.

The rank's own input and output are the launcher's, so the debugger opens the terminal by its name. It comes where the
script calls `breakpoint()`, and where an exception is about to end the rank, before anybody hears of it: until then
other ranks wait, as long as it takes, since `smp.init` reads the variable, too.
"""

from __future__ import annotations

import pdb  # noqa: T100 - this is what it is for
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TextIO

AfterError = Callable[[BaseException], None]


def install(environ: Mapping[str, str]) -> AfterError | None:
    """Let `breakpoint()` open the debugger if this rank is the one, and do nothing on others.

    Return what is to be called with an exception that nobody catches; None on other ranks.
    """
    rank, _, terminal = environ.get("SMPKIT_PDB", "").partition(":")
    if not terminal:
        return None
    if environ.get("RANK", "0") != rank:
        sys.breakpointhook = _pass
        return None
    screen = _open(terminal)
    screen[1].write(f"\nbreakpoint() and errors of rank {rank} open the debugger here; the other ranks wait\n")
    screen[1].flush()

    def stop(*_: object, **__: object) -> None:
        _debugger(screen, rank).set_trace(_caller())

    def after_error(error: BaseException) -> None:
        if isinstance(error, (SystemExit, KeyboardInterrupt)) or error.__traceback__ is None:
            return
        screen[1].write(f"\nrank {rank}: {type(error).__name__}: {error}\n")
        debugger = _debugger(screen, rank)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)

    sys.breakpointhook = stop
    return after_error


def _pass(*_: object, **__: object) -> None:
    """Stand for the debugger on the other ranks, which have no terminal."""


def _open(terminal: str) -> tuple[TextIO, TextIO]:
    return open(terminal, encoding="utf-8"), open(terminal, "w", encoding="utf-8")  # noqa: PTH123 - it stays


def _debugger(screen: tuple[TextIO, TextIO], rank: str) -> pdb.Pdb:
    debugger = pdb.Pdb(stdin=screen[0], stdout=screen[1], nosigint=True)
    debugger.prompt = f"(Pdb rank {rank}) "
    return debugger


def _caller() -> FrameType:
    """Return the frame that called `breakpoint()`, which is no frame of Python itself."""
    return sys._getframe(2)
