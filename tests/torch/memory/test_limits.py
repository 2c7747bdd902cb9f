"""How much a process may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smpkit.torch.memory.limits import device_limit
from smpkit.torch.offload import arena

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "expected"), [("4096", 2048), ("max", None)])
def test_ranks_on_a_cpu_share_what_their_container_may_take(
    text: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_CGROUP", tmp_path)
    of_machine = device_limit("memory_budget_gib", CPU, None, 2)
    (tmp_path / "memory.max").write_text(f"{text}\n")
    assert device_limit("memory_budget_gib", CPU, None, 2) == (expected or of_machine)
