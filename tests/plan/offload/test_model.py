"""What is said about an OffloadModel before it exists: the predictions that were written down, and the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smpkit.errors import UsageError
from smpkit.plan.offload.model import (
    Machine,
    OffloadedModel,
    Update,
    device_peak_bytes,
    host_peak_bytes,
    largest_parameters,
    step_time,
)

_GIB = 1024**3
_H200 = Machine(flops_per_second=430e12, updated_parameters_per_second=4.3e9)


def _model(parameters: float, kibitokens: int) -> OffloadedModel:
    return OffloadedModel(parameters, 24, 1024 * kibitokens)


@pytest.mark.parametrize(
    ("parameters", "kibitokens", "updates", "expected"),
    [
        (1.3e9, 8, 4.3e9, (202, 138, 128)),
        (3e9, 32, 4.3e9, (317, 281, 233)),
        (6.7e9, 32, 4.3e9, (317, 281, 233)),
        (6.7e9, 128, 4.3e9, (321, 321, 294)),
        (3e9, 32, 2e9, (311, 201, 177)),
        (3e9, 32, 8e9, (319, 320, 268)),
    ],
)
def test_speeds_in_tflops(parameters: float, kibitokens: int, updates: float, expected: tuple[int, int, int]) -> None:
    machine = replace(_H200, updated_parameters_per_second=updates)
    speeds = [step_time(_model(parameters, kibitokens), machine, update).useful_flops_per_second for update in Update]
    # To 2 %: the figures were written down beforehand, without the first load and the last gradient, which nothing
    # hides, and without the wait for weights in the forward of the smallest model.
    assert [speed / 1e12 for speed in speeds] == pytest.approx(expected, rel=0.02)


def test_bound_is_named() -> None:
    assert step_time(_model(1.3e9, 8), _H200).bound == "optimizer"
    assert step_time(_model(6.7e9, 32), _H200).bound == "compute"
    slow = replace(_H200, in_bytes_per_second=5e9)
    assert step_time(_model(1.3e9, 8), slow).bound == "link"


def test_time_of_a_link_bound_step_is_that_of_its_bytes() -> None:
    model = OffloadedModel(1e9, 4, 1000, width=100)
    machine = Machine(1e18, in_bytes_per_second=1e9, out_bytes_per_second=1e18, updated_parameters_per_second=1e18)
    # Weights twice but for the last two of four slices, and one input of a slice: the model's own is the caller's, and
    # those of the last two are still there.
    assert step_time(model, machine).total_seconds == pytest.approx(1.5 * 2 + 200_000 / 1e9, rel=1e-5)
    many = replace(model, num_microbatches=4)
    assert step_time(many, machine).total_seconds == pytest.approx(1.5 * 2 + 2.5 * 200_000 / 1e9, rel=1e-5)


def test_device_holds_two_slices_and_one_microbatch() -> None:
    model = OffloadedModel(32e6, 8, 4000, num_microbatches=4, num_layers=16, width=100)
    border = 1000 * 100 * 2
    largest = 4 / 12.25 * 64e6 / 16
    assert device_peak_bytes(model) == pytest.approx(4 * 8e6 + 2 * largest + 2 * 25.04 * border + 5 * border)
    whole = replace(model, num_slices=1)  # one slice's weights and gradients
    assert device_peak_bytes(whole) == pytest.approx(2 * 64e6 + 2 * largest + 16 * 25.04 * border)
    one = replace(model, num_microbatches=1)
    assert device_peak_bytes(one, in_slice_bytes=5) == pytest.approx(4 * 8e6 + 5 + 2 * 4 * border)
    assert device_peak_bytes(replace(model, imbalance=1.5)) == pytest.approx(device_peak_bytes(model) + 16e6)


def test_host_holds_states_weights_and_what_waits() -> None:
    model = OffloadedModel(32e6, 8, 4000, width=100)
    borders = 8 * 4000 * 100 * 2
    assert host_peak_bytes(model) == pytest.approx(32e6 * (12 + 2) + 2 * 16e6 + borders)
    assert host_peak_bytes(model, Update.JUST_IN_TIME) == pytest.approx(32e6 * (12 + 2 + 4) + borders)
    assert host_peak_bytes(replace(model, number_bytes=4)) == pytest.approx(32e6 * 12 + 2 * 16e6 + 2 * borders)
    assert host_peak_bytes(replace(model, optimizer="sgd")) == pytest.approx(32e6 * (4 + 2) + 2 * 16e6 + borders)


def test_width_of_a_dense_model_follows_from_its_parameters() -> None:
    assert OffloadedModel(6.7e9, 32, 1).border_bytes / 2 == pytest.approx(4134, abs=1)
    assert OffloadedModel(6.7e9, 4, 1, num_layers=32).border_bytes / 2 == pytest.approx(4134, abs=1)


def test_largest_model_of_a_host() -> None:
    model = OffloadedModel(1, 32, 32 * 1024)
    largest = largest_parameters(model, 128 * _GIB)
    assert largest / 1e9 == pytest.approx(8.36, abs=0.01)
    room = 120 * _GIB
    assert host_peak_bytes(replace(model, num_parameters=largest)) <= room
    assert host_peak_bytes(replace(model, num_parameters=largest + 1)) > room
    assert largest_parameters(model, 128 * _GIB, update=Update.JUST_IN_TIME) < largest
    assert largest_parameters(replace(model, number_bytes=4), 128 * _GIB) > largest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slices": 0}, "`num_slices` is 0"),
        ({"num_parameters": 0.5}, "`num_parameters` is 0.5"),
        ({"optimizer": "lamb"}, "`lamb` is no optimizer known here"),
        ({"number_bytes": 1}, "numbers of 1 bytes"),
        ({"num_layers": 2}, "2 layers cannot be cut into 8 slices"),
    ],
)
def test_impossible_models_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(OffloadedModel(1e9, 8, 1), **changes)  # type: ignore[arg-type]


def test_machines_and_hosts_that_do_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="`flops_per_second` is 0"):
        Machine(flops_per_second=0)
    with pytest.raises(UsageError, match="8 GiB are left free, hold no model with 32 tokens per step"):
        largest_parameters(OffloadedModel(1, 4, 32), 8 * _GIB)
