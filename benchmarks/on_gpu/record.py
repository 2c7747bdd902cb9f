"""What is known of a run: one record in `results.json`, from which every page is written anew after each part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

_ON_A_PAGE: Final = 30
BAD: Final = ("failed", "error")


@dataclass(frozen=True)
class Test:
    """How a test ended: passed, failed, error, skipped, or not run."""

    name: str
    outcome: str
    seconds: float
    text: str = ""
    """The end of its traceback, or why it was skipped."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What it measured."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    title: str
    state: str
    """`passed`, `failed`, `over its limit`, or `not run`: no time was left."""
    seconds: float = 0.0
    status: int | None = None
    tests: tuple[Test, ...] = ()
    output: str = ""
    """The end of what it printed; of a benchmark its tables."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left that another run could add."""
        return self.state in ("passed", "failed")


@dataclass
class Record:
    """A run, perhaps in several goes."""

    facts: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Return what an earlier go has left; raise ValueError if it is not that."""
        try:
            content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            outcomes = [
                Outcome(**{**each, "tests": tuple(Test(**test) for test in each["tests"])})
                for each in content["outcomes"]
            ]
            return cls(dict(content["facts"]), {each.name: each for each in outcomes})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/results.json is not what a run leaves: {error}") from error

    def write(self, folder: Path) -> None:
        """Write all pages; each is replaced at once, so that who is killed meanwhile leaves the ones before."""
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = list(self.outcomes.values())
        pages = {
            "results.json": json.dumps(
                {"facts": self.facts, "outcomes": [asdict(each) for each in outcomes]}, indent=1
            ),
            "summary.md": _summary(self.facts, outcomes),
            "tables.md": "\n\n".join(_tables(outcomes)),
            "failures.txt": "\n\n".join(_failures(outcomes)) or "Nothing has failed.",
        }
        for name, text in pages.items():
            new = folder / f".{name}.new"
            new.write_text(f"{text.rstrip()}\n", encoding="utf-8")
            new.replace(folder / name)


def tests_in(journal: Path, *, ended: str) -> tuple[Test, ...]:
    """Return what a part's tests have reported.

    Args:
        journal: written by `journal.py`.
        ended: why a test that began has not reported.
    """
    tests: dict[str, Test] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        event = json.loads(line)
        for name in event.pop("collected", ()):
            tests[name] = Test(name, "not run", 0.0)
        # A test that failed may report its tear-down afterwards.
        if event and (event["name"] not in tests or tests[event["name"]].outcome not in BAD):
            tests[event["name"]] = Test(**event)
    return tuple(
        Test(test.name, "error", test.seconds, ended) if test.outcome == "started" else test for test in tests.values()
    )


# --- pages ------------------------------------------------------------------------------------------------------------


def _summary(facts: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    tests = [test for outcome in outcomes for test in outcome.tests]
    totals = ", ".join(f"{count} {name}" for name, count in _counts(tests).items())
    rows = [["part", "", "passed", "failed", "skipped", "not run", "seconds"], ["---"] * 7, *map(_row, outcomes)]
    lines = [f"# {facts['gpu']}, {facts['date']}", "", totals or "No test has run.", ""]
    lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    failed = [f"- `{test.name}`: {_last_line(test.text)}" for test in tests if test.outcome in BAD]
    skips = Counter(_last_line(test.text) for test in tests if test.outcome == "skipped")
    sections = {
        "Failed": [*failed[:_ON_A_PAGE], *["- the others are in failures.txt"] * (len(failed) > _ON_A_PAGE)],
        "Skipped": [f"- {count}: {why}" for why, count in skips.most_common(10)],
        "Measured": [*_measured(outcomes)][:_ON_A_PAGE],
    }
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""] if content else []
    lines += ["Tables: tables.md. Everything else: failures.txt, results.json.", ""]
    return "\n".join([*lines, facts["versions"], "", "```", facts["nvidia-smi"], "```"])


def _row(outcome: Outcome) -> list[str]:
    counts = _counts(outcome.tests)
    cells = [str(counts[each]) if outcome.tests else "" for each in ("passed", "failed", "skipped", "not run")]
    return [f"{outcome.name}: {outcome.title}", outcome.state, *cells, f"{outcome.seconds:.0f}"]


def _counts(tests: Iterable[Test]) -> Counter[str]:
    return Counter("failed" if test.outcome in BAD else test.outcome for test in tests)


def _measured(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for test in (test for outcome in outcomes for test in outcome.tests):
        if test.measured:
            short = test.name.rpartition("/")[2]
            yield f"- `{short}`: " + ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in test.measured.items()
            )


def _tables(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if not outcome.tests:
            yield f"# {outcome.name}: {outcome.title}\n\n{outcome.output.strip()}"
    yield "# Measured by tests\n\n" + "\n".join(_measured(outcomes))


def _failures(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.state in ("failed", "over its limit") and outcome.output:
            yield f"=== {outcome.name}: {outcome.state}, status {outcome.status}\n\n{outcome.output}"
        yield from (f"--- {test.name}\n\n{test.text}" for test in outcome.tests if test.outcome in BAD)


def _last_line(text: str) -> str:
    """Return what a traceback ends with: the error, not the place."""
    lines = [line.strip() for line in text.strip().splitlines()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:] or [""])[0][:300]
