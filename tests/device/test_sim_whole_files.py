"""Whole files on the simulated device, in several orders and without a race, as `pytest FILE --device sim` runs them.

Those of this folder are written for any device. Those of other folders compare what ranks do with plain PyTorch; here
the ranks' work is asynchronous. Each runs in a process of its own, which has the device from the beginning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import needs_sim

_ROOT = Path(__file__).parents[2]
_BACKGROUND = "tests/torch/checkpoints/test_background.py::test_the_files_are_those_of_a_blocking_save"
_OF_OTHER_FOLDERS = {
    "sim:lazy:0": [
        "tests/transparency/test_pipeline_models.py::test_some_models_train_in_other_ways",
        "tests/transparency/test_sharded_state.py::test_training_equals_plain_pytorch",
        _BACKGROUND,
    ],
    "sim:copies:0": ["tests/transparency/test_pipeline_failures.py", _BACKGROUND],
    "sim:compute:0": ["tests/transparency/test_sharded_state.py"],
    "sim:random:1": [
        "tests/transparency/test_tensor_parallel.py::test_training_equals_plain_pytorch[schedule 0]",
        "tests/transparency/test_tensor_parallel.py::test_training_equals_plain_pytorch[schedule 1]",
        _BACKGROUND,
    ],
    "sim:random:2": [
        "tests/transparency/test_pipeline_values.py::test_it_trains_as_in_one_process[experts-pp2 traced]",
        "tests/transparency/test_pipeline_schedules.py",
    ],
}
_ONLY_ON_THE_CPU = "not autocast"


def _of_this_folder() -> list[tuple[str, str]]:
    """Return files in the order `lazy`; those in other orders, too, whose streams are smpkit's own."""
    found = []
    for path in sorted((_ROOT / "tests/device").glob("test_*.py")):
        if not path.name.startswith("test_sim_"):
            is_several = any(part in path.name for part in ("activation", "offload", "pinned"))
            orders = ("sim:lazy:0", "sim:copies:0", "sim:random:1") if is_several else ("sim:lazy:0",)
            found += [(path.name, order) for order in orders]
    return found


def _run(order: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    needs_sim()
    # A test that takes seconds here takes minutes beside others: the deadline below is that of the whole file.
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=0"]
    command = [sys.executable, "-m", "pytest", "--device", order, *options, *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=1100, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("file", "order"), _of_this_folder())
def test_all_that_need_no_real_gpu(file: str, order: str) -> None:
    done = _run(order, f"tests/device/{file}", "--tb=short", "-m", "not slow and not real_gpu")
    no_tests = 5  # all of a file need a real GPU
    assert done.returncode in (0, no_tests), f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", _OF_OTHER_FOLDERS)
def test_what_ranks_do_in_other_folders(order: str) -> None:
    done = _run(order, *_OF_OTHER_FOLDERS[order], "-m", "not slow", "-k", _ONLY_ON_THE_CPU)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
