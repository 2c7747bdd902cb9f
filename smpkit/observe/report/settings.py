"""The settings of a run, each with where it came from, and how those of two runs differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from smpkit.config.job import JobConfig
from smpkit.observe.runs import JOB

__all__ = ["Difference", "Setting", "differences", "settings_of"]

_COMMAND: Final = re.compile(r"^# As it ran: (?P<command>.*)$", re.MULTILINE)
_PARAMETERS: Final = "distribution.smdistributed.modelparallel.parameters."
_SHORT: Final = {
    "--set": "",
    "-p": _PARAMETERS,
    "--parameter": _PARAMETERS,
    "-H": "hyperparameters.",
    "--hyperparameter": "hyperparameters.",
}
"""Options of `smpkit run` that set a value, and what their keys are relative to."""


@dataclass(frozen=True)
class Setting:
    """One value of a job."""

    name: str
    """Its path in the job file."""
    value: str
    origin: str
    """`job file`, `default`, or the option that set it."""

    @property
    def short(self) -> str:
        """The name as people say it: without the path to the parameters."""
        return self.name.removeprefix(_PARAMETERS)


@dataclass(frozen=True)
class Difference:
    """A setting that two runs do not share; None where one has none."""

    name: str
    before: str | None
    after: str | None


def settings_of(folder: Path) -> tuple[Setting, ...]:
    """Return the settings of the run in a folder, what was set first; none if the job is not there."""
    try:
        text = (folder / JOB).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return ()
    if not isinstance(content, dict):
        return ()
    given = dict(_flat(content, ""))
    match = _COMMAND.search(text)
    options = _options(match["command"]) if match else {}
    defaults = {name: value for name, value in _defaults(content) if name not in given}
    found = [Setting(name, value, options.get(name, "job file")) for name, value in given.items()]
    return (*found, *(Setting(name, value, "default") for name, value in defaults.items()))


def differences(before: Sequence[Setting], after: Sequence[Setting]) -> tuple[Difference, ...]:
    """Return the settings that differ, those that somebody has set first."""
    one, other = ({each.short: each for each in settings} for settings in (before, after))
    names = dict.fromkeys((*one, *other))
    found = [
        Difference(name, *(each[name].value if name in each else None for each in (one, other)))
        for name in names
        if (one[name].value if name in one else None) != (other[name].value if name in other else None)
    ]
    return tuple(found)


def _defaults(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield all values of a job, those that it left out with their defaults; nothing if it is no job any more."""
    try:
        config = JobConfig.model_validate(content)
    except (ValidationError, ValueError):
        return
    yield from _flat(config.model_dump(mode="json", by_alias=True), "")


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "–" if isinstance(value, list) else str(value) if value != {} else "–"


def _options(command: str) -> dict[str, str]:
    """Return by setting the option of a command line that has set it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    found = {}
    for option, value in pairwise(words):
        if option in _SHORT and "=" in value:
            found[_SHORT[option] + value.partition("=")[0]] = option
    return found
