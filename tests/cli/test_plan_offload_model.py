"""`smpkit plan-offload-model`: the prediction of a step, of both peaks, and of what a host can hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Smpkit

_ARGUMENTS = ("plan-offload-model", "--params", "6.7e9", "--slices", "24", "--tokens", "32768")
_H200 = ("--tflops", "430", "--link-gbs", "50")

REPORT = """\
model     6.7B parameters in 24 slices, adamw, bf16
machine   430 TFLOP/s, link 50 GB/s each way, 4.3B parameters updated/s
step      32768 tokens in 1 microbatch, bound by compute
          update            step  TFLOP/s
          overlapped      4.18 s      315
          just-in-time    4.72 s      279
          serial          5.68 s      232
of it     forward 1.02 s  backward 3.06 s  in 645.1 ms  out 679.9 ms  optimizer 1.56 s
"""


def test_a_model_of_a_known_size_is_planned(smpkit: Smpkit) -> None:
    result = smpkit("-q", *_ARGUMENTS, *_H200)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(REPORT)


def test_json_has_every_part(smpkit: Smpkit) -> None:
    arguments = ("--memory-gib", "80", "--host-memory-gib", "128", "--microbatches", "4", "--json")
    content = json.loads(smpkit(*_ARGUMENTS, *_H200, *arguments).stdout)
    assert content["steps"]["overlapped"]["bound"] == "compute"
    assert content["fits"] == {"device": True, "host": True}
    assert content["host_peak_bytes"] > 14 * 6.7e9
    assert content["largest_parameters"] / 1e9 == pytest.approx(8.5, abs=0.2)
    assert content["model"]["num_microbatches"] == 4


def test_what_does_not_fit_is_said(smpkit: Smpkit) -> None:
    asked = (*_ARGUMENTS, "--memory-gib", "1", "--host-memory-gib", "64")
    result = smpkit(*asked)
    assert (result.exit_code, smpkit(*asked, "--json").exit_code) == (1, 1)
    assert "does not fit the device's 1 GiB" in result.stderr
    assert "does not fit the host's 64 GiB" in result.stderr
    assert "use more `--slices`, or more `--microbatches`" in result.stderr
    assert "parameters fit 64 GiB of host memory" in result.stdout


def test_a_model_that_needs_what_is_left_free_does_not_fit(smpkit: Smpkit) -> None:
    needed = json.loads(smpkit(*_ARGUMENTS, "--json").stdout)["host_peak_bytes"] / 2**30
    limits = {limit: smpkit(*_ARGUMENTS, "--host-memory-gib", str(limit)) for limit in (needed + 7.9, needed + 8.1)}
    assert [result.exit_code for result in limits.values()] == [1, 0]


def test_size_can_come_from_a_model(folder: Path, smpkit: Smpkit) -> None:
    (folder / "zoo.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    model = nn.Linear(10, 10, bias=False)\n"
        "    model.register_buffer('mask', torch.ones(8, 8))\n    return model\n"
    )
    content = json.loads(smpkit("plan-offload-model", "--model", "zoo:build", "--json").stdout)
    assert content["model"]["num_parameters"] == 100
    assert 64 << 20 < content["device_peak_bytes"] < 1 << 30  # what cuBLAS takes, of a GPU, however small the model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the size of the model is not given"),
        (["job.yaml"], "job.yaml"),
        (["--params", "1e9", "--slices", "0"], "`--slices`"),
        (["--params", "1e9", "--tflops", "0"], "`--tflops`"),
        (["--params", "nan"], "`--params`: `nan` is not a number from 1 to 1,000,000,000,000,000\n"),
        (["--params", "1e9", "--host-memory-gib", "inf"], "`--host-memory-gib`: `inf` is not a number from"),
        (["--params", "1e9", "--tokens", "9" * 400], "`--tokens`"),
        (["--params", "1e9", "--slices", "3", "--layers", "2"], "2 layers cannot be cut into 3 slices"),
        (["--params", "1e9", "--model", "zoo:build"], "`--params` cannot be given beside `--model`"),
    ],
    ids=["size", "file", "slices", "tflops", "nan", "inf", "tokens", "layers", "both"],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_is_said(arguments: list[str], message: str, smpkit: Smpkit) -> None:
    result = smpkit("plan-offload-model", *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)
