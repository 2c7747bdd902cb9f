"""What the page says, and that nothing of a job becomes part of it as anything but text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from smpkit.observe.report import open_report, view
from smpkit.observe.report.data import Content, Curve, Setting, content_of
from smpkit.observe.report.view import page
from smpkit.observe.runs import open_run
from smpkit.observe.summary import Split
from tests.observe.report.folders import ODD, write_events, write_run

ASSETS = Path(view.__file__).parent / "assets"


class Elements(HTMLParser):
    """The elements and the text of a page, and what an attribute could load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str]]]] = []
        self.text = ""
        self.feed(text)
        self.names = [tag for tag, _ in self.found]
        self.titles = [dict(attributes)["aria-label"] for tag, attributes in self.found if tag == "section"]
        every = [attribute for _, attributes in self.found for attribute in attributes]
        self.loads = [value for name, value in every if name in ("src", "srcset", "data", "action")]
        self.loads += [value for name, value in every if name == "href" and not value.startswith("#")]
        self.handlers = [name for name, _ in every if name.startswith("on")]
        self.styles = [value for name, value in every if name == "style"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [(name, value or "") for name, value in attrs]))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    """Two runs, the second without offloading and failed."""
    folder = tmp_path_factory.mktemp("job")
    one = write_run(folder, "20260102-030405")
    other = write_run(folder, "20260102-040506", offloads=False, failed=True)
    return [content_of(run) for run in (one, other)]


@pytest.fixture(scope="module")
def one(contents: list[Content]) -> Elements:
    return Elements(page(contents[:1]))


def test_the_page_loads_nothing_and_its_policy_forbids_it(contents: list[Content]) -> None:
    text = page(contents)
    found = Elements(text)
    assert (found.loads, found.handlers, found.styles) == ([], [], [])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; base-uri 'none'; form-action 'none';")
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]


def test_the_policy_allows_the_page_its_own_scripts_and_style(contents: list[Content]) -> None:
    text = page(contents)
    policy = html.unescape(text[: text.index("<title>")])
    for either in re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256("".join(either).encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_a_value_that_became_nan_is_said_and_not_left_out(contents: list[Content]) -> None:
    curve = Curve("loss", (0, 1), (2.0, None), "NaN or infinite once, at step 1")
    text = Elements(page([replace(contents[0], curves=(curve,))])).text
    assert re.search(rf"loss\s+not finite\s+{curve.broken}", text)
    assert re.search(rf"loss\s+was\s+{curve.broken}\.", text)


def test_names_of_a_job_are_text(contents: list[Content]) -> None:
    text = page(contents)
    assert ODD not in text
    assert Elements(text).names.count("script") == 1 + len(view._SCRIPTS)
    assert "img" not in Elements(text).names
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert not set("<>&") & set(data)
    assert {curve["name"] for curve in json.loads(data)["runs"][0]["curves"]} == {"loss", ODD}


def test_all_sections_are_there_and_say_what_is_known(one: Elements) -> None:
    titles = ["Summary", "Loss and other values", "Throughput", "Schedule", "Memory over a step", "Link with the host"]
    titles += ["Communication", "Configuration", "Environment", "Warnings and output"]
    assert one.titles == titles
    for said in ("6,600", "0.4% slower", "plan 9.0 MiB", "blocks.0", "0 → 1", "rank 1: be careful"):
        assert said in one.text
    assert "last lines of" not in one.text


def test_settings_have_values_and_origins_and_defaults_are_apart(one: Elements) -> None:
    assert re.search(r"microbatches\s+4\s+-p microbatches\s", one.text)
    assert re.search(r"offload_activations\s+true\s+job.yaml:12\s", one.text.replace("_\n", "_"))
    assert one.text.index("job.yaml:12") < one.text.index("1 defaults") < one.text.index("active_")


def test_of_two_runs_the_differences_come_first_and_what_failed_early(contents: list[Content]) -> None:
    found = Elements(page(contents))
    assert found.titles[:3] == ["Differences", "Warnings and output", "Summary"]
    assert "last lines of rank-1" in found.text
    differences = found.text[: found.text.index("Figures")]
    assert re.search(r"activations\s+true\s+job.yaml:12\s+false\s+job.yaml:12", differences)
    assert "microbatches" not in differences
    assert re.search(r"steps\s+8\s+8\s+=", found.text)


def test_settings_that_look_alike_are_no_difference_and_multiples_are_told_as_such(contents: list[Content]) -> None:
    """`hyperparameters – –` was one, and 100 steps after 1 `+9900.0%`."""
    before = replace(contents[0], settings=(Setting("hyperparameters", "–", "default"),))
    assert before.summary is not None
    after = replace(contents[0], settings=(), summary=replace(before.summary, steps=800))
    text = Elements(page([before, after])).text
    assert "hyperparameters" not in text[: text.index("Figures")]
    assert re.search(r"steps\s+8\s+800\s+× 100\s", text)


def test_of_many_ranks_the_first_the_last_and_the_busiest_are_shown(contents: list[Content]) -> None:
    summary = contents[0].summary
    assert summary is not None
    ranks = [replace(summary.ranks[0], rank=rank) for rank in range(64)]
    ranks[40] = replace(ranks[40], split=replace(ranks[40].split, compute=0.02))
    many = replace(contents[0], summary=replace(summary, ranks=tuple(ranks), world_size=64), degrees=(64, 1, 1))
    text = page([many])
    assert "16 of 64 ranks are shown: the first, the last and the busiest." in text
    bars = [int(rank) for rank in re.findall(r'aria-label="rank (\d+): compute', text)]
    assert {0, 40, 63} < set(bars)
    assert len(bars) == 16
    assert "the longest waits" in text


def test_ranks_without_time_and_messages_without_bytes_are_shown(contents: list[Content]) -> None:
    summary = contents[0].summary
    assert summary is not None
    ranks = (replace(summary.ranks[0], split=Split()), replace(summary.ranks[1], split=Split(optimizer=1.0)))
    links = tuple(replace(link, num_bytes=0) for link in contents[0].links)
    text = Elements(page([replace(contents[0], summary=replace(summary, ranks=ranks), links=links)])).text
    assert re.search(r"0\s+0 µs\s+0%\s+0 µs\s+1\s+1.00 s\s+100%\s+1.00 s", text)
    assert re.search(r"0 → 1\s+\d+\s+0 B", text)


def test_what_was_not_recorded_is_said_once(tmp_path: Path, contents: list[Content]) -> None:
    write_events(tmp_path / "events")
    text = Elements(page([content_of(open_run(str(tmp_path)))])).text
    assert "loss.reduce_mean()" in text
    assert "smpkit run JOB_FILE" in text
    bare = Elements(page([replace(contents[0], steps=(), times=(), main=None, links=(), missing={"events": "None."})]))
    assert (bare.text.count("None."), "Schedule" in bare.titles) == (1, False)


def test_a_notebook_shows_a_frame_that_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "20260102-030405")
    monkeypatch.chdir(tmp_path)
    report = open_report()
    [(tag, attributes)] = Elements(report._repr_html_()).found
    assert tag == "iframe"
    assert dict(attributes).items() >= {"sandbox": "allow-scripts", "srcdoc": report.html}.items()
    assert ODD not in report.html


# --- the library --------------------------------------------------------------------------------------------------


def test_the_library_is_the_published_one() -> None:
    text = (ASSETS / "README.md").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^\| `([\w.-]+)` \| `[\w./-]+` \| `(\w{64})` \|$", text, re.MULTILINE))
    assert set(pinned) == {path.name for path in ASSETS.glob("uplot*")}
    for name, digest in pinned.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (ASSETS / "uplot-LICENSE.txt").read_text(encoding="utf-8")
    version = re.search(r"\(v([\d.]+)\)", (ASSETS / "uplot.js").read_text(encoding="utf-8"))
    assert version is not None
    assert f"uPlot {version[1]} " in (ASSETS.parent / "page.html.j2").read_text(encoding="utf-8")
