"""What every test gets: a scrubbed environment, and a count of its CPU seconds.

A test that fails leaves no process behind, which could hold a port or the CPU when the next one runs.

The CPU seconds of each test are counted, since they decide how long all tests take, and differ less from run to run
than what a clock on the wall shows. A test of the default suite may take 5; with twice that it fails in CI.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from tests.leftovers import kill_processes_of

pytest_plugins = ("tests.chosen_device",)

PREFIXES = ("SM_", "SMP_", "SMPKIT_", "SAGEMAKER_", "AWS_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NO_COLOR",
    "PYTEST_ADDOPTS",
}

# How many examples hypothesis draws: `--hypothesis-profile many` is for whoever changes what they are drawn for.
# Machines that run tests are shared: a slow example is no failure, the timeout of the test is.
for name, number in (("few", 40), ("many", 150)):
    settings.register_profile(name, max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few")

# Hundreds of processes import smpkit: where Python is told to keep no bytecode, each would compile it for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ranks are forked from a server. Had that asked CUDA itself for GPUs, as `torch.cuda.is_available()` does otherwise,
# its children could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_configure() -> None:
    """Take interrupts again where the shell has had them ignored, as it does for jobs in its background.

    Every process below would inherit that, and tests of interrupted jobs would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Kill what a failed test has started and not ended."""
    report = yield
    if report.failed:
        kill_processes_of(item.nodeid)
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="show the CPU seconds of the dearest tests and of each folder")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what is there before the first test out of the sight of Python's collector: a million objects of torch.

    Tests look for cycles by the thousand, as `smp.shutdown()` does, and each time that took half a second. What tests
    leave behind stays in its sight.
    """
    # Also what tests import late, where CPU seconds are shown, or the first test of each process would pay for it.
    if _shows_cpu(session.config) and "tests.ranks" in sys.modules:
        importlib.import_module("tests.preloaded")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cpu_seconds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Count the CPU seconds of a test, its own fixtures and all processes that it waits for.

    This is the first of its fixtures and the last that ends. Only those that several tests share begin earlier.
    """
    before = _cpu()
    yield
    seconds = _cpu() - before
    request.node.user_properties.append((_CPU, seconds))
    if seconds > _MOST_CPU and _is_limited(request.node):
        request.node.user_properties.append((_TOO_LONG, True))
        if os.environ.get("CI") and seconds > _FAR_TOO_MUCH_CPU:
            pytest.fail(f"This test took {seconds:.1f} CPU seconds. {_RULE}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Count the CPU seconds of fixtures that several tests share apart from the test that happens to come first."""
    before = _cpu()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            shared = (f"{_CPU} of {fixturedef.argname}", _cpu() - before)
            request._pyfuncitem.user_properties.append(shared)  # the test that comes first


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _counted.append(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what took the CPU: in CI and with `--cpu` all of it, elsewhere only tests that take too much."""
    costs = list[tuple[float, str]]()
    folders = defaultdict[str, float](float)
    for report in _counted:
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:-1][:3])
        for name, seconds in report.user_properties:
            if name.startswith(_CPU):
                assert isinstance(seconds, float)
                folders[folder] += seconds
                costs.append((seconds, f"{report.nodeid}{name.removeprefix(_CPU)}"))
            elif name == _TOO_LONG:
                terminalreporter.write_line(f"{report.nodeid} takes too much CPU. {_RULE}", yellow=True)
    if _shows_cpu(config):
        terminalreporter.section(f"CPU seconds: {sum(folders.values()):.0f} in tests")
        by_folder = sorted(((seconds, folder) for folder, seconds in folders.items()), reverse=True)
        for seconds, text in [*sorted(costs, reverse=True)[:25], *by_folder]:
            terminalreporter.write_line(f"{seconds:8.1f}  {text}")


_CPU: Final = "CPU seconds"
_TOO_LONG: Final = "took too long"
_MOST_CPU: Final = 5.0
_FAR_TOO_MUCH_CPU: Final = 2 * _MOST_CPU
"""A test that takes more fails in CI. It is twice as much, since a slow or busy machine takes twice as long."""
_RULE: Final = "One of the default suite may take 5: make it smaller, or mark it as `slow`."
_counted: list[pytest.TestReport] = []


def _cpu() -> float:
    """Return the CPU seconds of this process, all threads, of those it has waited for, and of ranks."""
    ranks = sys.modules.get("tests.ranks")
    return sum(os.times()[:4]) + (ranks.cpu_of_ranks() if ranks else 0)


def _is_limited(item: pytest.Item) -> bool:
    slow = any(item.get_closest_marker(mark) for mark in ("slow", "docker"))
    return not slow and item.config.getoption("--device", "cpu") == "cpu"


def _shows_cpu(config: pytest.Config) -> bool:
    return bool(config.getoption("--cpu") or os.environ.get("CI"))


@pytest.fixture(autouse=True)
def scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a shell or a job may have left that changes how smpkit behaves; keep the current folder."""
    monkeypatch.chdir(Path.cwd())
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("SMPKIT_SUMMARY", "0")  # the block at the end of a run, in tests of anything else
