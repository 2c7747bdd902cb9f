"""The tests of tests/device that need no real GPU pass on the simulated device, without a race.

Each group runs in a process of its own, which has loaded the device from the beginning, as one has a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.device import TESTS_ON_SIM
from tests.device.on_sim import needs_sim
from tests.device.pytest_in_rank import run_tests
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/device").glob("test_*.py") if not path.name.startswith("test_sim_"))
QUICK = (
    "test_offload_streams.py::test_10_wrappers_with_streams_of_their_own[1-divided]",
    "test_pinned_memory.py::test_an_input_may_be_filled_anew_when_the_call_has_returned",
    "test_offload_model.py::test_weights_after_five_steps_are_the_plain_models[backward-checkpoint]",
    "test_host_syncs.py::test_an_offload_model_s_forward_and_backward_never_wait[True]",
)
"""Streams of others, memory that is filled again, an optimizer beside the device, waits of the host. None of them has
ranks, which a rank cannot start."""
ORDERS = ("lazy:0", "copies:0", "random:1")
SEVERAL_ORDERS = ("activation", "offload", "pinned")
"""In the names of files whose streams are smpkit's own; the orders of others are tried by `test_ranks`."""
CASES = [
    (file, order)
    for file in FILES
    for order in ORDERS
    if order == ORDERS[0] or any(part in file for part in SEVERAL_ORDERS)
]
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-m", "not real_gpu")


def test_some_of_each_kind() -> None:
    needs_sim()
    arguments = [*OPTIONS, *(f"tests/device/{test}" for test in QUICK)]
    ((status, shown),) = run_ranks(run_tests, 1, arguments, timeout=170, env={TESTS_ON_SIM: "lazy:0"})
    assert status == 0, shown
    found = re.search(r"(\d+) passed", shown)
    assert found
    assert int(found[1]) >= len(QUICK)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("file", "order"), CASES)
def test_all_that_need_no_real_gpu(file: str, order: str) -> None:
    needs_sim()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, f"tests/device/{file}"],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        cwd=ROOT,
        env={**os.environ, TESTS_ON_SIM: order, "OMP_NUM_THREADS": "1"},
    )
    no_tests = 5  # all of a file need a real GPU
    assert done.returncode in (0, no_tests), f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "skipped" not in done.stdout, done.stdout[-2000:]
