"""torchrun as users start it, with failures told as `smpkit run` tells them: started by `smpkit compat -- torchrun`.

torchrun's own report names no exception (`error_file: <N/A>`) and buries the ranks' tracebacks under its own.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run

from smpkit.config.words import duration
from smpkit_container.hints import hint_of
from smpkit_container.root_cause import RankEnd

__all__ = ["main"]

_NOISY = "torch.distributed.elastic.multiprocessing"
"""Logs each process that it signals, and the exit code that it then raises as an error."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code of the first rank that failed."""
    began = time.monotonic()
    for name in (f"{_NOISY}.api", f"{_NOISY}.errors", f"{_NOISY}.errors.error_handler"):
        logging.getLogger(name).addFilter(lambda _: False)
    try:
        run(list(arguments))
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        end = RankEnd(first, failure.exitcode, failure.timestamp)
        followers = sorted(rank for rank in error.failures if rank != first)
        lines = [f"\nFailed after {duration(time.monotonic() - began)} (rank {first}, exit {end.exit_code})"]
        if failure.exitcode < 0:
            lines += ["", f"    {end.headline}"]
        if followers:
            ranks = f"rank{'s' * (len(followers) > 1)} {', '.join(map(str, followers))}"
            lines += ["", f"{ranks} stopped because of it"]
        hint = hint_of(end)
        sys.stderr.write("\n".join([*lines, *([f"hint: {hint}"] if hint else [])]) + "\n")
        return end.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
