"""OffloadModel on the simulated accelerator, in virtual time: step, stall, overlap and peak, beside the plan.

Slices are square linear layers. Device and link are slowed down so that a slice computes and is copied in the time that
a dense block of 12.25 d² parameters in bf16, d = 4096, takes on an H200. Python and the optimizer take no time.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.common import table
from benchmarks.simulated import H200_FLOPS, H200_LINK, UNTIMED, Measured, begin, last_of
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import Machine, OffloadedModel, device_peak_bytes, step_time
from smpkit.torch.offload.link import AcceleratorLink

_WIDTH, _NUM_BYTES = 64, 4
_BLOCK: Final = 12.25 * 4096**2
PRODUCT: Final = "aten::mm"
"""The kernel that computes."""


@dataclass(frozen=True)
class Cell:
    """A model, its batch and how fast the device and its link are."""

    num_slices: int
    num_rows: int
    """Rows of a microbatch."""
    num_microbatches: int
    forward_seconds: float
    """How long a slice takes for a microbatch."""
    load_seconds: float
    """How long the copy of a slice takes."""

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice's weights."""
        return _WIDTH**2 * _NUM_BYTES

    @property
    def border_bytes(self) -> int:
        """Bytes of what one slice hands to the next for a microbatch."""
        return self.num_rows * _WIDTH * _NUM_BYTES

    @property
    def machine(self) -> Machine:
        """As the plan takes it."""
        flops, rate = 2 * self.num_rows * _WIDTH**2 / self.forward_seconds, self.slice_bytes / self.load_seconds
        return Machine(flops, rate, rate, updated_parameters_per_second=UNTIMED)

    @property
    def model(self) -> OffloadedModel:
        """As the plan takes it."""
        num_tokens = self.num_rows * self.num_microbatches
        return OffloadedModel(
            self.num_slices * _WIDTH**2,
            self.num_slices,
            num_tokens,
            self.num_microbatches,
            width=_WIDTH,
            number_bytes=_NUM_BYTES,
        )

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step in which nothing waits: forward, recomputation, and a backward of two forwards."""
        return 4 * self.num_slices * self.num_microbatches * self.forward_seconds

    @property
    def planned_seconds(self) -> float:
        """Seconds of a step."""
        return step_time(self.model, self.machine).total_seconds

    def planned_peak_bytes(self) -> int:
        """The peak of the device, without what the caller holds."""
        return round(device_peak_bytes(self.model, self._in_slice_bytes()))

    def _in_slice_bytes(self) -> int:
        """Return what one microbatch needs in one slice: run one alone."""
        begin()
        layer = _layer().to("sim")
        run = last_of(2, lambda: _run(layer, torch.zeros(self.num_rows, _WIDTH, device="sim", requires_grad=True)))
        # Without the weight's gradient, which is planned apart, and the result and its gradient, which are borders.
        return run.peak_bytes - self.slice_bytes - 2 * self.border_bytes


def _layer() -> nn.Sequential:
    """Return a layer all of which is recomputed, because its last operator keeps its result."""
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh())


def _run(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = model(x)
    y.backward(torch.ones_like(y))


def measure(cell: Cell, *, offloads: bool = True, prefetch: bool = True) -> tuple[Measured, int]:
    """Run four steps; return the last one's figures, and the peak without the borders that the caller holds.

    Args:
        offloads: no: the whole model is on the device, and nothing is recomputed.
    """
    machine = cell.machine
    begin(machine.out_bytes_per_second, machine.flops_per_second)
    torch.accelerator.synchronize()
    gc.collect()
    torch.manual_seed(0)
    before = torch.accelerator.memory_allocated()
    layers: Any = nn.Sequential(*[_layer() for _ in range(cell.num_slices)])
    if offloads:
        slices, microbatches = cell.num_slices, cell.num_microbatches
        with mock.patch.object(AcceleratorLink, "min_bytes", 1):  # borders are small here, and leave all the same
            model = OffloadModel(
                layers,
                "sim",
                num_slices=slices,
                checkpoint_activation=True,
                num_microbatches=microbatches,
                prefetch=prefetch,
            )
        optimizer: Any = OffloadOptimizer(model)
    else:
        model = layers.to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(cell.num_rows * cell.num_microbatches, _WIDTH, device="sim", requires_grad=True)

    def step() -> None:
        _run(model, x)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        if offloads:
            model.synchronize()

    figures = last_of(4, step)
    callers = 3 * cell.num_microbatches * cell.border_bytes  # the model's input and output, and the output's gradient
    return figures, figures.bytes_before + figures.peak_bytes - before - callers


# --- the table --------------------------------------------------------------------------------------------------------

CONTESTANTS: Final[dict[str, dict[str, bool]]] = {
    "plain, all on the device, nothing recomputed": {"offloads": False},
    "smpkit fast": {},
    "smpkit fast, prefetch=False": {"prefetch": False},
}


def steps(_options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per number of tokens and contestant."""
    rows = []
    for (tokens, num_rows), (name, how) in product(
        {32 << 10: 42, 8 << 10: 10, 2 << 10: 2}.items(), CONTESTANTS.items()
    ):
        cell = Cell(8, num_rows, 1, 2 * _BLOCK * tokens / H200_FLOPS, 2 * _BLOCK / H200_LINK)
        figures, peak_bytes = measure(cell, **how)
        overlap = figures.overlap(PRODUCT)
        planned_stall, planned_peak = "-", "-"
        if not how:
            planned_stall = f"{1e3 * (cell.planned_seconds - cell.compute_seconds):.1f} ms"
            planned_peak = f"{cell.planned_peak_bytes() / cell.slice_bytes:.2f}"
        cells = [
            f"{1e3 * figures.seconds:.1f} ms",
            f"{max(0.0, 1e3 * (figures.seconds - figures.seconds_of(PRODUCT))):.1f} ms",
            planned_stall,
            "-" if overlap is None else f"{100 * overlap:.0f} %",
            f"{peak_bytes / cell.slice_bytes:.2f}",
            planned_peak,
        ]
        rows.append([tokens, name, *cells])
    heads = ["tokens", "", "step", "stall", "planned", "copies hidden", "device peak", "planned"]
    return f"Eight slices, one microbatch; peaks in units of a slice's weights.\n\n{table(heads, rows)}", rows
