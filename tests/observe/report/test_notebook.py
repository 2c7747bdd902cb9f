"""What a notebook shows of plans, timelines and reports."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.observe.executed import executed_step
from smpkit.observe.merge import merge
from smpkit.observe.report import open_report
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import RankMemory
from tests.observe.logs import chain, logs_of
from tests.observe.report.folders import ODD, write_run


def _plan() -> Plan:
    config, _ = ModelParallelConfig.from_sources({"pipeline_parallel_degree": 2, "microbatches": 4}, None)
    return decide(config, 2)


def test_a_plan_and_its_timeline_are_drawn() -> None:
    plan = _plan()
    assert plan._repr_html_().startswith("<svg ")
    assert "4 microbatches, bubble 20.0%" in plan._repr_html_()


def test_a_plan_of_a_model_shows_its_memory() -> None:
    memory = RankMemory(1, {}, 3 << 20, 2 << 20, 1 << 20, 6 << 20, None)
    plan = Plan(_plan().mesh, _plan().timeline, memory=(memory,))
    assert "<td>0</td><td>3.0</td><td>3.0</td><td>6.0</td><td>unknown</td><td>0.0</td>" in plan._repr_html_()


def test_an_executed_step_is_drawn_below_its_plan() -> None:
    shown = executed_step(merge(logs_of(chain(2, 4))), 0)._repr_html_()
    assert shown.index("planned: 15.0 ms") < shown.index("executed: 15.4 ms")


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
