"""Write to the job's log, on one rank, the lines that users of SMP v1 look for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable


def announce(lines: Iterable[str]) -> None:
    """Log `lines` at INFO on the logger `smpkit.announce`, which shows them unless the script configured logging.

    SMP v1 wrote its partition assignments to the log, and its documentation tells users to look there; a script
    that sets up logging of its own decides by its own levels.
    """
    logger = logging.getLogger("smpkit.announce")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    for line in lines:
        logger.info("%s", line)
