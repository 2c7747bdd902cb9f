"""The configuration's page, each public name of Python, the JSON Schema and every command's `--help`."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import re
from pathlib import Path

from smpkit.config import reference as configuration
from tests.docs.public_names import documented, signature
from tests.goldens.adapter import sandbox
from tests.goldens.items import Items

__all__ = ["collect"]

_ROOT = Path(__file__).parents[2]
_KINDS = ("job", "modelparallel", "distribution")


def collect() -> Items:
    items: Items = {}
    page = _ROOT / configuration.DEFAULT_PATH
    items[str(configuration.DEFAULT_PATH)] = {"sha256": _hash(page.read_text(encoding="utf-8"))}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        status = configuration.main([str(page), "--check"])
    items["scripts/docs --check"] = "up to date" if status == 0 else said.getvalue()
    for name, thing in documented():
        items[name] = {"signature": signature(thing), "docstring": _hash(inspect.getdoc(thing) or "")}
    with sandbox() as box:
        for kind in _KINDS:
            items[f"smpkit schema {kind}"] = json.loads(box.run("schema", kind)["stdout"])
        overview = box.run("--help")["stdout"]
        items["smpkit --help"] = overview.splitlines()
        for name in re.findall(r"^  ([a-z]+)  ", overview, re.MULTILINE):
            items[f"smpkit {name} --help"] = box.run(name, "--help")["stdout"].splitlines()
    return items


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
