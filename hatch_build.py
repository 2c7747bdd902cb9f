"""What hatchling does not do by itself: a README that reads well on a package index, and the commit that was built."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """`[tool.hatch.metadata.hooks.custom]`: addresses come from `[project.urls]`, and none is invented."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README."""
        repository = metadata.get("urls", {}).get("Repository", "").rstrip("/")
        text = absolute((Path(self.root) / "README.md").read_text(encoding="utf-8"), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str) -> str:
    """Return a page with absolute links; without a repository these leave their words, and pictures vanish."""
    picture = rf"![\1]({repository}/raw/main/\2)" if repository else ""
    link = rf"[\1]({repository}/blob/main/\2)" if repository else r"\1"
    text = re.sub(r"!\[([^]]*)\]\((?!\w+:)([^)]*)\)", picture, text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!\w+:|#)([^)]*)\)", link, text)


class Commit(BuildHookInterface[Any]):
    """`[tool.hatch.build.hooks.custom]`: an sdist has the file already when a wheel is built from it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to a wheel or an sdist from a clone; an editable install asks git when it is asked."""
        known = runpy.run_path(str(Path(self.root) / "smpkit/version.py"))
        commit = known["commit_of"](Path(self.root))
        if version == "editable" or commit is None:
            return
        # In a folder that the hook keeps as long as it lives, which is until the archive is written.
        self._folder = tempfile.TemporaryDirectory(prefix="smpkit-build-")
        file = Path(self._folder.name) / "commit.txt"
        file.write_text(f"{commit}\n", encoding="ascii")
        build_data["force_include"][str(file)] = known["FILE"]
