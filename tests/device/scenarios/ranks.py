"""Pipelines, tensor and data parallelism over ranks, each of which has a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from smpkit.testing import simulated_device
from smpkit.torch.offload import link
from tests.device.models import on
from tests.device.scenarios.common import DEVICE, add, assert_same, present_order
from tests.models import Case, Dropping
from tests.torch.pipeline import test_gpu_link_order
from tests.train import KINDS, Way, batch, checkpoint_layers, divide_layers, training

Kind = tuple[Case, Way]


def trained(kind: Kind, *, steps: int = 3) -> list[Tensor]:
    """Return the losses of a small training, and its last weights."""
    case, way = kind
    found = []
    # Torch refuses to move a parameter to the device of a plug-in by `.data`, as a pipeline does: move them before.
    with training(on("cpu" if way.tensor > 1 else DEVICE, case), way) as of_kind:
        for number in range(steps):
            torch.manual_seed(number)
            found.append(of_kind.step(*batch(case, number, 8)).reduce_mean().detach().cpu())
        found += [each.detach().cpu() for _, each in sorted(of_kind.parameters())]
    return found


def trained_from_the_device(kind: Kind) -> list[Tensor]:
    """Return the losses of a small training whose batches are results of the device, and on a stream of the user's."""
    case, way = kind
    found = []
    stream = torch.Stream(DEVICE)
    with training(on(DEVICE, case), way) as of_kind:
        stream.wait_stream(torch.accelerator.current_stream(DEVICE))  # on which the model was copied to the device
        with stream:
            for number in range(3):
                torch.manual_seed(number)
                x, y = (each.to(DEVICE) for each in batch(case, number, 8))
                for _ in range(3):
                    x = x * 1.5
                found.append(of_kind.step(x, y).reduce_mean().detach())
            found = [each.cpu() for each in found]
            found += [each.detach().cpu() for _, each in sorted(of_kind.parameters())]
    return found


def with_config(kind: Kind, **config: Any) -> Kind:
    case, way = kind
    return case, replace(way, config={**way.config, **config})


def trained_offloaded(kind: Kind, horizon: int | str, steps: int = 3) -> list[Tensor]:
    """Return what a small training over a pipeline gives whose activations leave the device."""
    case, way = with_config(kind, offload_activations=True, activation_loading_horizon=horizon)
    with mock.patch.object(link.AcceleratorLink, "min_bytes", 0):
        prepare = divide_and_checkpoint if way.tensor > 1 else checkpoint_layers
        return trained((case, replace(way, prepare=prepare)), steps=steps)


def divide_and_checkpoint(module: Any) -> None:
    divide_layers(module)
    checkpoint_layers(module)


def over_a_model_of_nccl() -> None:
    """Send messages over connections of which any may start first, which the simulated device does not do."""
    for seed in range(3):
        test_gpu_link_order.play(seed)


def same_as_in_order(run: Callable[[], list[Tensor]]) -> None:
    """Compare a training with itself on a device where everything runs at once, so that nothing is late."""
    if run not in _in_order:
        simulated_device.set_policy("eager")
        _in_order[run] = run()
        simulated_device.set_policy(*present_order())
    assert_same(run(), _in_order[run])


_in_order: dict[Callable[[], list[Tensor]], list[Tensor]] = {}
"""What trainings give there, once for all orders in which this process runs them."""

_of_pipelines = KINDS["pipeline"]
_over_four = _of_pipelines[0], replace(_of_pipelines[1], pipeline=4)
_over_eight = replace(_of_pipelines[0], build=partial(Dropping, 8)), replace(_of_pipelines[1], pipeline=8)
_KINDS = {
    **KINDS,
    "pipeline, masters": with_config(_of_pipelines, fp16=True),
    "pipeline, zero bubble": with_config(_of_pipelines, pipeline="zero_bubble"),
    "pipeline over four": _over_four,
    "simple pipeline over four": with_config(_over_four, pipeline="simple"),
    "pipeline over eight": _over_eight,
}
_NOT_QUICK = ("data, one parameter unused", "pipeline over eight")
for _kind, _of_kind in _KINDS.items():
    if _of_kind[1].ranks > 1:
        _run = partial(same_as_in_order, partial(trained, _of_kind))
        add(f"ranks, {_kind}", _run, ranks=_of_kind[1].ranks, is_quick=_kind not in _NOT_QUICK)
for _kind in ("pipeline", "interleaved"):
    _trains = partial(trained_from_the_device, KINDS[_kind])
    add(f"ranks, {_kind}, batches of the device, on a stream", partial(same_as_in_order, _trains), ranks=2)
for _horizon in (2, "auto"):
    _trains = partial(trained_offloaded, _of_pipelines, _horizon)
    add(f"ranks, pipeline, offloaded, horizon {_horizon}", partial(same_as_in_order, _trains), ranks=2)
_everything = _of_pipelines[0], replace(_of_pipelines[1], replicas=2, tensor=2)
_trains = partial(trained_offloaded, _everything, 2, steps=1)
add("ranks, pipeline and tensor, offloaded", partial(same_as_in_order, _trains), ranks=4, is_quick=True)
add("ranks, pipeline, over a model of NCCL", over_a_model_of_nccl)
