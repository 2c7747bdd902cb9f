"""`smpkit plan-offload-model`: how long a step of an OffloadModel takes and what it holds, from sizes and speeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from smpkit.cli import _console
from smpkit.cli.options import COUNT, POSITIVE, numbers
from smpkit.errors import UsageError
from smpkit.plan.offload.model import (
    WORKSPACE_BYTES,
    Machine,
    OffloadedModel,
    StepTime,
    Update,
    device_peak_bytes,
    host_peak_bytes,
    largest_parameters,
    step_time,
)
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.units import amount, magnitude, seconds, things

_GIB: Final = 2**30


@click.command("plan-offload-model")
@click.option("--params", type=numbers(1, 10**15), help="Parameters, such as 6.7e9 (or give --model).")
@click.option("--model", metavar="MODULE:FACTORY", help="What returns the model, whose parameters are counted.")
@click.option("--slices", type=COUNT, default=3, help="Parts of the model (3).")
@click.option("--layers", type=COUNT, help="Layers. Default: one per slice.")
@click.option("--tokens", type=COUNT, default=8192, help="Tokens per optimizer step (8192).")
@click.option("--microbatches", type=COUNT, default=1, help="Parts of a batch (1).")
@click.option("--fp32", is_flag=True, help="Compute in fp32, not bf16.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="Whose states count (adamw).")
@click.option("--updates", type=POSITIVE, default=4.3, help="1e9 parameters that the host updates per second (4.3).")
@click.option("--tflops", type=POSITIVE, default=150.0, help="What the device reaches in training, TFLOP/s (150).")
@click.option("--link-gbs", type=POSITIVE, default=25.0, help="Its link with the host, GB/s each way (25).")
@click.option("--memory-gib", type=POSITIVE, help="Memory of the device: fail if the model does not fit.")
@click.option(
    "--host-memory-gib", type=POSITIVE, help="Memory of the host: say what fits, and fail if the model does not."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_offload_model(memory_gib: float | None, host_memory_gib: float | None, as_json: bool, **options: Any) -> int:
    """Show what a step of smpkit.OffloadModel takes and holds, on one device."""
    plan = _plan(memory_gib, host_memory_gib, options)
    if as_json:
        _console.print_json(plan)
    else:
        click.echo("\n".join(_report(plan, host_memory_gib)))
        for place, limit in (("device", memory_gib), ("host", host_memory_gib)):
            if not plan.fits.get(place, True):
                _console.warn(f"does not fit the {place}'s {limit:g} GiB")
        if not plan.fits.get("device", True):
            _console.hint("use more `--slices`, or more `--microbatches`")
    return int(not all(plan.fits.values()))


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    model: OffloadedModel
    machine: Machine
    steps: dict[str, StepTime]
    """By when the optimizer updates."""
    device_peak_bytes: int
    host_peak_bytes: int
    fits: dict[str, bool]
    """Whether device and host have room, for those whose memory is given."""
    largest_parameters: int | None
    """How many the host's memory holds, where it is given."""


def _plan(memory_gib: float | None, host_memory_gib: float | None, options: dict[str, Any]) -> Plan:
    model = OffloadedModel(
        _num_parameters(options["params"], options["model"]),
        options["slices"],
        options["tokens"],
        options["microbatches"],
        num_layers=options["layers"],
        optimizer=options["optimizer"],
        number_bytes=4 if options["fp32"] else 2,
    )
    link = options["link_gbs"] * 1e9
    updates = options["updates"] * 1e9
    machine = Machine(options["tflops"] * 1e12, link, link, updated_parameters_per_second=updates)
    device, host = round(device_peak_bytes(model) + WORKSPACE_BYTES), round(host_peak_bytes(model))
    fits: dict[str, bool] = {}
    largest = None
    if memory_gib is not None:
        fits["device"] = device <= memory_gib * _GIB
    if host_memory_gib is not None:  # some of it is left free for the process itself
        largest = largest_parameters(replace(model, num_parameters=1), host_memory_gib * _GIB)
        fits["host"] = model.num_parameters <= largest
    steps = {str(update): step_time(model, machine, update) for update in Update}
    return Plan(model, machine, steps, device, host, fits, largest)


def _num_parameters(params: float | None, target: str | None) -> float:
    if params is not None and target is not None:
        raise UsageError("`--params` cannot be given beside `--model`, which has a size", hint="remove one of them")
    if target is not None:
        from smpkit.cli._world import describe  # only this needs what reads jobs

        tensors = describe(target, Path())[0].tensors.values()
        return sum(tensor.num_elements for tensor in tensors if tensor.rows)  # not buffers, such as minGPT's masks
    if params is None:
        raise UsageError("the size of the model is not given", hint="add `--params 6.7e9`, or `--model`")
    return params


def _report(plan: Plan, host_memory_gib: float | None) -> Iterator[str]:
    model, machine, best = plan.model, plan.machine, plan.steps["overlapped"]
    kind = "fp32" if model.number_bytes == 4 else "bf16"
    sizes = f"{magnitude(model.num_parameters)} parameters in {model.num_slices} slices"
    yield f"model     {sizes}, {model.optimizer}, {kind}"
    rates = f"{machine.flops_per_second / 1e12:g} TFLOP/s, link {machine.in_bytes_per_second / 1e9:g} GB/s each way"
    yield f"machine   {rates}, {magnitude(machine.updated_parameters_per_second)} parameters updated/s"
    parts = f"{model.num_tokens} tokens in {things(model.num_microbatches, 'microbatch')}"
    yield f"step      {parts}, bound by {best.bound}"
    yield f"          {'update':<12}  {'step':>8}  TFLOP/s"
    for name, step in plan.steps.items():
        rate = f"{step.useful_flops_per_second / 1e12:.0f}"
        yield f"          {name:<12}  {seconds(step.total_seconds):>8}  {rate:>7}"
    phases = {
        "forward": best.forward_seconds,
        "backward": best.backward_seconds,
        "in": best.in_seconds,
        "out": best.out_seconds,
        "optimizer": best.update_seconds,
    }
    yield "of it     " + "  ".join(f"{name} {seconds(length)}" for name, length in phases.items())
    yield f"memory    device {amount(plan.device_peak_bytes)}  host {amount(plan.host_peak_bytes)}"
    if plan.largest_parameters is not None:
        room = f"{host_memory_gib:g} GiB of host memory, 8 GiB of it left free"
        yield f"largest   {magnitude(plan.largest_parameters)} parameters fit {room}"
    yield "(gradient clipping updates just-in-time; rates count no recomputation)"
