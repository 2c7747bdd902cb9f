"""What a process may hold and a layer's call saves, and when ranks agree on what they have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpkit.plan.tune.chain import Choice
from smpkit.testing import EmulatedLink
from smpkit.torch.distributed import host_memory
from smpkit.torch.memory.chooser import Chooser
from smpkit.torch.memory.measure import Probe, Updates, device_limit
from smpkit.torch.recompute.layer import ChosenCheckpoint
from tests.torch.memory.test_fit import BATCH, WIDTH, saving_layer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "expected"), [("4096", 2048), ("max", None)])
def test_ranks_on_a_cpu_share_what_their_container_may_take(
    text: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
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
    updates.handle.remove()
    assert updates.num_updates == 3
    assert updates.state_bytes == 8 * 4


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
def test_a_probe_sees_the_same_in_a_checkpointed_call(kept: bool) -> None:
    layer, x, mask = saving_layer(), torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH)
    probe = Probe(EmulatedLink(), layer.parameters())
    call = probe.around("layer", layer)
    output = call(x, mask) if kept else checkpoint(call, x, mask, use_reentrant=False)
    output.sum().backward()
    calls = probe.calls["layer"]
    assert (calls.input_bytes, calls.saved_bytes) == (2 * x.nbytes, 3 * x.nbytes)
    assert (len(calls.first), len(calls.again)) == (1, 0 if kept else 1)
    assert layer.linear.weight.grad is not None


def test_a_rank_that_calls_and_updates_nothing_asks_in_the_same_steps() -> None:
    """Its replicas have updated, and have called a layer that saves 64 bytes and is given 32."""
    step, asked = 0, []

    def agree(numbers: Sequence[float]) -> Sequence[float]:
        asked.append((step, len(numbers)))
        return [1.0] if len(numbers) == 1 else [*numbers[:-4], 2.0, 1.0, 64.0, 32.0]

    layer = ChosenCheckpoint(nn.Linear(2, 2))
    allowed = frozenset({Choice.KEEP, Choice.RECOMPUTE})
    chooser = Chooser(
        {"0": layer}, lambda: (), EmulatedLink(), None, limit_bytes=130, allowed=allowed, agree=agree, live=2
    )
    for step in range(1, 9):
        chooser.begin_step()
        chooser.end_step(had_backward=step != 2)  # it does not count
    assert asked == [(5, 1), (8, 11 + 4)]
    assert chooser.is_done
    assert chooser.choices == {"0": Choice.KEEP}  # two microbatches save 128 bytes
