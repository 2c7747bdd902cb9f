"""The pages that are written from the code are what the code says, and files that pages name exist."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from scripts import reference
from tests.docs.blocks import PAGES, files_linked
from tests.docs.public_names import MODULES, documented

ROOT = Path(__file__).parents[1]


def test_the_page_from_the_schema_is_not_stale() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.reference(), "run scripts/docs"


@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_is_on_a_page(name: str) -> None:
    module = importlib.import_module(name)
    shown = {path.removeprefix(f"{name}.") for path, _ in documented() if path.startswith(f"{name}.")}
    plain = (enum.Enum, str, ModuleType)  # members of enumerations are listed with these, `__version__` says itself
    public = {each for each in module.__all__ if not isinstance(getattr(module, each), plain)}
    assert public - shown == set()


def test_what_is_listed_says_what_it_does() -> None:
    assert [path for path, thing in documented() if not inspect.getdoc(thing)] == []


def test_linked_files_exist() -> None:
    assert [f"{page}: {file}" for page in PAGES for file in files_linked(page) if not file.exists()] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8").partition("[project.theme]")[0]
    assert [page for page in PAGES if f'"{page.relative_to(ROOT)}"' not in navigation] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/internals.md"])
def test_named_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "smpkit/torch" / path).exists()] == []


def test_each_test_that_holds_a_feature_exists() -> None:
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    held_by = text.partition("## What holds each feature")[2]
    assert [path for path in re.findall(r"`([\w/]+\.py)`", held_by) if not (ROOT / "tests" / path).is_file()] == []


def test_each_feature_that_is_served_is_held() -> None:
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    rows = [int(number) for line in re.findall(r"^- ([\d, ]+) ", text, re.MULTILINE) for number in line.split(",")]
    assert sorted(rows) == [*range(1, 61), 65, 67]
