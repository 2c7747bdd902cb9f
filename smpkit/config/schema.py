"""The configuration as JSON Schema (draft 2020-12), with what each field means as its description."""

from __future__ import annotations

from collections.abc import Mapping
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
_WITH_SHORT_FORM: tuple[type[Section], ...] = (BackendChoice, Channel, Checkpoints, Secret)


def json_schema(kind: str) -> dict[str, Any]:
    """Describe what may be written as `kind`; editors check and complete files with it.

    The models describe the full form. What may be written besides is added here: short forms, aliases, old keys.
    """
    model = MODELS[kind]
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {}) | {model.__name__: schema}
    if "ModelParallelConfig" in definitions:
        definitions["ModelParallelConfig"]["properties"] |= _aliases_and_old_keys()
    if "ModelParallelBlock" in definitions:
        block = definitions["ModelParallelBlock"]["properties"]
        path = {"type": "string", "description": "Path of a JSON file in the folder of the job file."}
        block["parameters"]["anyOf"] = [{"$ref": block["parameters"].pop("$ref")}, path]
        for key, full in block.items():
            text = f"Short form of `smdistributed.modelparallel.{key}`."
            definitions["Distribution"]["properties"][key] = deepcopy(full) | {"description": text}
    for section in _WITH_SHORT_FORM:
        if section.__name__ in definitions:
            form = definitions[section.__name__]
            short = {"type": "string", "description": f"Short form of `{{{section.short_form}: ...}}`."}
            whole = dict(form)
            form.clear()
            form |= {"description": whole["description"], "anyOf": [short, whole]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _aliases_and_old_keys() -> dict[str, Any]:
    text = "Older name of `pipeline_parallel_degree`, which it must equal where both are set."
    keys: dict[str, Any] = {"partitions": {"type": "integer", "minimum": 1, "description": text}}
    for key, default in TENSORFLOW_DEFAULTS.items():
        text = "For TensorFlow: only its default is accepted, without effect."
        keys[key] = {"const": default, "deprecated": True, "description": text}
    for key, reason in HISTORIC.items():
        keys[key] = {"deprecated": True, "description": f"Accepted without effect: {reason}."}
    return keys
