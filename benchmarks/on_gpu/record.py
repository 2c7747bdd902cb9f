"""What is known of a run: one record in `results.json`, from which every page is written anew after each part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

__all__ = ["Outcome", "Record", "Result", "outcome_of", "tests_in"]

_MOST_OUTPUT: Final = 24 << 10
_MOST_OUTPUTS: Final = 160 << 10
_MOST_TEXTS: Final = 200 << 10
"""Of all parts, and all tests. Both are on several pages, and a folder is to be committed: 2 MiB at most."""
_FORMAT: Final = 1
BAD: Final = ("failed", "error")


@dataclass(frozen=True)
class Result:
    """How a test ended: passed, failed, error, skipped, or not run."""

    name: str
    outcome: str
    seconds: float
    text: str = ""
    """The end of its traceback, or why it was skipped."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """What it measured; `profile...` are pages."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    title: str
    state: str
    """`passed`, `failed`, `over its limit`, or `not run`: no time was left."""
    seconds: float
    status: int | None
    tests: tuple[Result, ...] = ()
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
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            found = [
                Outcome(**{**each, "tests": tuple(Result(**test) for test in each["tests"])})
                for each in content["outcomes"]
            ]
            return cls(dict(content["facts"]), {each.name: each for each in found})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/results.json is not what a run leaves: {error}") from error

    def write(self, folder: Path) -> None:
        """Write all pages; each is replaced at once, so that who is killed meanwhile leaves the ones before."""
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = _fitting(list(self.outcomes.values()))
        content = {"format": _FORMAT, "facts": self.facts, "outcomes": [asdict(each) for each in outcomes]}
        pages = {
            "results.json": json.dumps(content, indent=1) + "\n",
            "junit.xml": _junit(outcomes),
            "summary.md": _summary(self.facts, outcomes),
            "tables.md": _tables(outcomes),
            "profile.md": _profiles(outcomes),
            "failures.txt": _failures(outcomes),
            "nvidia-smi.txt": self.facts.get("nvidia-smi", "none"),
            "versions.txt": self.facts.get("versions", "unknown"),
        }
        for name, text in pages.items():
            made = folder / f".{name}.new"
            made.write_text(text, encoding="utf-8")
            made.replace(folder / name)


def tests_in(journal: Path, *, ended: str) -> tuple[Result, ...]:
    """Return what a part's tests have reported.

    Args:
        journal: written by `journal.py`.
        ended: why a test that began has not reported.
    """
    found: dict[str, Result] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        event = json.loads(line)
        for name in event.get("collected", ()):
            found[name] = Result(name, "not run", 0.0)
        if "test" in event:
            _note(found, event)
    return tuple(
        Result(test.name, "error", test.seconds, ended) if test.outcome == "started" else test
        for test in found.values()
    )


def _note(found: dict[str, Result], event: Mapping[str, Any]) -> None:
    name, known = event["test"], found.get(event["test"])
    if known is not None and known.outcome in BAD and event["outcome"] not in BAD:
        return
    found[name] = Result(name, event["outcome"], event["seconds"], event.get("text", ""), event.get("found", {}))


def outcome_of(
    name: str, title: str, tests: tuple[Result, ...], *, status: int, seconds: float, late: bool, output: str
) -> Outcome:
    """Return how a part that ran has ended."""
    good = status == 0 or (status == _NO_TESTS and not tests)
    state = "over its limit" if late else "passed" if good else "failed"
    kept = output[-_MOST_OUTPUT:]
    return Outcome(name, title, state, seconds, status, tests, kept if not tests or not good else "")


_NO_TESTS: Final = 5
"""Pytest's status where all of a file's tests are left out by its `-m`."""


def _fitting(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Cut texts of which there are many; the ends of them say most."""
    texts = sum(bool(test.text) for outcome in outcomes for test in outcome.tests)
    outputs = sum(bool(outcome.output) for outcome in outcomes)
    text, output = _MOST_TEXTS // max(1, texts), _MOST_OUTPUTS // max(1, outputs)
    return [
        replace(
            each, output=_cut(each.output, output), tests=tuple(replace(t, text=_cut(t.text, text)) for t in each.tests)
        )
        for each in outcomes
    ]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[-size:]


# --- pages ------------------------------------------------------------------------------------------------------------


def _junit(outcomes: Iterable[Outcome]) -> str:
    root = ET.Element("testsuites")
    for outcome in outcomes:
        counts = Counter(test.outcome for test in outcome.tests)
        numbers = {"tests": len(outcome.tests), "failures": counts["failed"], "errors": counts["error"]}
        numbers["skipped"] = counts["skipped"] + counts["not run"]
        attributes = {"name": outcome.name, "time": f"{outcome.seconds:.1f}", **{k: str(v) for k, v in numbers.items()}}
        suite = ET.SubElement(root, "testsuite", attributes)
        for test in outcome.tests:
            file, _, short = test.name.partition("::")
            about = {"classname": file.removesuffix(".py").replace("/", "."), "name": short or file}
            case = ET.SubElement(suite, "testcase", {**about, "time": f"{test.seconds:.2f}"})
            tag = {"failed": "failure", "error": "error", "skipped": "skipped", "not run": "skipped"}.get(test.outcome)
            if tag is not None:
                why = ET.SubElement(case, tag, {"message": _last_line(test.text) or test.outcome})
                why.text = _printable(test.text) if tag != "skipped" else None
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _summary(facts: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    tests = [test for outcome in outcomes for test in outcome.tests]
    totals = _counts(tests)
    lines = [f"# {facts.get('gpu', 'no GPU')}, {facts.get('date', '')}", ""]
    lines += [", ".join(f"{count} {name}" for name, count in totals.items()) or "No test has run.", ""]
    heads = ["part", "", "passed", "failed", "skipped", "not run", "seconds"]
    lines += [_table(heads, [*_rows(outcomes)]), ""]
    if failures := [test for test in tests if test.outcome in BAD]:
        lines += ["## Failed", ""]
        lines += [f"- `{test.name}`: {_last_line(test.text)}" for test in failures[:_ON_A_PAGE]]
        lines += [f"- and {len(failures) - _ON_A_PAGE} more, in failures.txt"] * (len(failures) > _ON_A_PAGE)
        lines.append("")
    if skips := Counter(_last_line(test.text) for test in tests if test.outcome == "skipped"):
        lines += ["## Skipped", "", *(f"- {count}: {why}" for why, count in skips.most_common(10)), ""]
    if measured := [*_measured(outcomes)]:
        lines += ["## Measured", "", *measured[:_ON_A_PAGE], ""]
    lines += ["Tables: tables.md. Profiles: profile.md. Everything else: junit.xml, failures.txt, results.json.", ""]
    return "\n".join([*lines, facts.get("versions", "")])


def _rows(outcomes: Iterable[Outcome]) -> Iterator[list[str]]:
    """Yield a row per part, and one for all files of test 15 together."""
    files = [each for each in outcomes if each.name.startswith("all:")]
    for outcome in outcomes:
        if outcome not in files:
            yield _row(f"{outcome.name}: {outcome.title}", outcome.state, outcome.tests, outcome.seconds)
    if files:
        tests = [test for each in files for test in each.tests]
        states = ", ".join(f"{count} {state}" for state, count in Counter(each.state for each in files).items())
        yield _row(f"all: {len(files)} files", states, tests, sum(each.seconds for each in files))


def _row(name: str, state: str, tests: Sequence[Result], seconds: float) -> list[str]:
    counts = _counts(tests)
    cells = [str(counts[each]) if tests else "" for each in ("passed", "failed", "skipped", "not run")]
    return [name, state, *cells, f"{seconds:.0f}"]


def _counts(tests: Iterable[Result]) -> Counter[str]:
    return Counter("failed" if test.outcome in BAD else test.outcome for test in tests)


_ON_A_PAGE: Final = 30


def _measured(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        for test in outcome.tests:
            numbers = {name: value for name, value in test.found.items() if not name.startswith("profile")}
            if numbers:
                short = test.name.rpartition("/")[2]
                yield f"- `{short}`: " + ", ".join(f"{name} {_number(value)}" for name, value in numbers.items())


def _tables(outcomes: Iterable[Outcome]) -> str:
    parts = [f"# {each.name}: {each.title}\n\n{each.output.strip()}\n" for each in outcomes if not each.tests]
    measured = "\n".join(_measured(outcomes))
    return "\n".join([*parts, f"# Measured by tests\n\n{measured}\n"])


def _profiles(outcomes: Iterable[Outcome]) -> str:
    tests = [test for outcome in outcomes for test in outcome.tests]
    pages = [
        f"# {test.name}\n\n{text}\n"
        for test in tests
        for name, text in test.found.items()
        if name.startswith("profile")
    ]
    return "\n".join(pages) or "No profile was taken.\n"


def _failures(outcomes: Iterable[Outcome]) -> str:
    texts = []
    for outcome in outcomes:
        if outcome.state in ("failed", "over its limit") and outcome.output:
            texts.append(f"=== {outcome.name}: {outcome.state}, status {outcome.status}\n\n{outcome.output}\n")
        texts += [f"--- {test.name}\n\n{test.text}\n" for test in outcome.tests if test.outcome in BAD]
    return "\n".join(texts) or "Nothing has failed.\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))


def _last_line(text: str) -> str:
    """Return what a traceback ends with: the error, not the place."""
    lines = [line.strip() for line in text.strip().splitlines()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return _printable((errors or lines or [""])[0 if errors else -1])[:300]


def _printable(text: str) -> str:
    """Leave out what XML 1.0 cannot say."""
    return "".join(each for each in text if each in "\t\n" or each >= " ")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
