"""A label that is no class is an assertion on the GPU: the rank that has it says so, and no other waits for it.

The GPU is of no use any more to the process whose assertion fails: each rank is one of its own, the test another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.wrong_labels import assertions_in, error_in, train

pytestmark = pytest.mark.real_gpu("assertions of kernels, after which the driver refuses the process")

SECONDS = 100.0
"""For a rank to end. Their waits have 600: who needs that has heard nothing."""


def assert_it_names_the_assertion(error: str) -> None:
    """Check cause and way out, as torch says them: with CUDA_LAUNCH_BLOCKING=1 the traceback is that of the loss."""
    assert "device-side assert triggered" in error
    assert "CUDA_LAUNCH_BLOCKING=1" in error


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_the_rank_with_the_label_is_named_to_the_other(kind: str, tmp_path: Path) -> None:
    first, second = train(kind, tmp_path, SECONDS)
    assert [rank.stdout for rank in (first, second)] == ["step True\n"] * 2, first.stderr + second.stderr
    assert second.returncode != 0  # 1, unless CUDA aborts the process when it ends
    assert any("n_classes" in each for each in assertions_in(second.stderr)), second.stderr
    assert_it_names_the_assertion(error_in(second.stderr))
    assert first.returncode == 1
    assert assertions_in(first.stderr) == []
    told = error_in(first.stderr)
    assert told.startswith("smpkit.errors.RemoteError: rank 1 failed: "), first.stderr
    assert_it_names_the_assertion(told)
    assert told.endswith("hint: see the traceback of rank 1")
    assert float(torch.ones(2, device="cuda").sum()) == 2  # other processes may go on


def test_tensor_parallel_ranks_that_share_the_label_all_name_it(tmp_path: Path) -> None:
    ranks = train("tensor", tmp_path, SECONDS)
    for rank in ranks:
        assert rank.stdout == "step True\n", rank.stderr
        assert rank.returncode != 0
        # The first to wait for its GPU says so to the other, which may hear of it before it waits for its own.
        assert_it_names_the_assertion(error_in(rank.stderr))
    named = [each for rank in ranks for each in assertions_in(rank.stderr)]
    assert "a label is neither one of 8 classes nor ignore_index (-100)" in named
