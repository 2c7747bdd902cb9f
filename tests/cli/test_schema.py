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
