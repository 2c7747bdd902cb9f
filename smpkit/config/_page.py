"""What the writers of the reference pages share: write the page, or say that it is stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(arguments: Sequence[str] | None, module: str, path: Path, page: Callable[[], str]) -> int:
    """Write a page, or with `--check` only say whether it is up to date.

    Args:
        arguments: of the command line; None: those of this process.
        module: what is run with `python -m`, for messages.
        path: where the page is unless the arguments say otherwise.
        page: returns the text.

    Returns:
        the exit code.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Write {path.name} from the code.")
    parser.add_argument("file", nargs="?", type=Path, default=path, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is stale")
    options = parser.parse_args(arguments)
    text = page()
    if not options.check:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(text, encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"error: {options.file} is stale\nhint: run `python -m {module}`\n")
    return 1
