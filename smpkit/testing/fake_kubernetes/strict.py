"""What an API server refuses in an object: fields that it does not have, and values of another type.

The official client's models are the published schema; the real server reads objects as strictly if it is asked to
(`fieldValidation: Strict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["refusals"]

_MODELS = {
    "ConfigMap": "V1ConfigMap",
    "Job": "V1Job",
    "Pod": "V1Pod",
    "Secret": "V1Secret",
    "Service": "V1Service",
}
_MAX_BYTES = 2**20
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def refusals(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with an object, in the words of an API server; empty if it is accepted."""
    kind = manifest.get("kind", "")
    found = list(_names(manifest))
    if kind == "JobSet":
        for index, each in enumerate(manifest["spec"]["replicatedJobs"]):
            found += _wrong(each["template"], "V1JobTemplateSpec", f"spec.replicatedJobs[{index}].template")
    elif kind in _MODELS:
        found += _wrong(manifest, _MODELS[kind], "")
    data = {**manifest.get("data", {}), **manifest.get("stringData", {})}
    size = sum(len(str(value).encode()) for value in data.values())
    size += sum(len(text) * 3 // 4 for text in manifest.get("binaryData", {}).values())
    if kind in ("ConfigMap", "Secret") and size > _MAX_BYTES:
        found.append(f"Too long: must have at most {_MAX_BYTES} bytes")
    return found


def _names(manifest: Mapping[str, Any]) -> Iterator[str]:
    name = manifest["metadata"]["name"]
    if _LABEL.fullmatch(name) is None:
        yield f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 label'
    if manifest.get("kind") == "Service" and not name[:1].isalpha():
        yield f'metadata.name: Invalid value: "{name}": a DNS-1035 label must start with a letter'
    for key, value in manifest["metadata"].get("labels", {}).items():
        if len(value) > 63:
            yield f'metadata.labels[{key}]: Invalid value: "{value}": must be no more than 63 characters'


def _wrong(value: Any, kind: str, path: str) -> Iterator[str]:
    """Yield what differs from the client's type: `str`, `list[V1Container]`, `dict(str, str)`, `V1Job`, ..."""
    from kubernetes import client

    if found := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for index, item in enumerate(value):
            yield from _wrong(item, found[1], f"{path}[{index}]")
    elif found := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, Mapping):
            yield f"{path}: expected a map"
            return
        for key, item in value.items():
            yield from _wrong(item, found[1], f"{path}.{key}")
    elif kind in ("str", "int", "bool", "float"):
        fits: tuple[type, ...] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}[kind]
        if not isinstance(value, fits) or (kind == "int" and isinstance(value, bool)):
            yield f"{path}: expected {kind}, got {type(value).__name__}"
    elif hasattr(client, kind):
        model = getattr(client, kind)
        names = {outer: inner for inner, outer in model.attribute_map.items()}
        for key, item in value.items():
            place = f"{path}.{key}".lstrip(".")
            if key not in names:
                yield f'unknown field "{place}"'
            else:
                yield from _wrong(item, model.openapi_types[names[key]], place)
