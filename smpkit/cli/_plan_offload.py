"""The part of `smpkit plan` that is about activation offloading: what it moves, saves and costs on each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli import _console
from smpkit.cli._console import table, width

if TYPE_CHECKING:
    from smpkit.config.modelparallel import ModelParallelConfig
    from smpkit.plan.memory import ModelFacts
    from smpkit.plan.offload.forecast import Forecast
    from smpkit.plan.speed import Speed

__all__ = ["advise", "plain", "report"]

_GIB: Final = 1024**3
_WORTH: Final = 1e-3
"""A stall of a smaller share of the step is not worth a hint."""


def report(forecasts: Sequence[Forecast], cfg: ModelParallelConfig, speed: Speed) -> Iterator[str]:
    """Yield the section."""
    rate, flops = speed.link.out_bytes_per_second / 1e9, speed.flops_per_second / 1e12
    horizon = cfg.activation_loading_horizon
    yield f"offload   at horizon {horizon}, over a link of {rate:g} GB/s each way, by devices of {flops:g} TFLOP/s"
    head = ["GiB", "boundaries", "on device", "on host", "out", "back", "stalls", "of a step of"]
    rows = [head, *([f"stage {stage}", *_cells(each)] for stage, each in enumerate(forecasts))]
    yield from table(rows, width())


def _cells(each: Forecast) -> Iterator[str]:
    for num_bytes in (each.resident_bytes, each.device_bytes, each.host_bytes, each.out_bytes, each.back_bytes):
        yield f"{num_bytes / _GIB:.2f}"
    yield _seconds(each.stall_seconds)
    yield _seconds(each.step_seconds)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def advise(forecasts: Sequence[Forecast], cfg: ModelParallelConfig, model: ModelFacts) -> None:
    """Say when offloading does nothing, when a longer horizon removes its stalls, and when only a faster link would."""
    console = _console.current()
    if model.traced and not model.has_boundaries:
        console.warn("`offload_activations` has nothing to offload: no layer of the model is checkpointed")
        console.hint("let the factory call `smp.set_activation_checkpointing` on the layers, as the script does")
    slow = [each for each in forecasts if each.stall_seconds > _WORTH * each.step_seconds]
    if not slow:
        return
    enough = max(each.sufficient_horizon for each in slow)
    if cfg.activation_loading_horizon != "auto" and enough > cfg.activation_loading_horizon:
        console.hint(f"`activation_loading_horizon: {enough}` stalls less")
    else:
        rate = max(each.needed_bytes_per_second for each in slow)
        console.hint(f"copies take longer than the forward of their layer; a link of {rate / 1e9:.1f} GB/s hides them")


def plain(forecasts: Sequence[Forecast], cfg: ModelParallelConfig, speed: Speed) -> dict[str, Any]:
    """Return the section for programs."""
    return {
        "horizon": cfg.activation_loading_horizon,
        "link_bytes_per_second": speed.link.out_bytes_per_second,
        "flops_per_second": speed.flops_per_second,
        "stages": [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in forecasts],
    }
