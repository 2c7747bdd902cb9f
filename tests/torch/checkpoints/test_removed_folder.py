from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.file_systems import make_folder


def test_a_folder_that_was_removed_is_called_that(tmp_path: Path) -> None:
    """`smpkit run` gives the script a link; `mkdir` said of it `File exists`."""
    folder, link = tmp_path / "kept", tmp_path / "checkpoints"
    link.symlink_to(folder)
    with pytest.raises(CheckpointError, match=f"the folder {folder} is gone: somebody removed it"):
        make_folder(link)
