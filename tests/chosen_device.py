"""The device that tests run on: `pytest --device cpu`, which is the default, `--device sim` or `--device cuda`.

    cpu   ranks have no device, no GPU is seen, and tests written for one are skipped
    sim   each rank has a simulated device, as has a test written for a GPU; a race is an error
    cuda  ranks and tests use the GPU

`sim:random:2` gives the simulated device's order of work, and a seed; `sim` is `sim:lazy:0`. A test that says
`@pytest.mark.also_on("sim:copies:0")` runs on this device, too, beside the CPU. With `degree=4` in the mark, only those
of its cases do that have this argument.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

VARIABLE: Final = "TEST_DEVICE"
"""Carries the device to ranks and other processes of a test; what decides is the option, and the fixture `device`."""


def chosen_device() -> str:
    """Return the device, as the option has it."""
    return os.environ.get(VARIABLE, "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    form = "cpu (default), cuda, or sim[:POLICY[:SEED]]"
    parser.addoption("--device", type=_device, default="cpu", metavar="DEVICE", help=f"what tests run on: {form}")


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda|sim(:[a-z]+(:\d+)?)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of cpu, cuda, sim, sim:POLICY and sim:POLICY:SEED")
    return text


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("device")
    os.environ[VARIABLE] = name
    if name != "cuda" and any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of a test, which its ranks have."""
    name: str = getattr(request, "param", request.config.getoption("device"))
    if name.startswith("sim"):
        from tests.simulated import needs_sim

        needs_sim()
    monkeypatch.setenv(VARIABLE, name)
    return name


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the device that was chosen, and beside the CPU on those of its mark; last, as ids shall end so."""
    mark = metafunc.definition.get_closest_marker("also_on")
    if mark is not None:
        chosen = metafunc.config.getoption("device")
        metafunc.parametrize("device", [chosen, *(mark.args if chosen == "cpu" else ())], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a mark does not want."""
    items[:] = [item for item in items if _is_wanted(item)]


def _is_wanted(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("also_on")
    if mark is None:
        return True
    arguments: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    return arguments["device"] not in mark.args or mark.kwargs.items() <= arguments.items()
