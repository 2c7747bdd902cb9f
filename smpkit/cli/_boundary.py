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


def exit_code_of(action: Callable[[], Any]) -> int:
    """Run `action`, print what goes wrong, and return the exit code; an integer that it returns is one itself."""
    try:
        result = action()
        sys.stdout.flush()  # a reader that went away is noticed here at the latest, while it can be caught
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
    except Exception as error:
        return _bug(error)
    return result if isinstance(result, int) else 0


def _usage(error: click.ClickException) -> int:
    """Say wrong usage as everything else: lower case, literals in backticks, and a hint."""
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
    """Be quiet if the reader of a pipe has enough, also when Python flushes the rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _bug(error: Exception) -> int:
    from smpkit.cli._report import write_report

    report = write_report(error, sys.argv)
    hint = "send the report with what you did" if report is not None else None
    where = f"; report: {report}" if report is not None else ""
    print_failure(f"a bug in smpkit: {type(error).__name__}{where}", hint)
    return 3
