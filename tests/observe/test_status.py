from __future__ import annotations

import os
import signal
from pathlib import Path

from smpkit.observe.status import RankStatus, StatusPage, page_of, read_status
from smpkit.observe.summary import KindBytes

HELD, PLANNED = KindBytes(weights=1, activations=2), KindBytes(weights=1)


def test_what_was_noted_is_read(tmp_path: Path) -> None:
    page = StatusPage(tmp_path, 3)
    assert read_status(tmp_path, 3) == RankStatus(-1)
    page.begin_step(12)
    page.begin_action("B", 2)
    page.begin_layer("blocks.1")
    page.write(HELD, PLANNED, "`microbatches: 8` saves most")
    expected = RankStatus(12, "backward", 2, "blocks.1", HELD, PLANNED, "`microbatches: 8` saves most")
    assert read_status(tmp_path, 3) == expected
    page.end_layers()
    page.write(HELD, None, "")
    page.close()
    assert read_status(tmp_path, 3) == RankStatus(12, "backward", 2, "", HELD, None, "")


def test_a_page_outlives_a_rank_that_was_killed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        page = StatusPage(tmp_path, 0)
        page.begin_step(7)
        page.begin_layer("layer")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_status(tmp_path, 0) == RankStatus(7, layer="layer")


def test_a_missing_short_or_half_written_page_tells_nothing_wrong(tmp_path: Path) -> None:
    assert read_status(tmp_path, 0) is None
    page_of(tmp_path, 0).write_bytes(b"x")
    assert read_status(tmp_path, 0) is None
    page = StatusPage(tmp_path, 0)
    page.write(HELD, None, "")
    page._page[0:4] = (3).to_bytes(4, "little")  # odd: it was writing
    assert read_status(tmp_path, 0) == RankStatus(-1)
    page._page[0:4] = (4).to_bytes(4, "little")
    page._page[256:258] = b"\xff\xff"
    assert read_status(tmp_path, 0) == RankStatus(-1)


def test_a_layer_with_a_long_name_is_cut(tmp_path: Path) -> None:
    page = StatusPage(tmp_path, 0)
    page.begin_layer("x" * 1000)
    status = read_status(tmp_path, 0)
    assert status is not None
    assert status.layer == "x" * 191
