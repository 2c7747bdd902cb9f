"""What a notebook shows of a report."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from smpkit.observe.report import open_report
from tests.observe.report.folders import ODD, write_run


def test_a_report_is_a_frame_that_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "20260102-030405")
    monkeypatch.chdir(tmp_path)
    report = open_report()
    found: list[tuple[str, dict[str, str | None]]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Parser().feed(report._repr_html_())
    [(tag, attributes)] = found
    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", "allow-scripts", report.html)
    assert ODD not in report.html
