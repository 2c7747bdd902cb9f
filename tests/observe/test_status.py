from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.observe.status import (
    ACTION_CELL,
    LAYER_CELL,
    STATUS_DIR,
    Levers,
    RankStatus,
    StatusPage,
    page_of,
    read_status,
)
from smpkit.observe.summary import KindBytes
from smpkit.torch.core import status

HELD, PLANNED = KindBytes(weights=1, activations=2), KindBytes(weights=1)
LEVERS = Levers(4, {"microbatches": "microbatches: 4"})


def note(page: StatusPage, kind: str = "", microbatch: int = 0, layer: str = "") -> None:
    """Note an action and a layer as the runtime does, which calls nothing."""
    if kind:
        page.cells[ACTION_CELL] = microbatch * 256 + ord(kind)
    page.cells[LAYER_CELL] = page.layer_numbers[layer] if layer else 0


def test_what_was_noted_is_read(tmp_path: Path) -> None:
    page = StatusPage(tmp_path, 3)
    assert read_status(tmp_path, 3) == RankStatus(-1)
    page.begin_step(12)
    note(page, "B", 2, "blocks.1")
    page.write(HELD, PLANNED, LEVERS)
    expected = RankStatus(12, "backward", 2, "blocks.1", HELD, PLANNED, LEVERS)
    assert read_status(tmp_path, 3) == expected
    note(page, "F", 300)
    page.write(HELD, None, None)
    assert read_status(tmp_path, 3) == RankStatus(12, "forward", 300, "", HELD, None, None)
    page.end_step(11, 0.25)
    page.close()
    assert read_status(tmp_path, 3) == RankStatus(12, held=HELD, num_trained=11, step_seconds=0.25, has_ended=True)


@pytest.mark.parametrize(
    ("parameters", "replicas", "is_checkpointed", "hint"),
    [
        ({"offload_activations": True}, 4, True, "`sharded_data_parallel_degree: 4` saves most: 2.2 GiB"),
        ({"offload_activations": True, "microbatches": 2}, 1, True, "`microbatches: 4` saves most: 1.0 GiB"),
        ({}, 1, True, "`offload_activations: true` saves most: up to 2.0 GiB"),
        (
            {"sharded_data_parallel_degree": 4},
            4,
            False,
            "`smp.set_activation_checkpointing(layers)` saves most: up to 2.0 GiB",
        ),
    ],
    ids=["shards", "microbatches", "offloads", "checkpoints"],
)
def test_the_hint_names_the_setting_that_saves_most_of_what_a_rank_held(
    parameters: dict[str, Any], replicas: int, is_checkpointed: bool, hint: str
) -> None:
    config, _ = ModelParallelConfig.from_sources({"ddp": True, **parameters}, None)
    levers = Levers.of(config, replicas, is_checkpointed=is_checkpointed)
    held = KindBytes(weights=2**29, gradients=0, states=2 * 2**30, activations=2 * 2**30)
    assert RankStatus(1, held=held, levers=levers).remedy(2**30) == f"{hint} of this rank's memory"
    assert RankStatus(1, held=KindBytes(), levers=levers).remedy() == ""
    assert RankStatus(1, held=held).remedy() == ""


def test_a_page_outlives_a_rank_that_was_killed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        page = StatusPage(tmp_path, 0)
        page.begin_step(7)
        note(page, layer="layer")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_status(tmp_path, 0) == RankStatus(7, layer="layer")


def test_a_missing_short_or_half_written_page_tells_nothing_wrong(tmp_path: Path) -> None:
    assert read_status(tmp_path, 0) is None
    page_of(tmp_path, 0).write_bytes(b"x")
    assert read_status(tmp_path, 0) is None
    page = StatusPage(tmp_path, 0)
    page.write(HELD, None, None)
    page.cells[0] = 3  # odd: it was writing
    assert read_status(tmp_path, 0) == RankStatus(-1)
    page.cells[0] = 4
    page._page[64:66] = b"\xff\xff"
    assert read_status(tmp_path, 0) == RankStatus(-1)


def test_a_text_that_is_written_while_it_is_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of two halves could be read: the number of writes was compared with nothing after the read."""
    page = StatusPage(tmp_path, 0)
    page.write(HELD, PLANNED, None)

    class Torn(io.BytesIO):
        """A page that is written between two reads."""

        def seek(self, *place: int) -> int:
            page.write(HELD, None, None)
            self.getbuffer()[:64] = page_of(tmp_path, 0).read_bytes()[:64]
            return super().seek(*place)

    torn = SimpleNamespace(open=lambda *_, **__: Torn(page_of(tmp_path, 0).read_bytes()))
    assert read_status(tmp_path, 0) == RankStatus(-1, held=HELD, planned=PLANNED)
    with monkeypatch.context() as patch:
        patch.setattr("smpkit.observe.status.page_of", lambda *_: torn)
        assert read_status(tmp_path, 0) == RankStatus(-1)


def test_a_layer_with_a_long_name_is_cut(tmp_path: Path) -> None:
    page = StatusPage(tmp_path, 0)
    note(page, layer="x" * 1000)
    assert read_status(tmp_path, 0) == RankStatus(-1, layer="x" * 191)


def test_each_layer_is_found_again_and_where_there_is_no_room_for_names_nothing_wrong_is(tmp_path: Path) -> None:
    page = StatusPage(tmp_path, 0)
    names = [f"blocks.{number}." + "x" * 100 for number in range(600)]
    found = []
    for name in [*names, *names]:
        note(page, layer=name)
        found.append(read_status(tmp_path, 0))
    fitting = found.index(RankStatus(-1))
    assert fitting > 500
    assert found == [RankStatus(-1, layer=name if i < fitting else "") for i, name in enumerate(names)] * 2


def test_what_a_process_notes_is_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_page", "_cells", "_layer_numbers"):
        monkeypatch.setattr(status, name, getattr(status, name))
    status.use_page(None)
    status.begin_action("F", 1)
    status.begin_layer("nowhere")
    status.open_page(2, (2, 1, 4), {STATUS_DIR: str(tmp_path)})
    status.begin_action("W", 5)
    status.begin_layer("head")
    assert read_status(tmp_path, 2) == RankStatus(-1, "weight half of the backward", 5, "head", degrees=(2, 1, 4))
    status.begin_action("B", 5)
    assert read_status(tmp_path, 2) == RankStatus(-1, "backward", 5, degrees=(2, 1, 4))
