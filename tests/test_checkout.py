"""What a newcomer finds in a clone: a Dockerfile that builds, no results of ours, an install that editors follow."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()


def test_the_dockerfile_at_the_root_is_that_of_the_image() -> None:
    """`docker build .` reads the one at the root, `smpkit image` the one of the package."""
    packaged = ROOT / "container" / "smpkit_container" / "Dockerfile"
    assert (ROOT / "Dockerfile").read_text() == packaged.read_text(), f"cp {packaged.relative_to(ROOT)} Dockerfile"


def test_no_results_of_examples_are_committed_or_would_be() -> None:
    assert [
        name for name in git("ls-files", "examples") if Path(name).suffix not in (".py", ".yaml", ".md", ".ipynb")
    ] == []
    assert git("check-ignore", "examples/gpt_text/runs/checkpoints/newest", "runs/pipeline/newest")[1:]


def test_what_is_compiled_where_it_is_used_gets_into_wheels() -> None:
    """hatchling packs all files of a package but those that git ignores."""
    folder = "smpkit/testing/simulated_device/source"
    sources = [str(path.relative_to(ROOT)) for path in (ROOT / folder).iterdir()]
    assert f"{folder}/library.cpp" in sources
    assert git("check-ignore", "--no-index", *sources) == []
