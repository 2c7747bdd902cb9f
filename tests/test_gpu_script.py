"""`scripts/gpu` without a GPU: its orchestration runs for real, and no part can stop another, or it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import venv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks.activation_offload.idle import idle_in, trace_of
from benchmarks.on_gpu import main as command
from benchmarks.on_gpu import wheels
from benchmarks.on_gpu.parts import PARTS, ROOT, Part, over_nccl
from benchmarks.on_gpu.record import Outcome, Record, Result
from tests.device.profiles import overlap_in

_PAGES = [
    *("failures.txt", "junit.xml", "nvidia-smi.txt", "profile.md", "results.json", "summary.md", "tables.md"),
    "versions.txt",
]


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [ROOT / "scripts/gpu", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def part(name: str, code: str, seconds: float = 30.0, *, tests: bool = False) -> Part:
    arguments = ("-c", code)
    return Part(name, "a title", seconds, arguments, arguments, tests, False)


def run(monkeypatch: pytest.MonkeyPatch, parts: list[Part], *arguments: str) -> int:
    monkeypatch.setattr(command, "PARTS", tuple(parts))
    monkeypatch.setattr(command, "_facts", lambda *_: {"gpu": "NVIDIA H100", "date": "2026-01-01"})
    return command.main(["--dry-run", *arguments])


# --- for real ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_starts_parts_and_leaves_a_folder(tmp_path: Path) -> None:
    """A part of tests, whose files must be importable, and a benchmark, which must run."""
    folder = tmp_path / "found"
    done = script("--dry-run", "--only", "engine", "activation-offload-long", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == _PAGES
    record = Record.read(folder)
    assert {name: outcome.state for name, outcome in record.outcomes.items()} == {
        "engine": "passed",
        "activation-offload-long": "passed",
    }
    collected = {test.name.partition("::")[0] for test in record.outcomes["engine"].tests}
    assert "tests/device/test_offload_order.py" in collected
    assert "| TRL over checkpoint |" in (folder / "tables.md").read_text()
    assert "torch 2." in (folder / "versions.txt").read_text()


def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = script("--only", "engine")
    assert done.returncode == 2
    assert "--dry-run" in done.stderr


def test_an_interpreter_that_lacks_packages_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """The .venv of scripts/demo has no pytest: every part of tests failed."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare/bin/python"
    done = script("--dry-run", "--out", str(tmp_path / "out"), PYTHON=str(python))
    assert done.returncode == 2
    assert f"{python} lacks torch, numpy, pydantic" in done.stderr
    assert "pytest, pytest_timeout, xdist\n" in done.stderr
    assert not (tmp_path / "out").exists()


def test_all_test_files_of_the_gpu_are_in_a_part() -> None:
    named = {argument for part in PARTS if part.has_tests for argument in part.command}
    assert {
        f"tests/device/{path.name}"
        for path in (ROOT / "tests/device").glob("test_*.py")
        if not path.name.startswith("test_sim_")
    } <= named
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert over_nccl("/x/libnccl.so.2").environment["LD_PRELOAD"] == "/x/libnccl.so.2"


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])
    assert "there is no part `nothing`" in capsys.readouterr().err


# --- parts ------------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_or_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', %r], start_new_session=True); %s"
    marker = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(6); pathlib.Path({str(marker)!r}).touch()"
    parts = [
        part("late", hangs % (child, "print('begun', flush=True); time.sleep(60)"), 0.5),
        part("broken", "import os; os.abort()"),
        part("good", "print('| a table |')"),
    ]
    started = time.monotonic()
    assert run(monkeypatch, parts, "--out", str(tmp_path / "found")) == 1
    assert time.monotonic() - started < 30
    outcomes = Record.read(tmp_path / "found").outcomes
    assert [outcomes[name].state for name in ("late", "broken", "good")] == ["over its limit", "failed", "passed"]
    assert "begun" in outcomes["late"].output
    assert "| a table |" in (tmp_path / "found/tables.md").read_text()
    time.sleep(max(0.0, 8 - (time.monotonic() - started)))
    assert not marker.exists()  # what a part has started elsewhere ends with it


def test_what_no_time_is_left_for_is_said_and_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = tmp_path / "count"
    code = (
        f"import pathlib; p = pathlib.Path({str(counted)!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    )
    parts = [part("first", code), part("second", code)]
    monkeypatch.setattr(command, "_WORTH_SECONDS", 1e9)
    assert run(monkeypatch, parts, "--out", str(tmp_path / "found")) == 1
    assert {each.state for each in Record.read(tmp_path / "found").outcomes.values()} == {"not run"}
    monkeypatch.setattr(command, "_WORTH_SECONDS", 1.0)
    assert run(monkeypatch, parts, "--only", "first", "--resume", str(tmp_path / "found")) == 1
    assert run(monkeypatch, parts, "--resume", str(tmp_path / "found")) == 0
    assert counted.read_text() == "xx"  # each once


def test_a_killed_part_keeps_what_its_tests_have_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import time\n"
        "def test_good(record_property):\n    record_property('GB/s', 1.5)\n    record_property('profile', 'a page')\n"
        "def test_bad():\n    assert 1 == 2, 'not so'\n"
        "def test_hangs():\n    time.sleep(60)\n"
        "def test_never():\n    pass\n"
    )
    monkeypatch.setattr(command, "_DRY_FACTOR", 1)
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.on_gpu.journal", str(file))
    tests = Part("tests", "some", 6.0, arguments, (*arguments, f"--rootdir={tmp_path}"), True, False)
    assert run(monkeypatch, [tests], "--out", str(tmp_path / "found")) == 1
    found = {test.name.partition("::")[2]: test for test in Record.read(tmp_path / "found").outcomes["tests"].tests}
    assert {name: test.outcome for name, test in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_hangs": "error",
        "test_never": "not run",
    }
    assert "killed after" in found["test_hangs"].text
    assert found["test_good"].found["GB/s"] == 1.5
    suite = ET.parse(tmp_path / "found/junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "1")
    summary = (tmp_path / "found/summary.md").read_text()
    assert "not so" in summary
    assert "GB/s 1.5" in summary
    assert "a page" in (tmp_path / "found/profile.md").read_text()


def test_a_folder_stays_small_whatever_fails(tmp_path: Path) -> None:
    tests = tuple(Result(f"tests/x.py::test_{n}", "failed", 1.0, "E  " + "x" * 2990) for n in range(300))
    outcomes = {f"all:{n}": Outcome(f"all:{n}", "", "failed", 1.0, 1, (), "y" * 10_000) for n in range(20)}
    Record({}, {**outcomes, "x": Outcome("x", "", "failed", 1.0, 1, tests)}).write(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 << 20
    assert len((tmp_path / "summary.md").read_text().splitlines()) < 60


# --- wheels -----------------------------------------------------------------------------------------------------------


def test_wheels_bring_what_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return folder / requirement

    needs = {"pydantic": ["core==1.0", "types>=0.6"], "core": ["types"], "types": []}
    monkeypatch.setattr(wheels, "_download", download)
    monkeypatch.setattr(wheels, "_needs_of", lambda wheel: needs[wheel.name.partition("=")[0].partition(">")[0]])
    wheels.fetch(tmp_path)
    assert asked[0].startswith("pydantic==")
    assert {name.partition("=")[0].partition(">")[0] for name in asked} == {"pydantic", "core", "types"}
    assert len(asked) == 3


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_overlap_is_the_time_of_copies_in_which_kernels_run() -> None:
    seen = overlap_in(
        [
            ("gemm", 0.0, 10.0),
            ("gemm", 5.0, 20.0),
            ("Memcpy DtoH (Device -> Pinned)", 15.0, 25.0),
            ("Memcpy HtoD (Pinned -> Device)", 30.0, 34.0),
            ("elementwise", 33.0, 40.0),
            ("Memset (Device)", 0.0, 50.0),
        ]
    )
    assert (seen.kernels, seen.out, seen.back) == (27.0, 10.0, 4.0)
    assert (seen.hidden_out, seen.hidden_back, seen.span) == (5.0, 1.0, 40.0)
    assert seen.share == pytest.approx(6 / 14)
    assert "copies out" in seen.page


def traced(category: str, name: str, start: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation, "stream": 7}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": arguments}


OUT, BACK = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_an_engine_is_idle_while_a_copy_is_asked_for_and_computed() -> None:
    """The host is ahead: it asks for everything in the first ten microseconds."""
    seen = idle_in(
        [
            traced("cuda_runtime", "cudaLaunchKernel", 0, 1, 1),
            traced("cuda_runtime", "cudaMemcpyAsync", 1, 2, 2),
            traced("cuda_driver", "cuLaunchKernelEx", 2, 3, 3),
            traced("cuda_runtime", "cudaMemcpyAsync", 3, 4, 4),
            traced("cuda_runtime", "cudaMemcpyAsync", 4, 5, 5),
            traced("kernel", "gemm", 10, 100, 1),
            traced("gpu_memcpy", OUT, 115, 150, 2),  # 15 late
            traced("kernel", "gemm", 100, 200, 3),
            traced("gpu_memcpy", OUT, 203, 240, 4),  # 3 late
            traced("gpu_memcpy", OUT, 240, 260, 5),  # behind the one before
            traced("gpu_memset", "Memset (Device)", 260, 300, 6),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert (seen.out.copies, seen.out.busy, seen.out.idle) == (3, 92, 18)
    assert (seen.back.copies, seen.back.idle) == (0, 0)
    assert (seen.span, seen.share) == (290, 18 / 290)


def test_a_copy_is_not_ready_before_the_host_has_asked_nor_late_where_it_begins_at_once() -> None:
    """The host is behind: the device waits for it. The second copy depends on less than what was launched before."""
    seen = idle_in(
        [
            traced("cuda_runtime", "cudaLaunchKernel", 0, 1, 1),
            traced("kernel", "gemm", 2, 20, 1),
            traced("cuda_runtime", "cudaMemcpyAsync", 50, 60, 2),
            traced("gpu_memcpy", BACK, 64, 80, 2),
            traced("cuda_runtime", "cudaLaunchKernel", 60, 61, 3),
            traced("cuda_runtime", "cudaMemcpyAsync", 62, 63, 4),
            traced("kernel", "gemm", 61, 200, 3),
            traced("gpu_memcpy", BACK, 100, 120, 4),
        ]
    )
    assert (seen.back.busy, seen.back.idle) == (36, 4)
    assert seen.share == 4 / 198


def test_a_trace_without_the_host_s_calls_says_nothing_about_idleness() -> None:
    with pytest.raises(ValueError, match="not the calls that asked for them"):
        idle_in([traced("gpu_memcpy", OUT, 0, 1, 2)])


def test_a_trace_of_the_profiler_can_be_read() -> None:
    events = trace_of(lambda: torch.ones(64, 64) @ torch.ones(64, 64))
    assert "aten::mm" in {event.get("name") for event in events}
    seen = idle_in(events)
    assert seen.share == 0
    assert torch.cuda.is_available() or seen.span == 0


def test_results_are_json_that_other_tools_read(tmp_path: Path) -> None:
    Record({"gpu": "x"}, {}).write(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["facts"] == {"gpu": "x"}
    with pytest.raises(ValueError, match="is not what a run leaves"):
        Record.read(tmp_path / "nowhere")
