"""How many threads a rank takes: those of one host share its cores."""

from __future__ import annotations

import pytest

from smpkit.torch.distributed import cores


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on a machine of 96 cores, alone."""
    monkeypatch.setattr(cores, "_AT_START", 96)
    monkeypatch.setattr(cores, "_allowed", lambda: 96)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def be_one_of(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(num_ranks)}
    for name, value in names.items():
        monkeypatch.setenv(name, value)


def test_ranks_of_one_host_share_its_cores(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores.own_cores() == 96
    be_one_of(8, monkeypatch)
    assert cores.own_cores() == 12


def test_a_rank_that_is_bound_to_its_part_does_not_share_that(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    be_one_of(8, monkeypatch)
    monkeypatch.setattr(cores, "_allowed", lambda: 12)
    assert cores.own_cores() == 12
    monkeypatch.setattr(cores, "_allowed", lambda: 4)
    assert cores.own_cores() == 4


def test_there_is_one_at_least_whatever_the_launcher_says(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_AT_START", 4)
    be_one_of(8, monkeypatch)
    assert cores.own_cores() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cores.own_cores() == 4
