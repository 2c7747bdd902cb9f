"""The objects of the fake cluster: created, merged, listed by their labels, deleted with what belongs to them."""

from __future__ import annotations

import base64
import copy
import itertools
import threading
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

__all__ = ["Object", "Store", "merged", "now"]

Object = dict[str, Any]


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def merged(old: Any, change: Any) -> Any:
    """Merge a change into a value as RFC 7396 does: null removes, lists are replaced."""
    if not isinstance(change, Mapping):
        return copy.deepcopy(change)
    new = dict(old) if isinstance(old, Mapping) else {}
    for key, value in change.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


class Store:
    """All objects, by kind, namespace and name. One lock guards it and all that a controller does with it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self._versions = itertools.count(1)

    def add(self, manifest: Mapping[str, Any], namespace: str) -> Object | None:
        """Keep a new object and return it; None if there is one of this name."""
        made: Object = copy.deepcopy(dict(manifest))
        metadata = made.setdefault("metadata", {})
        key = (made["kind"], namespace, metadata["name"])
        with self.lock:
            if key in self.objects:
                return None
            metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
            metadata["resourceVersion"] = str(next(self._versions))
            texts = made.pop("stringData", {})
            if texts:
                encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
                made["data"] = {**made.get("data", {}), **encoded}
            self.objects[key] = made
            return made

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object itself, not a copy."""
        return self.objects.get((kind, namespace, name))

    def change(self, made: Object, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        with self.lock:
            new = merged(made, change)
            made.clear()
            made.update(new)
            made["metadata"]["resourceVersion"] = str(next(self._versions))

    def remove(self, kind: str, namespace: str, name: str) -> Object | None:
        """Remove an object, and what it owns, and return it."""
        with self.lock:
            gone = self.objects.pop((kind, namespace, name), None)
            if gone is not None:
                uid = gone["metadata"]["uid"]
                for key, other in [*self.objects.items()]:
                    owners = other["metadata"].get("ownerReferences", ())
                    if any(owner["uid"] == uid for owner in owners) and key in self.objects:
                        self.remove(*key)
            return gone

    def find(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """Return objects by a selector with `key=value` and `key` alone."""
        wanted = [part.partition("=") for part in selector.split(",") if part]
        with self.lock:
            return [
                item
                for (each, place, _), item in self.objects.items()
                if (each, place) == (kind, namespace)
                and all(_fits(item["metadata"].get("labels", {}), key, sign, value) for key, sign, value in wanted)
            ]


def _fits(labels: Mapping[str, str], key: str, sign: str, value: str) -> bool:
    return key in labels and (not sign or labels[key] == value)
