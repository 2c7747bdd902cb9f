"""The adapter for SDK v2, against the real SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smpkit.errors import ConfigError
from tests.estimator.conftest import with_sdk2
from tests.estimator.golden.cases import BASE, CASES, MPI, SMP

pytestmark = with_sdk2

SMP_OPTIONS = {"enabled": True, "parameters": SMP}


def sent(inputs: Any = None, **arguments: Any) -> dict[str, Any]:
    from smpkit_estimator.sdk2 import PyTorch
    from tests.estimator.golden.real_sdk2 import sent_by

    return sent_by(PyTorch, {**BASE, **arguments}, inputs)


@pytest.mark.parametrize(
    "arguments",
    [{"smp_options": SMP_OPTIONS, "mpi_options": MPI}, {"distribution": {**SMP_OPTIONS, "mpi": MPI}}],
    ids=["smp_options", "distribution"],
)
def test_the_bare_options_send_what_the_sdks_own_dict_sends(arguments: dict[str, Any]) -> None:
    from sagemaker.pytorch import PyTorch

    from tests.estimator.golden.real_sdk2 import sent_by

    whole = CASES["model-parallel-mpi-spot"][0]["distribution"]
    assert sent(**arguments) == sent_by(PyTorch, {**BASE, "distribution": whole}, None)


def test_empty_parameters_do_not_switch_the_library_off() -> None:
    assert sent(smp_options={"enabled": True, "parameters": {}})["HyperParameters"]["mp_parameters"] == "{}"


def test_torchrun_has_processes_per_host() -> None:
    launcher = {"torch_distributed": {"enabled": True, "processes_per_host": 4}}
    got = sent(distribution={**SMP_OPTIONS, **launcher})["HyperParameters"]
    assert got["sagemaker_smpkit_processes_per_host"] == "4"
    assert json.loads(got["mp_parameters"]) == SMP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smp_options": {"enabled": True, "parameters": {"microbatchs": 1}}}, "did you mean `microbatches`"),
        ({"distribution": {"mpi": {"enabled": True, "process_per_host": 8}}}, "did you mean `processes_per_host`"),
        ({"smp_options": SMP_OPTIONS, "distribution": {}}, "keep one of them"),
        ({"image_uri": None}, "image_uri: is required"),
        ({"smp_options": SMP_OPTIONS, "entry_point": "/src/train.sh"}, "entry_point: is a shell script, which runs"),
        ({"smp_options": {"enabled": True, "parameters": {"partition_file": "x" * 3000}}}, "at most 2,500"),
    ],
)
def test_the_constructor_refuses_before_anything_is_uploaded(arguments: dict[str, Any], message: str) -> None:
    """The SDK would find these after the upload, or never."""
    from smpkit_estimator.sdk2 import PyTorch

    with pytest.raises(ConfigError) as caught:
        PyTorch(**{**BASE, "entry_point": "train.py", **arguments})
    assert message in str(caught.value)
