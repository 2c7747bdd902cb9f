"""The configuration as JSON Schema (draft 2020-12), with what each field means as its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from smpkit.config.backend import BackendChoice
from smpkit.config.distribution import Distribution
from smpkit.config.job import Channel, Checkpoints, JobConfig, Secret
from smpkit.config.modelparallel import HISTORIC, TENSORFLOW_DEFAULTS, ModelParallelConfig
from smpkit.config.section import Section

MODELS: Mapping[str, type[Section]] = {
    "job": JobConfig,
    "distribution": Distribution,
    "modelparallel": ModelParallelConfig,
}
"""What a file may hold: kind -> model."""


def json_schema(kind: str) -> dict[str, Any]:
    """Describe what may be written as `kind`; editors check and complete files with it."""
    model = MODELS[kind]
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {}) | {model.__name__: schema}
    for name, amend in _AMENDMENTS.items():
        if name in definitions:
            amend(definitions[name], definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


# The models describe the full form. What may be written besides (short forms, aliases, keys of the past) is added here.


def _aliases_and_old_keys(schema: dict[str, Any], _: Mapping[str, Any]) -> None:
    text = "Older name of `pipeline_parallel_degree`, which it must equal where both are set."
    schema["properties"]["partitions"] = {"type": "integer", "minimum": 1, "description": text}
    for key, default in TENSORFLOW_DEFAULTS.items():
        text = "For TensorFlow: only its default is accepted, without effect."
        schema["properties"][key] = {"const": default, "deprecated": True, "description": text}
    for key, reason in HISTORIC.items():
        text = f"Accepted without effect: {reason}."
        schema["properties"][key] = {"deprecated": True, "description": text}


def _or_path(schema: dict[str, Any], _: Mapping[str, Any]) -> None:
    parameters = schema["properties"]["parameters"]
    path = {"type": "string", "description": "Path of a JSON file in the folder of the job file."}
    parameters["anyOf"] = [{"$ref": parameters.pop("$ref")}, path]


def _or_bare_block(schema: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    for key, block in definitions["ModelParallelBlock"]["properties"].items():
        text = f"Short form of `smdistributed.modelparallel.{key}`."
        schema["properties"][key] = deepcopy(block) | {"description": text}


def _or_text(model: type[Section]) -> Callable[[dict[str, Any], Mapping[str, Any]], None]:
    def amend(schema: dict[str, Any], _: Mapping[str, Any]) -> None:
        whole = dict(schema)
        text = {"type": "string", "description": f"Short form of `{{{model.short_form}: ...}}`."}
        schema.clear()
        schema |= {"description": whole["description"], "anyOf": [text, whole]}

    return amend


_AMENDMENTS: Mapping[str, Callable[[dict[str, Any], Mapping[str, Any]], None]] = {
    "ModelParallelConfig": _aliases_and_old_keys,
    "ModelParallelBlock": _or_path,
    "Distribution": _or_bare_block,
    **{model.__name__: _or_text(model) for model in (BackendChoice, Channel, Checkpoints, Secret)},
}
