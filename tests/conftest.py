"""What every test gets: a scrubbed environment, and its turn: long ones first, so that no worker ends with one.

A test that fails leaves no process behind, which could hold a port or the CPU when the next one runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.leftovers import kill_processes_of
from tests.observe.report.browser import DRIVER, Browser

pytest_plugins = ("tests.chosen_device",)

PREFIXES = ("SM_", "SMP_", "SMPKIT_", "SAGEMAKER_", "AWS_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR"}

# Ranks are forked from a server. Had that asked CUDA itself for GPUs, as `torch.cuda.is_available()` does otherwise,
# its children could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Folders whose tests start whole jobs or worlds of ranks, longest tests first.
LONG = ("end_to_end", "chaos", "transparency", "compat", "container", "torch")


def pytest_configure() -> None:
    """Say that the CPU is meant where torch is a build for CPUs beside a GPU, or every `smp.init()` would warn."""
    with contextlib.suppress(PackageNotFoundError):
        if any(Path("/dev").glob("nvidia[0-9]*")) and version("torch").endswith("+cpu"):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A shell starts background jobs with SIGINT ignored, which every process below would inherit: tests of
    # interrupted jobs would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    """Before each file, take what lives on out of Python's sight: torch and all tests are a million objects.

    Tests look for cycles by the thousand, as `smp.shutdown()` does, and each time that took half a second.
    """
    if location[0] not in _begun_files:
        _begun_files.add(location[0])
        gc.collect()
        gc.freeze()


_begun_files: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Kill what a failed test has started and not ended."""
    report = yield
    if report.failed:
        kill_processes_of(item.nodeid)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long tests first; the order stays the same otherwise, and is the same in every worker."""
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a shell or a job may have left that changes how smpkit behaves; keep the current folder."""
    monkeypatch.chdir(Path.cwd())
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("SMPKIT_SUMMARY", "0")  # the block at the end of a run, in tests of anything else


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One window for all tests that look at pages; where there is no Chromium they are skipped."""
    if DRIVER is None:
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver")
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
