"""A label that is no class, on the CPU; tests/device has the same job on a GPU, and reads what it says with this."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wrong_labels import KINDS, assertions_in, error_in, train


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_label_ends_all_ranks_and_names_the_one_that_has_it(kind: str, tmp_path: Path) -> None:
    first, second = train(kind, tmp_path, 150, CUDA_VISIBLE_DEVICES="")
    assert [rank.returncode for rank in (first, second)] == [1, 1]
    assert [rank.stdout for rank in (first, second)] == ["step True\n"] * 2
    if kind == "tensor":
        for rank in (first, second):
            assert "8 is a label, but neither one of 8 classes nor ignore_index" in error_in(rank.stderr)
    else:
        assert error_in(second.stderr).startswith("IndexError: Target 8 is out of bounds.")
        told = error_in(first.stderr)
        assert told.startswith("smpkit.errors.RemoteError: rank 1 failed: IndexError: Target 8 is out of bounds. (")
        assert told.endswith("hint: see the traceback of rank 1")


def test_what_a_gpu_says_of_an_assertion_is_found() -> None:
    ours, torchs = "a label is neither one of 8 classes nor ignore_index (-100)", "t >= 0 && t < n_classes"
    kernel = "/pytorch/aten/src/ATen/native/cuda/NLLLoss.cu:245: nll_loss_forward: block: [0,0,0]"
    stderr = f"""
{kernel}, thread: [0,0,0] Assertion `{ours}` failed.
{kernel}, thread: [1,0,0] Assertion `{torchs}` failed.
{kernel}, thread: [3,0,0] Assertion `{torchs}` failed.
[rank1]: Traceback (most recent call last):
[rank1]: ValueError: an earlier one
[rank1]:
[rank1]: During handling of the above exception, another exception occurred:
[rank1]:   File "train.py", line 3, in <module>
[rank1]: torch.AcceleratorError: CUDA error: device-side assert triggered
[rank1]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
    assert assertions_in(stderr) == [ours, torchs]
    assert error_in(stderr) == (
        "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    )
    assert error_in("") == ""
