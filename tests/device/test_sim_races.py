"""What nothing orders is found under every policy, named with both lines; what an event orders is not reported."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Race, RaceFound
from tests.device.on_sim import ORDERS, naming, on_sim


def races_of(check: Callable[[bool], None], policy: str, ordered: bool) -> list[Race]:
    simulated_device.races()
    simulated_device.set_policy(policy, 3)
    check(ordered)
    torch.accelerator.synchronize()
    return simulated_device.races()


def pinned(value: float) -> Tensor:
    return torch.full((1000,), value, device="cpu").pin_memory()


def side_stream() -> torch.Stream:
    stream = torch.Stream("sim")
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def read_on_another_stream(ordered: bool) -> None:
    a, host, side = torch.zeros(1000, device="sim"), pinned(1.0), side_stream()
    with side:
        a.copy_(host, non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().wait_stream(side)
    total = a.sum().item()
    if ordered:
        assert total == 1000


def freed_while_copied(ordered: bool) -> None:
    host, a, side = pinned(0.0), torch.ones(1000, device="sim"), side_stream()
    with side:
        host.copy_(a, non_blocking=True)
    if ordered:
        a.record_stream(side)
    del a
    torch.full((1000,), 7.0, device="sim")
    torch.accelerator.synchronize()
    if ordered:
        assert host[0].item() == 1


def host_reads_too_early(ordered: bool) -> None:
    host, a = pinned(0.0), torch.full((1000,), 3.0, device="sim")
    host.copy_(a, non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().synchronize()
    value = host.sum().item()
    if ordered:
        assert value == 3000


def host_writes_too_early(ordered: bool) -> None:
    host, a = pinned(1.0), torch.zeros(1000, device="sim")
    a.copy_(host, non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().synchronize()
    host.fill_(9.0)
    if ordered:
        assert a.sum().item() == 1000


def written_in_backward(ordered: bool) -> None:
    weight = torch.ones(64, device="sim", requires_grad=True)
    x, host = torch.ones(64, device="sim"), pinned(5.0)
    loss = (weight * x).sum()
    side = side_stream()
    with side:
        x.data.copy_(host[:64], non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().wait_stream(side)
    torch.autograd.backward(loss)


CHECKS = {
    read_on_another_stream: ("aten::sum", "copy to the device", "memory of sim:0"),
    freed_while_copied: ("the allocator (freed memory)", "copy to the host", "memory of sim:0"),
    host_reads_too_early: ("aten::sum", "copy to the host", "pinned host memory"),
    host_writes_too_early: ("aten::fill_", "copy to the device", "pinned host memory"),
}


@on_sim()
def test_every_missing_wait_is_found_and_no_other() -> None:
    for (check, (second, first, memory)), policy in product(CHECKS.items(), simulated_device.POLICIES):
        with naming(f"{check.__name__} under {policy}"):
            assert races_of(check, policy, True) == []
            unordered = races_of(check, policy, False)
            matching = [race for race in unordered if race.first.operator == first and race.memory == memory]
            assert [race.second.operator for race in matching][:1] == [second], unordered
            for access in (matching[0].first, matching[0].second):
                file, line, function = access.lines[0].rsplit(":", 2)
                assert file.endswith("test_sim_races.py")
                assert function == check.__name__
                assert 0 < int(line) - check.__code__.co_firstlineno < 15


@on_sim()
def test_columns_of_one_matrix_do_not_race() -> None:
    for policy in ("lazy", "copies"):
        with simulated_device.no_races(policy):
            matrix, side = torch.zeros(16, 8, device="sim"), side_stream()
            with side:
                matrix[:, ::2].add_(1)
            matrix[:, 1::2].add_(2)
            matrix.view(-1)[4 * 8 + 1 : 4 * 8 + 2].add_(3)
            torch.accelerator.current_stream().wait_stream(side)
            assert matrix.sum().item() == 16 * 4 * 3 + 3


@on_sim()
def test_a_race_raises_after_the_block() -> None:
    matrix, side = torch.zeros(16, 8, device="sim"), side_stream()
    with side:
        matrix[:, ::2].add_(1)
    text = r"nothing orders these two:\n    aten::add on the default stream of sim:0 reads at .*test_sim_races"
    with pytest.raises(RaceFound, match=text), simulated_device.no_races("lazy"):
        matrix[3, 2:4].add_(2)


@on_sim()
def test_a_race_raises_at_once_if_strict() -> None:
    simulated_device.configure(strict=True)
    a, side = torch.zeros(16, device="sim"), side_stream()
    with side:
        a.add_(1)
    with pytest.raises(RuntimeError, match="a race: aten::mul"):
        a.mul_(2)
    simulated_device.configure()
    simulated_device.races()


@on_sim(devices=2)
def test_devices_are_ordered_by_copies_between_them() -> None:
    for order in ORDERS:
        with naming(str(order)), simulated_device.no_races(*order):
            a = torch.arange(1000.0, device="sim:0")
            b = a.to("sim:1", non_blocking=True) * 2
            a.fill_(0)
            with torch.accelerator.device_index(1):
                c = torch.ones(1000, device="sim") + b
            assert c.device.index == 1
            assert c.sum().item() == 1000 * 999 + 1000
            with pytest.raises(RuntimeError, match="same device"):
                a + b
            assert torch.accelerator.memory_allocated(1) > 0


@on_sim()
def test_virtual_time_is_exact() -> None:
    speeds = simulated_device.Speeds(out=1e9, back=2e9, latency=0.0, launch=0.0)
    simulated_device.set_speeds(speeds)
    simulated_device.configure(traced=True)
    simulated_device.set_policy("timed")
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    a, host = torch.zeros(250_000, device="sim"), torch.empty(250_000, device="cpu").pin_memory()
    main.synchronize()
    simulated_device.timeline()
    begin = simulated_device.now()
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record(main)
    simulated_device.sleep(5e-3)
    last.record(main)
    side.wait_event(first)
    with side:
        host.copy_(a, non_blocking=True)  # a millisecond
        copied = side.record_event()
    polls = 0
    while not copied.query():
        polls += 1
    assert polls > 0
    assert simulated_device.now() - begin == pytest.approx(1e-3)
    assert not last.query()
    main.synchronize()
    assert first.elapsed_time(last) == pytest.approx(5)
    assert first.elapsed_time(last) == pytest.approx(5)
    spans = {span.what: (span.begin - begin, span.end - begin) for span in simulated_device.timeline()}
    assert list(spans["sleep"]) == pytest.approx([0, 5e-3])
    assert list(spans["copy to the host"]) == pytest.approx([0, 1e-3])
    simulated_device.configure()


@on_sim()
def test_a_race_with_a_backward_pass_names_the_forward_pass() -> None:
    assert races_of(written_in_backward, "lazy", True) == []
    (race,) = [race for race in races_of(written_in_backward, "lazy", False) if race.second.operator == "aten::mul"]
    assert any("MulBackward0, of the forward pass" in line for line in race.second.lines)
    assert any(line.endswith(":written_in_backward") for line in race.second.lines)


@on_sim()
def test_wrong_use_is_an_error() -> None:
    with pytest.raises(UsageError, match="policies are eager, lazy, compute, copies, random, timed"):
        simulated_device.set_policy("slow")
    with pytest.raises(UsageError, match="was loaded with devices=1, and cannot have 2"):
        simulated_device.load(2)
