"""The one place where errors become messages and exit codes.

==== ==========================================================================
0    done
1    the job or the operation failed (and most other errors of smpkit)
2    wrong usage or configuration
3    a bug in smpkit: the only case with a traceback
4    the cloud refused or could not be reached
130  interrupted
==== ==========================================================================
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from smpkit.cli._console import print_error, print_failure
from smpkit.config.words import closest, printable
from smpkit.errors import SmpkitError

__all__ = ["exit_code_of"]


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
        _drop_output()
        return 1
    except OSError as error:
        return _machine(error)
    except Exception as error:
        traceback.print_exc()
        print_failure(
            f"a bug in smpkit: {type(error).__name__}", "send these lines with what `smpkit doctor --report` says"
        )
        return 3
    return result if isinstance(result, int) else 0


def _usage(error: click.ClickException) -> int:
    """Print wrong usage like other errors: one sentence in lower case, literals in backticks, and a hint."""
    ctx = getattr(error, "ctx", None)
    message = error.format_message()
    hint = f"`{ctx.command_path} --help` shows the usage" if ctx is not None else None
    if isinstance(error, click.NoSuchOption):
        message = f"no such option: `{printable(error.option_name)}`"
        names = [name for param in ctx.command.get_params(ctx) for name in param.opts] if ctx is not None else []
        if (meant := closest(error.option_name, names)) is not None:
            hint = f"did you mean `{meant}`?"
    message = re.sub(r"\s+", " ", re.sub(r"'([^' ]+)'", r"`\1`", message)).strip().rstrip(".")
    print_failure(message[:1].lower() + message[1:], hint)
    return error.exit_code


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
    """Send the rest of the output nowhere: Python flushes it at exit, and would fail there again."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream of a test, which has no file
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
