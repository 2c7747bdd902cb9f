"""What is known of a run: one record in `results.json`, from which every page is written anew after each part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import AliasChoices, BaseModel, Field

from benchmarks.common import table

BAD: Final = ("failed", "error")
_COUNTED: Final = ("passed", "failed", "skipped", "not run")


class Test(BaseModel):
    """How a test ended: passed, failed, error, skipped, or not run."""

    name: str
    outcome: str
    seconds: float = 0.0
    text: str = ""
    """The end of its traceback, or why it was skipped."""
    measured: dict[str, Any] = Field(default={}, validation_alias=AliasChoices("measured", "found"))
    """What it measured; the first run's record says `found`."""

    @property
    def last_line(self) -> str:
        """What a traceback ends with: the error, not the place."""
        lines = [line.strip() for line in self.text.strip().splitlines()]
        errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
        return (errors or lines[-1:] or [""])[0][:300]


class Outcome(BaseModel):
    """How a part ended."""

    name: str
    title: str
    state: str
    """`passed`, `failed`, `over its limit`, or `not run`: no time was left."""
    seconds: float = 0.0
    status: int | None = None
    tests: list[Test] = []
    output: str = ""
    """The end of what it printed; of a benchmark its tables."""


class Record(BaseModel):
    """A run, perhaps in several goes."""

    facts: dict[str, str]
    outcomes: list[Outcome] = []

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Return what an earlier go has left; raise ValueError if it is not that."""
        try:
            return cls.model_validate_json((folder / "results.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}/results.json is not what a run leaves: {error}") from error

    def add(self, outcome: Outcome) -> None:
        """Put it in the place of the part's earlier one, which stays if there was no time for another."""
        others = [other for other in self.outcomes if other.name != outcome.name]
        if outcome.state != "not run" or len(others) == len(self.outcomes):
            self.outcomes = [*others, outcome]

    def write(self, folder: Path) -> None:
        """Write all pages; each is replaced at once, so that who is killed meanwhile leaves the ones before."""
        folder.mkdir(parents=True, exist_ok=True)
        pages = {
            "results.json": self.model_dump_json(indent=1),
            "summary.md": _summary(self.facts, self.outcomes),
            "tables.md": "\n\n".join(
                f"# {other.name}: {other.title}\n\n{other.output.strip()}" for other in self.outcomes if not other.tests
            ),
            "failures.txt": "\n\n".join(_failures(self.outcomes)) or "Nothing has failed.",
        }
        for name, text in pages.items():
            new = folder / f".{name}.new"
            new.write_text(f"{text.rstrip()}\n", encoding="utf-8")
            new.replace(folder / name)


def tests_in(journal: Path, *, ended: str) -> list[Test]:
    """Return what a part's tests have reported.

    Args:
        journal: written by `journal.py`.
        ended: why a test that began has not reported.
    """
    tests: dict[str, Test] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        event = json.loads(line)
        for name in event.pop("collected", ()):
            tests[name] = Test(name=name, outcome="not run")
        # A test that failed may report its tear-down afterwards.
        if event and (event["name"] not in tests or tests[event["name"]].outcome not in BAD):
            tests[event["name"]] = Test(**event)
    for test in tests.values():
        if test.outcome == "started":
            test.outcome, test.text = "error", ended
    return list(tests.values())


# --- pages ------------------------------------------------------------------------------------------------------------


def _summary(facts: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    tests = [test for outcome in outcomes for test in outcome.tests]
    totals = ", ".join(f"{count} {name}" for name, count in _counts(tests).items())
    skips = Counter(test.last_line for test in tests if test.outcome == "skipped")
    lists = {
        "Failed": [f"`{test.name}`: {test.last_line}" for test in tests if test.outcome in BAD],
        "Skipped": [f"{count}: {why}" for why, count in skips.most_common(10)],
        "Measured": list(_measured(tests)),
    }
    paragraphs = [
        f"# {facts['gpu']}, {facts['date']}",
        totals or "No test has run.",
        table(["part", "", *_COUNTED, "seconds"], map(_row, outcomes)),
        *("\n".join([f"## {title}\n", *(f"- {line}" for line in lines)]) for title, lines in lists.items() if lines),
        "Tables: tables.md. Everything else: failures.txt, results.json.",
        facts["versions"],
        f"```\n{facts['nvidia-smi']}\n```",
    ]
    return "\n\n".join(paragraphs)


def _row(outcome: Outcome) -> list[object]:
    counts = _counts(outcome.tests)
    cells = [counts[kind] if outcome.tests else "" for kind in _COUNTED]
    return [f"{outcome.name}: {outcome.title}", outcome.state, *cells, f"{outcome.seconds:.0f}"]


def _counts(tests: Iterable[Test]) -> Counter[str]:
    return Counter("failed" if test.outcome in BAD else test.outcome for test in tests)


def _measured(tests: Iterable[Test]) -> Iterator[str]:
    for test in tests:
        figures = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in test.measured.items()]
        if figures:
            yield f"`{test.name.rpartition('/')[2]}`: {', '.join(figures)}"


def _failures(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.state in ("failed", "over its limit") and outcome.output:
            yield f"=== {outcome.name}: {outcome.state}, status {outcome.status}\n\n{outcome.output}"
        yield from (f"--- {test.name}\n\n{test.text}" for test in outcome.tests if test.outcome in BAD)
