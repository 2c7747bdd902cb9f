"""Reference pages, as hashes since the pages themselves are committed, the JSON Schema and every command's `--help`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import re
from pathlib import Path

from tests.goldens.adapter import sandbox
from tests.goldens.items import Items

__all__ = ["collect"]

_ROOT = Path(__file__).parents[2]
_KINDS = ("job", "modelparallel", "distribution")


def collect() -> Items:
    items: Items = {}
    for page in sorted((_ROOT / "docs" / "reference").glob("*.md")):
        items[f"docs/reference/{page.name}"] = {"sha256": hashlib.sha256(page.read_bytes()).hexdigest()[:16]}
    for module in _generators():
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            found = importlib.import_module(module)
            status = found.main([str(_ROOT / found.DEFAULT_PATH), "--check"])
        items[f"scripts/docs --check, {module.split('.')[1]}"] = "up to date" if status == 0 else said.getvalue()
    with sandbox() as box:
        for kind in _KINDS:
            items[f"smpkit schema {kind}"] = json.loads(box.run("schema", kind)["stdout"])
        overview = box.run("--help")["stdout"]
        items["smpkit --help"] = overview.splitlines()
        for name in re.findall(r"^  ([a-z]+)  ", overview, re.MULTILINE):
            items[f"smpkit {name} --help"] = box.run(name, "--help")["stdout"].splitlines()
    return items


def _generators() -> list[str]:
    """Return the modules that write the pages, as `scripts/docs` names them."""
    (line,) = re.findall(r"^for page in (.*); do$", (_ROOT / "scripts" / "docs").read_text(), re.MULTILINE)
    return str(line).split()
