"""Where `smpkit` and `python -m smpkit` begin, with what must be right before the command line is loaded."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Load the command line, run it with the arguments of the process, and exit."""
    _open_standard_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was begun is undone
    try:
        from smpkit.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    run()


def _open_standard_streams() -> None:
    """Open the streams that the caller closed (`>&-`): else the next file that is opened takes their numbers.

    What the encoding of stdout lacks, such as a tick in Latin-1, is escaped, as Python does on stderr.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
