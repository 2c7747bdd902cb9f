"""The one place where errors become messages and exit codes.

==== ==========================================================================
0    done
1    the job or the operation failed (and most other errors of smpkit)
2    wrong usage or configuration
3    a bug in smpkit; a report file is written
4    the cloud refused or could not be reached
130  interrupted
==== ==========================================================================
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from smpkit.cli._console import UnknownCommand, print_error, print_failure
from smpkit.config.words import printable
from smpkit.errors import SmpkitError

__all__ = ["exit_code_of"]

_OF_THE_MACHINE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ETXTBSY),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    }
)
"""Errors of a full disk, missing permissions or an exhausted machine, which are not bugs in smpkit."""


def exit_code_of(action: Callable[[], Any]) -> int:
    """Run `action`, print what goes wrong, and return the exit code; an integer that it returns is one itself."""
    try:
        result = action()
        sys.stdout.flush()  # a closed pipe must raise here, where it is caught
    except click.ClickException as error:
        return _usage(error)
    except (click.Abort, KeyboardInterrupt):
        print_failure("interrupted")
        return 130
    except SmpkitError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        return _machine(error) if error.errno in _OF_THE_MACHINE else _bug(error)
    except Exception as error:
        return _bug(error)
    return result if isinstance(result, int) else 0


def _usage(error: click.ClickException) -> int:
    """Print wrong usage like other errors: lower case, literals in backticks, and a hint."""
    message = error.message if isinstance(error, UnknownCommand) else error.format_message()
    candidate = getattr(error, "candidate", None)
    if isinstance(error, click.NoSuchOption):
        message, candidate = (
            f"no such option: `{printable(error.option_name)}`",
            next(iter(error.possibilities or ()), ""),
        )
    message = re.sub(r"'([^' ]+)'", r"`\1`", message.rstrip("."))
    ctx = getattr(error, "ctx", None)
    usage = f"`{ctx.command_path} --help` shows the usage" if ctx is not None else None
    print_failure(message[:1].lower() + message[1:], f"did you mean `{candidate}`?" if candidate else usage)
    return error.exit_code


def _reader_gone() -> int:
    """End without a message if the reader of our output has closed the pipe."""
    _drop_output()
    return 1


def _machine(error: OSError) -> int:
    """Print the error of the operating system and the file; drop output that could not be written."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is None:  # an error of writing to an open stream
        _drop_output()
        print_failure(f"cannot write: {reason}")
    else:
        print_failure(f"cannot use `{printable(os.fsdecode(error.filename))}`: {reason}")
    return 1


def _drop_output() -> None:
    """Keep Python from failing once more when it flushes the rest at exit."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream of a test, which has no file
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _bug(error: Exception) -> int:
    from smpkit.cli._report import write_report

    report = write_report(error, sys.argv)
    hint = "send the report with what you did" if report is not None else None
    where = f"; report: {report}" if report is not None else ""
    print_failure(f"a bug in smpkit: {type(error).__name__}{where}", hint)
    return 3
