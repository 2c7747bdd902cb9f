"""`smpkit calibrate`: measure what predictions need to know of this machine, and write it as JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from smpkit.cli import _console
from smpkit.cli._console import table, width, write_file
from smpkit.cli.options import FILE, numbers
from smpkit.errors import DeadlineError, SmpkitError, UnsupportedError
from smpkit.units import amount, magnitude, seconds, things

if TYPE_CHECKING:
    from smpkit.plan.tune.calibration import Calibration

_STARTING_SECONDS: Final = 240
"""How long ranks may take beside the measurement."""
_ENDING_SECONDS: Final = 40
"""For torchrun to end them; it gives them 30."""


@click.command()
@click.option("--ranks", type=click.IntRange(1, 1024), help="Number of ranks. Default: one per GPU, or 2 without.")
@click.option("--seconds", type=numbers(1, 10**6), default=60.0, help="About how long to measure (60).")
@click.option("--output", type=FILE, default=Path("calibration.json"), help="The file to write (calibration.json).")
def calibrate(ranks: int | None, seconds: float, output: Path) -> None:
    """Measure this machine, for `smpkit tune` and the summaries of runs.

    Ranks measure matrix products by size and dtype, memory, the link between device and host, messages and collectives
    by size and group, and the optimizer on the CPU.
    """
    from smpkit.plan.tune.calibration import read_calibration
    from smpkit_container.environment import count_gpus

    number = ranks or count_gpus(os.environ) or 2
    _console.note(f"Measuring this machine with {things(number, 'rank')} for about {seconds:g} s")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "calibration.json")
        _measure(number, seconds, written)
        calibration = read_calibration(written)
        text = written.read_text(encoding="utf-8")
    write_file(output, text, "calibration")
    click.echo("\n".join(_report(calibration)))
    _console.note(f"Wrote {output}; `smpkit tune job.yaml --model MODULE:FACTORY --calibration {output}` uses it")


def _measure(ranks: int, seconds: float, path: Path) -> None:
    """Run the measurement on so many ranks and wait for its file."""
    import importlib.util

    from smpkit.modules import module_command
    from smpkit_container.launch import meeting_port
    from smpkit_container.topology import Topology

    if importlib.util.find_spec("torch") is None:
        message = f"torch is not installed beside smpkit ({sys.executable}), and ranks measure with it"
        raise UnsupportedError(message, hint="`pip install 'smpkit[torch]'`")
    topology = Topology(hosts=("localhost",), node_rank=0, processes_per_host=ranks, launcher="torchrun")
    program = [*module_command("smpkit.torch.calibrate"), str(path), str(seconds)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SM_HP_", "SMPKIT_JOB"))}
    variables["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    deadline = seconds + _STARTING_SECONDS
    torchrun = [*module_command("torch.distributed.run"), "--nproc-per-node", str(ranks), "--no-python"]
    with meeting_port(topology) as port:
        command = [*torchrun, "--master-addr", topology.master, "--master-port", str(port), *program]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True) as started:
            try:
                _, output = started.communicate(timeout=deadline)
            except BaseException as error:
                started.terminate()  # torchrun then ends the ranks, which would outlive it
                with suppress(subprocess.TimeoutExpired):
                    started.communicate(timeout=_ENDING_SECONDS)
                started.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise DeadlineError(f"the {ranks} ranks that measure were not done within {deadline:g} s") from None
    _console.detail(output.rstrip())
    if started.returncode or not path.is_file():
        errors = [line for line in output.splitlines() if "Error" in line and "torch/distributed" not in line]
        last = errors[-1].strip() if errors else "they said nothing"
        raise SmpkitError(f"the ranks that measure failed: {last}", hint="`smpkit -v calibrate` shows all they said")


def _report(calibration: Calibration) -> Iterator[str]:
    machine = calibration.machine
    yield f"machine   {machine.host}: {machine.processor}, {machine.cores} cores, {amount(machine.memory_bytes)}"
    if machine.devices:
        yield f"devices   {machine.devices} × {machine.device}, {amount(machine.device_memory_bytes)} each"
    yield f"ranks     {calibration.ranks}, {machine.cores / calibration.ranks:g} cores each"
    yield ""
    rows = [["TFLOP/s", "size", "one rank", "all ranks, each"]]
    for product in calibration.matmul:
        rates = (product.flops_per_second, product.shared_flops_per_second)
        rows.append([f"{product.dtype} matmul", str(product.size), *(f"{rate / 1e12:.3g}" for rate in rates)])
    yield from table(rows, width())
    yield ""
    yield f"memory    {_rate(calibration.memory_bytes_per_second)}"
    if (link := calibration.link) is not None:
        ways = f"{_rate(link.out_bytes_per_second)} to the host, {_rate(link.back_bytes_per_second)} back"
        yield f"link      {ways}, {_rate(link.both_bytes_per_second)} together"
    if calibration.operation_seconds:
        operator, action = seconds(calibration.operation_seconds), seconds(calibration.action_seconds)
        yield f"host      {operator} an operator, {action} an action of a pipeline"
    yield f"optimizer {magnitude(calibration.updates_per_second)} parameters/s on a rank's cores"
    if calibration.messages:
        yield ""
        rows = [["", "ranks", *(amount(message.num_bytes) for message in calibration.messages)]]
        rows.append(["message", "2", *(seconds(message.seconds) for message in calibration.messages)])
        for operation, ranks in dict.fromkeys((op.operation, op.ranks) for op in calibration.collectives):
            times = [op for op in calibration.collectives if (op.operation, op.ranks) == (operation, ranks)]
            rows.append([operation, str(ranks), *(seconds(op.seconds) for op in times)])
        yield from table(rows, width())


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
