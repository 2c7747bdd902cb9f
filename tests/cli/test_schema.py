from __future__ import annotations

import json

import pytest

from smpkit.config.schema import MODELS, json_schema
from tests.cli.conftest import Smpkit


@pytest.mark.parametrize("kind", MODELS)
def test_the_schema_of_each_kind_is_printed(kind: str, smpkit: Smpkit) -> None:
    result = smpkit("schema", kind)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json_schema(kind)


def test_the_job_file_is_the_default(smpkit: Smpkit) -> None:
    assert smpkit("schema").stdout == smpkit("schema", "job").stdout


def test_an_unknown_kind_is_wrong_usage(smpkit: Smpkit) -> None:
    result = smpkit("schema", "jbo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "`jbo` is not one of `job`, `modelparallel`, `distribution`" in result.stderr
