from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smpkit.config.schema import MODELS, json_schema
from smpkit.config.section import Section


def walk(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from walk(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from walk(value)


@pytest.mark.parametrize("kind", MODELS)
def test_every_field_is_described_and_every_reference_resolves(kind: str) -> None:
    schema = json_schema(kind)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in walk(schema):
        if "$ref" in part:
            assert part["$ref"].removeprefix("#/$defs/") in schema["$defs"]
        if part.get("type") == "object" and "properties" in part:
            assert part["additionalProperties"] is False
            assert all(field["description"] for field in part["properties"].values())


@pytest.mark.parametrize("kind", MODELS)
def test_the_schema_knows_every_name_that_the_model_takes(kind: str) -> None:
    assert set(MODELS[kind].keys()) <= set(json_schema(kind)["properties"])


def test_names_that_are_accepted_without_being_fields_are_in_the_schema() -> None:
    assert {"partitions", "horovod", "use_times", "_match_weights"} <= set(json_schema("modelparallel")["properties"])
    assert {"enabled", "parameters"} <= set(json_schema("distribution")["properties"])
    definitions = json_schema("job")["$defs"]
    parents: list[type[Section]] = [Section, *Section.__subclasses__()]
    kinds = {kind.__name__: kind for parent in parents for kind in parent.__subclasses__()}
    short = {name for name in definitions if name in kinds and kinds[name].short_form}
    assert short == {"BackendChoice", "Channel", "Checkpoints", "Secret"}
    for name in short:  # `backend: slurm` was no backend to an editor
        assert [form["type"] for form in definitions[name]["anyOf"]] == ["string", "object"]
