"""What a process may hold, and what its optimizers do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from smpkit.torch.memory.limits import device_limit
from smpkit.torch.memory.updates import Updates
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


def test_an_optimizer_that_is_gone_holds_nothing() -> None:
    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    updates = Updates(lambda: [parameter], CPU)
    for _ in range(2):
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
    last = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    last.step()
    updates.remove()
    assert updates.num_updates == 3
    assert updates.state_bytes == 8 * 4
