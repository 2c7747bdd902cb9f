"""`smpkit plan --offload-model`: how long a step of an OffloadModel takes and what it holds, from sizes and speeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from smpkit.cli import _console
from smpkit.errors import UsageError

if TYPE_CHECKING:
    from smpkit.plan.offload.model import Machine, OffloadedModel, StepTime
    from smpkit.plan.svg import Bars

__all__ = ["options", "run"]

_GIB: Final = 1024**3
_OPTIONS: Final = (
    click.option("--offload-model", is_flag=True, help="Plan smpkit.OffloadModel on one device instead of a job."),
    click.option("--params", type=float, help="With --offload-model: parameters, such as 6.7e9 (or give --model)."),
    click.option("--slices", type=int, default=3, help="With --offload-model: parts of the model (3)."),
    click.option("--tokens", type=int, default=8192, help="With --offload-model: tokens per optimizer step (8192)."),
    click.option("--layers", type=int, help="With --offload-model: layers. Default: one per slice."),
    click.option("--fp32", is_flag=True, help="With --offload-model: compute in fp32, not bf16."),
    click.option("--updates", type=float, default=4.3, help="With --offload-model: 1e9 parameters updated/s (4.3)."),
    click.option("--host-memory-gib", type=float, help="With --offload-model: memory of the host; what fits it."),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add this plan's options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class _Plan:
    """Everything that is printed."""

    model: OffloadedModel
    machine: Machine
    times: dict[str, StepTime]
    """By when the optimizer updates."""
    device_bytes: float
    host_bytes: float
    device_gib: float | None
    host_gib: float | None
    largest: int | None
    """How many parameters the host's memory holds."""

    @property
    def fits(self) -> dict[str, bool]:
        found = {}
        for name, num_bytes, limit in (
            ("device", self.device_bytes, self.device_gib),
            ("host", self.host_bytes, self.host_gib),
        ):
            if limit is not None:
                found[name] = num_bytes <= limit * _GIB
        return found


def run(values: dict[str, Any], count_parameters: Callable[[], int] | None, *, as_json: bool) -> Iterator[Bars]:
    """Print the plan; return its pictures.

    Args:
        values: the command's options.
        count_parameters: asks `--model` for its size; None if it is not given.
    """
    made = _plan(values, count_parameters)
    if as_json:
        click.echo(json.dumps(_plain(made), indent=2))
    else:
        _print(made)
    return _pictures(made)


def _print(made: _Plan) -> None:
    click.echo("\n".join(_report(made)))
    for name, fits in made.fits.items():
        if not fits:
            limit = made.device_gib if name == "device" else made.host_gib
            _console.current().warn(f"does not fit the {name}'s {limit:g} GiB")
    if not made.fits.get("device", True):
        _console.current().hint("use more `--slices`, or more `--microbatches`")


def _plan(values: dict[str, Any], count_parameters: Callable[[], int] | None) -> _Plan:
    from smpkit.plan.offload.model import (
        WORKSPACE_BYTES,
        Machine,
        OffloadedModel,
        Update,
        device_peak_bytes,
        host_peak_bytes,
        largest_parameters,
        step_time,
    )

    if values["params"] is not None and count_parameters is not None:
        raise UsageError("`--params` cannot be given beside `--model`, which has a size", hint="remove one of them")
    params = values["params"] if count_parameters is None else count_parameters()
    if params is None:
        raise UsageError("the size of the model is not given", hint="add `--params 6.7e9`, or `--model`")
    model = OffloadedModel(
        params,
        values["slices"],
        values["tokens"],
        values["microbatches"] or 1,
        num_layers=values["layers"],
        optimizer=values["optimizer"],
        number_bytes=4 if values["fp32"] else 2,
    )
    link = values["link_gbs"] * 1e9
    machine = Machine(values["tflops"] * 1e12, link, link, updated_parameters_per_second=values["updates"] * 1e9)
    host_gib = values["host_memory_gib"]
    return _Plan(
        model,
        machine,
        {str(update): step_time(model, machine, update) for update in Update},
        device_peak_bytes(model) + WORKSPACE_BYTES,
        host_peak_bytes(model),
        values["memory_gib"],
        host_gib,
        None if host_gib is None else largest_parameters(replace(model, num_parameters=1), host_gib * _GIB),
    )


def _report(made: _Plan) -> Iterator[str]:
    model, best = made.model, made.times["overlapped"]
    kind = "fp32" if model.number_bytes == 4 else "bf16"
    yield f"model     {_count(model.num_parameters)} parameters in {model.num_slices} slices, {model.optimizer}, {kind}"
    machine = made.machine
    rates = f"{machine.flops_per_second / 1e12:g} TFLOP/s, link {machine.in_bytes_per_second / 1e9:g} GB/s each way"
    yield f"machine   {rates}, {_count(machine.updated_parameters_per_second)} parameters updated/s"
    parts = f"{model.num_tokens} tokens in {model.num_microbatches} microbatch{'es' * (model.num_microbatches != 1)}"
    yield f"step      {parts}, bound by {best.bound}"
    rows = [["update", "step", "TFLOP/s"]]
    for name, each in made.times.items():
        rows.append([name, f"{each.total_seconds:.2f} s", f"{each.useful_flops_per_second / 1e12:.0f}"])
    for name, seconds, rate in rows:
        yield f"          {name:<12}  {seconds:>8}  {rate:>7}"
    yield (
        f"of it     forward {best.forward_seconds:.2f} s  backward {best.backward_seconds:.2f} s  "
        f"in {best.in_seconds:.2f} s  out {best.out_seconds:.2f} s  optimizer {best.update_seconds:.2f} s"
    )
    yield f"memory    device {made.device_bytes / _GIB:.1f} GiB  host {made.host_bytes / _GIB:.1f} GiB"
    if made.largest is not None:
        room = f"{made.host_gib:g} GiB of host memory, 8 GiB of it left free"
        yield f"largest   {_count(made.largest)} parameters fit {room}"
    yield "(gradient clipping updates just-in-time; rates count no recomputation)"


def _pictures(made: _Plan) -> Iterator[Bars]:
    """Yield what the device and the host hold, and what each part of the machine does of a step."""
    from smpkit.cli._plan_picture import memory_bars
    from smpkit.plan.offload.model import WORKSPACE_BYTES, device_parts_bytes, host_parts_bytes
    from smpkit.plan.svg import Bar, Bars

    device = {**device_parts_bytes(made.model), "workspace": WORKSPACE_BYTES}
    yield memory_bars("memory of the device", {"device": device}, made.device_gib)
    yield memory_bars("memory of the host", {"host": host_parts_bytes(made.model)}, made.host_gib)
    step = made.times["overlapped"]
    busy = [
        Bar("device", {"forward": step.forward_seconds, "backward": step.backward_seconds}),
        Bar("link in", {"weights in": step.in_seconds}),
        Bar("link out", {"gradients out": step.out_seconds}),
        Bar("host", {"update": step.update_seconds}),
    ]
    title = f"a step of {step.total_seconds:.2f} s: how long each part of the machine works"
    yield Bars(title, busy, "s", step.total_seconds)


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:g}"


def _plain(made: _Plan) -> dict[str, Any]:
    return {
        "model": asdict(made.model),
        "machine": asdict(made.machine),
        "steps": {name: asdict(each) for name, each in made.times.items()},
        "device_peak_bytes": round(made.device_bytes),
        "host_peak_bytes": round(made.host_bytes),
        "fits": made.fits or None,
        "largest_parameters": made.largest,
    }
