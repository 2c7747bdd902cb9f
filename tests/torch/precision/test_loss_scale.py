"""The loss scale moves as SMP v1's (Apex's) did."""

from __future__ import annotations

from typing import Any

import pytest

from smpkit.errors import UsageError
from smpkit.torch.precision.loss_scale import DynamicLossScaler, StaticLossScaler, loss_scaler_of


def trajectory(steps: str, **arguments: Any) -> list[float]:
    """Return the scale after each step; `x` is one with an overflow."""
    scaler = DynamicLossScaler(**arguments)
    scales = []
    for step in steps:
        scaler.update_scale(step == "x")
        scales.append(scaler.loss_scale)
    return scales


def test_the_defaults_are_the_documented_ones() -> None:
    scaler = loss_scaler_of(None, True, {})
    assert scaler == DynamicLossScaler(2.0**32, 2.0, 1000, 1.0, 1, False)
    assert trajectory("x" * 17) == [2.0 ** (31 - i) for i in range(17)]
    assert trajectory("." * 1000)[-2:] == [2.0**32, 2.0**33]


@pytest.mark.parametrize(
    ("steps", "arguments", "scales"),
    [
        ("..x..", {"scale_window": 2}, [8, 16, 8, 8, 16]),
        (".x...", {"scale_window": 3}, [8, 4, 4, 4, 8]),
        ("xxxxx", {"min_scale": 2.0}, [4, 2, 2, 2, 2]),
        ("x", {"scale_factor": 8.0}, [1]),
        # Two overflows are forgiven, wherever they are; the third shrinks the scale, and so does every later one.
        ("x.xx.x", {"delayed_shift": 3}, [8, 8, 8, 4, 4, 2]),
        # Growth makes up for what was forgiven.
        ("x..xx", {"delayed_shift": 2, "scale_window": 2}, [8, 8, 16, 16, 8]),
        # Only overflows in a row count.
        ("x.x.xx", {"delayed_shift": 2, "consecutive_hysteresis": True}, [8, 8, 8, 8, 8, 4]),
    ],
)
def test_trajectories(steps: str, arguments: dict[str, Any], scales: list[float]) -> None:
    assert trajectory(steps, init_scale=8.0, **arguments) == scales


def test_a_scaler_goes_on_where_it_was_saved() -> None:
    arguments: dict[str, Any] = {"init_scale": 8.0, "scale_window": 3, "delayed_shift": 2}
    steps = ".x..x.x..."
    for cut in range(len(steps)):
        first, second = DynamicLossScaler(**arguments), DynamicLossScaler(**arguments)
        for step in steps[:cut]:
            first.update_scale(step == "x")
        second.load_state_dict(first.state_dict())
        for step in steps[cut:]:
            second.update_scale(step == "x")
        assert second.loss_scale == trajectory(steps, **arguments)[-1]


def test_a_static_scale_stays_and_a_dynamic_one_starts_from_it() -> None:
    static = loss_scaler_of(128.0, False, {})
    static.update_scale(True)
    assert static.loss_scale == 128.0
    static.load_state_dict(DynamicLossScaler().state_dict())
    assert static.loss_scale == 128.0
    dynamic = DynamicLossScaler()
    dynamic.load_state_dict(StaticLossScaler(64.0).state_dict())
    assert dynamic.loss_scale == 64.0
    assert loss_scaler_of(None, False, {}).loss_scale == 1.0


def test_scripts_give_the_arguments_as_a_dict_or_by_name() -> None:
    assert loss_scaler_of(None, True, {"dynamic_loss_args": {"scale_window": 5}}) == DynamicLossScaler(scale_window=5)
    assert loss_scaler_of(None, True, {"scale_window": 5}) == DynamicLossScaler(scale_window=5)
    assert loss_scaler_of(None, True, {"dynamic_loss_args": None}) == DynamicLossScaler()


@pytest.mark.parametrize(
    ("static", "dynamic", "arguments", "message"),
    [
        (None, True, {"init_scal": 2.0}, "has no argument `init_scal`"),
        (1.0, False, {"dynamic_loss_args": {"window": 2}}, "has no argument `window`"),
        (0.0, False, {}, "static_loss_scale must be more than 0, got 0.0"),
        (None, True, {"scale_window": 0}, "`scale_window` of the loss scale must be more than 0, got 0"),
        (None, True, {"scale_factor": 1.0}, "`scale_factor` of the loss scale must be more than 1"),
    ],
)
def test_rejects_wrong_arguments(static: float | None, dynamic: bool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loss_scaler_of(static, dynamic, arguments)
