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

_TITLES: Final[dict[Kind, str]] = {
    "smp": "SMP v1",
    "shimmed": "shimmed",
    "unknown": "unknown",
    "missing": "not here",
    "blocked": "cannot work",
    "cuda": "needs CUDA",
}
_HEAD: Final = 13
_WITHOUT_GPU: Final = "on a machine without a GPU, run it with `smpkit compat --cuda-on-cpu`"


def as_json(check: Check) -> str:
    """Return all findings, and whether the scripts can run."""
    findings = [asdict(each) for each in check.findings]
    return json.dumps({"can_run": not check.problems, "files": check.files, "findings": findings}, indent=2)


def as_text(check: Check, columns: int) -> Iterator[str]:
    """Yield the lines of a table: names of SMP v1 and shims together, what needs attention with its place."""
    more = f" and {len(check.files) - 1} more" if len(check.files) > 1 else ""
    yield printable(f"{check.files[0]}{more}")
    yield ""
    for kind, title in _TITLES.items():
        found = check.of(kind)
        if not found:
            continue
        if kind in ("smp", "shimmed"):
            names = sorted({each.name.removeprefix("smp.") for each in found})
            names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
            yield from fold(title.ljust(_HEAD), [*(f"{name}," for name in names[:-1]), names[-1]], columns, " ")
            continue
        for number, each in enumerate(found):
            yield from fold(("" if number else title).ljust(_HEAD), _words(each), columns, " ")
    if check.of("cuda"):
        yield from fold(" " * _HEAD, _WITHOUT_GPU.split(" "), columns, " ")
    yield ""
    problems = len(check.problems)
    yield {0: "can run", 1: "cannot run: 1 problem"}.get(problems, f"cannot run: {problems} problems")


def _words(finding: Finding) -> list[str]:
    message = f": {finding.message}" if finding.message else ""
    optional = " (the script goes on without it)" if finding.optional else ""
    return printable(f"{finding.file}:{finding.line} {finding.name}{message}{optional}").split(" ")
