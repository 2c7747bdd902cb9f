"""`smpkit compat --check`: what a script uses, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from smpkit.cli._layout import fold
from smpkit.config.words import printable

if TYPE_CHECKING:
    from smpkit.drop_in.check import Check, Finding, Kind

__all__ = ["as_json", "as_text"]

_TITLES: Final[dict[Kind, str]] = {"unknown": "unknown", "missing": "not here"}
_HEAD: Final = 10


def as_json(check: Check) -> str:
    """Return all findings, and whether the scripts can run."""
    findings = [asdict(finding) for finding in check.findings]
    return json.dumps({"can_run": not check.problems, "files": check.files, "findings": findings}, indent=2)


def as_text(check: Check, columns: int) -> Iterator[str]:
    """Yield the lines of a table: names of SMP v1 together, what needs attention with its place."""
    more = f" and {len(check.files) - 1} more" if len(check.files) > 1 else ""
    yield printable(f"{check.files[0]}{more}")
    yield ""
    names = sorted({finding.name.removeprefix("smp.") for finding in check.of("smp")})
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    if names:
        yield from fold("SMP v1".ljust(_HEAD), [*(f"{name}," for name in names[:-1]), names[-1]], columns, " ")
    for kind, title in _TITLES.items():
        for number, finding in enumerate(check.of(kind)):
            yield from fold(("" if number else title).ljust(_HEAD), _words(finding), columns, " ")
    yield ""
    problems = len(check.problems)
    yield {0: "can run", 1: "cannot run: 1 problem"}.get(problems, f"cannot run: {problems} problems")


def _words(finding: Finding) -> list[str]:
    message = f": {finding.message}" if finding.message else ""
    optional = " (where the script gets there)" if finding.optional else ""
    return printable(f"{finding.file}:{finding.line} {finding.name}{message}{optional}").split(" ")
