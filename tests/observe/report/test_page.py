"""What the page says, and that nothing of a job becomes part of it as anything but text."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from smpkit.errors import SmpkitError
from smpkit.observe.report import page as page_module
from smpkit.observe.report.content import Content, content_of, plain
from smpkit.observe.report.folder import read_material
from smpkit.observe.report.page import page
from smpkit.observe.report.settings import differences
from smpkit.observe.runs import EVENTS, JOB, SUMMARY, VALUES, open_run
from smpkit.observe.summary import RunSummary, write_summary
from smpkit.observe.values import Logged, ValueWriter
from tests.observe.report.folders import ODD, RANKS, STEPS, write_events, write_run

ASSETS = Path(page_module.__file__).parent / "assets"


class Elements(HTMLParser):
    """Counts elements and collects the text and what an attribute could load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.styles = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "data", "action")]
        self.loads += [value or "" for name, value in attrs if name == "href" and not (value or "").startswith("#")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.styles += sum(name == "style" for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    """Two runs, the second without offloading and failed."""
    folder = tmp_path_factory.mktemp("job")
    one = write_run(folder, "20260102-030405")
    other = write_run(folder, "20260102-040506", offloads=False, failed=True)
    return [content_of(read_material(run)) for run in (one, other)]


@pytest.fixture(scope="module")
def one(contents: list[Content]) -> Elements:
    return Elements(page(contents[:1]))


def test_the_page_loads_nothing_and_its_policy_forbids_it(contents: list[Content]) -> None:
    text = page(contents)
    found = Elements(text)
    assert (found.loads, found.handlers, found.styles) == ([], [], 0)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]


def test_a_value_that_became_nan_is_said_and_not_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "20260102-030405")
    writer = ValueWriter(folder.path)
    writer.write(Logged(STEPS, 0.0, {"loss": math.nan}))
    writer.write(Logged(STEPS + 1, 0.0, {"loss": math.inf}))
    writer.close()
    text = Elements(page([content_of(read_material(folder))])).text
    said = f"NaN or infinite 2 times, first at step {STEPS}"
    assert re.search(rf"loss\s+not finite\s+{said}", text)
    assert re.search(rf"loss\s+was {said}\.", text)


def test_names_of_a_job_are_text(contents: list[Content]) -> None:
    text = page(contents)
    assert ODD not in text
    assert Elements(text).names.count("script") == 1 + len(page_module._SCRIPTS)
    assert "img" not in Elements(text).names
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert not set("<>&") & set(data)
    assert {curve["name"] for curve in json.loads(data)["runs"][0]["curves"]} == {"loss", ODD}


def test_all_sections_are_there_and_say_what_is_known(one: Elements) -> None:
    for title in (
        "Summary",
        "Loss and other values",
        "Throughput",
        "Schedule",
        "Memory over a step",
        "Link with the host",
    ):
        assert title in one.text
    for said in ("6,600", "0.4% slower", "plan 9.0 MiB", "blocks.0", "from 0", "--set", "-p", "rank 1: be careful"):
        assert said in one.text
    assert "last lines of" not in one.text


def test_a_run_whose_ranks_told_nothing_at_their_end_shows_its_events_and_how_it_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405")
    write_summary(run.path, RunSummary("odd", 1.7e9, 12.0, 0, "killed"))
    shown = content_of(read_material(run)).summary
    assert shown is not None
    assert (shown.exit_reason, shown.seconds, shown.steps) == ("killed", 12.0, STEPS)
    assert [rank.rank for rank in shown.ranks] == list(range(RANKS))


def test_a_failed_run_shows_the_last_lines_of_the_rank_that_failed(contents: list[Content]) -> None:
    assert [log.name for log in contents[1].logs] == ["rank-1"]
    assert "last lines of rank-1" in Elements(page(contents[1:])).text


def test_differences_come_first(contents: list[Content]) -> None:
    found = differences(contents[0].settings, contents[1].settings)
    assert [(each.name, each.before, each.after) for each in found] == [("offload_activations", "true", "false")]
    text = Elements(page(contents)).text
    assert text.index("Differences") < text.index("Summary")


def test_every_setting_has_an_origin(contents: list[Content]) -> None:
    origins = {each.short: each.origin for each in contents[0].settings}
    assert origins["hyperparameters.steps"] == "--set"
    assert origins["microbatches"] == "-p"
    assert origins["pipeline_parallel_degree"] == "job file"
    assert origins["active_microbatches"] == "default"


def test_a_folder_of_plain_events_works_and_says_what_is_missing(tmp_path: Path) -> None:
    write_events(tmp_path / "events")
    content = content_of(read_material(open_run(str(tmp_path))))
    text = Elements(page([content])).text
    assert set(content.missing) == {"summary", "values", "settings", "environment"}
    assert "loss.reduce_mean()" in text
    assert "smpkit run JOB_FILE" in text
    assert content.summary is not None
    assert content.summary.steps == 8


def test_a_run_without_events_says_how_to_record_them(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405")
    shutil.rmtree(run.path / EVENTS)
    content = content_of(read_material(run))
    assert "SMPKIT_EVENTS_DIR" in Elements(page([content])).text
    assert content.steps == ()


@pytest.mark.parametrize("name", [SUMMARY, JOB, VALUES])
def test_damaged_files_leave_the_rest(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, "20260102-030405")
    (run.path / name).write_bytes(b"{\xff\x00[")
    content = content_of(read_material(run))
    assert "Schedule" in page([content])
    assert content.missing


def test_damaged_events_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405")
    (run.path / EVENTS / "events_1.jsonl").write_text("nonsense\n")
    assert "events_1.jsonl" in content_of(read_material(run)).missing["events"]


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SmpkitError, match="no events"):
        read_material(open_run(str(tmp_path)))


def test_secrets_in_output_are_hidden(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405", failed=True)
    (run.path / "logs" / "rank-1.log").write_text("Traceback (most recent call last):\nAPI_TOKEN=hunter2secret\n")
    assert "hunter2secret" not in page([content_of(read_material(run))])


def test_the_data_are_json(contents: list[Content]) -> None:
    content = json.loads(json.dumps(plain(contents[0]), allow_nan=False))
    assert content["summary"]["steps"] == 8
    assert content["steps"][0]["pipelines"][0]["ranks"] == [0, 1]


# --- the library --------------------------------------------------------------------------------------------------


def _pinned() -> dict[str, tuple[str, str]]:
    text = (ASSETS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| `([\w./-]+)` \| `(\w{64})` \|$", text, re.MULTILINE)
    return {name: (inside, digest) for name, inside, digest in rows}


def test_the_library_is_the_published_one() -> None:
    pinned = _pinned()
    assert set(pinned) == {path.name for path in ASSETS.glob("uplot*")}
    for name, (_, digest) in pinned.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (ASSETS / "uplot-LICENSE.txt").read_text(encoding="utf-8")
    version = re.search(r"\(v([\d.]+)\)", (ASSETS / "uplot.js").read_text(encoding="utf-8"))
    assert version is not None
    assert f"uPlot {version[1]} " in Path(page_module.__file__).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_library_is_what_npm_gives(tmp_path: Path) -> None:
    readme = (ASSETS / "README.md").read_text(encoding="utf-8")
    version = re.search(r"^Version ([\d.]+),", readme, re.MULTILINE)
    assert version is not None
    packed = subprocess.run(
        ["npm", "pack", f"uplot@{version[1]}"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    if packed.returncode:
        pytest.skip(f"npm cannot fetch it: {packed.stderr.strip()[-200:]}")
    with tarfile.open(next(tmp_path.glob("uplot-*.tgz"))) as archive:
        for name, (inside, _) in _pinned().items():
            file = archive.extractfile(f"package/{inside}")
            assert file is not None
            assert file.read() == (ASSETS / name).read_bytes()
