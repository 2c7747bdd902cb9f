"""What ranks do, each with a simulated device: tests of other folders, whose ranks `RANKS_ON_SIM` gives devices.

Each of them compares with plain PyTorch; here the ranks' work is asynchronous, and a race is an error. Kinds of
parallelism beside these: `tests.device.scenarios.ranks`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import smpkit.torch as smp
from smpkit.torch.offload.accelerator import AcceleratorLink
from tests.device.on_sim import ORDERS, naming, needs_sim, run_on_sim
from tests.ranks import RANKS_ON_SIM
from tests.simulated import Order, in_order
from tests.torch.checkpoints import test_background
from tests.torch.data_parallel import test_reducer
from tests.torch.pipeline import test_channels, test_transport
from tests.transparency import test_pipeline, test_sharded_state

_ROOT = Path(__file__).parents[2]
_TRANSPARENCY = "tests/transparency"
_BACKGROUND = "tests/torch/checkpoints/test_background.py::test_the_files_are_those_of_a_blocking_save"


@pytest.fixture
def ranks_on_sim(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let the ranks of a test have simulated devices, in the order that is its parameter."""
    needs_sim()
    monkeypatch.setenv(RANKS_ON_SIM, request.param)


def ordered(order: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks_on_sim", [order], indirect=True)


@ordered("lazy:0")
@pytest.mark.usefixtures("ranks_on_sim")
@pytest.mark.full
@pytest.mark.parametrize(("size", "degree"), [(2, 2), (4, 4), (4, 2)])
def test_pipelines_over_two_and_four_devices_train(size: int, degree: int) -> None:
    test_pipeline.test_training_equals_plain_pytorch(size, degree)


@pytest.mark.full
@ordered("lazy:0")
@pytest.mark.usefixtures("ranks_on_sim")
def test_sharded_states_over_a_pipeline_with_a_tied_weight_train() -> None:
    test_sharded_state.test_over_a_pipeline_with_a_tied_weight()


@pytest.mark.full
@ordered("lazy:0")
@pytest.mark.usefixtures("ranks_on_sim")
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_weights_with_masters_are_copied_while_they_are_trained_on(tmp_path: Path, half: str) -> None:
    settings = {"pipeline_parallel_degree": 2, half: True}
    test_background.test_the_files_are_those_of_a_blocking_save(tmp_path, settings)


MESSAGES = (
    test_transport.test_values_go_forward_and_gradients_back_under_tags_of_their_own,
    test_transport.test_a_value_may_have_no_gradient,
    test_transport.test_a_receive_lets_go_of_what_the_sender_has_taken_before,
    partial(test_transport.test_what_a_step_that_was_given_up_left_behind_does_not_meet_the_next_one, 1),
    partial(test_transport.test_what_a_step_that_was_given_up_left_behind_does_not_meet_the_next_one, 64),
    test_transport.test_a_rank_that_gave_up_sooner_still_takes_what_is_on_its_way,
    test_transport.test_objects_and_bytes_arrive,
    test_transport.test_a_value_that_never_comes_is_named,
    test_channels.test_values_are_taken_in_another_order_than_they_are_sent,
    test_channels.test_what_a_given_up_step_has_sent_is_not_taken_for_the_next_ones,
    test_channels.test_a_value_that_is_changed_in_place_on_its_way_is_noticed_or_a_copy_of_it_travels,
    partial(test_channels.test_microbatches_that_leave_the_record_leave_the_channels, 4),
    partial(test_channels.test_a_step_that_all_ranks_give_up_leaves_no_message_without_a_receiver, 2),
    partial(test_reducer.test_parameters_unused_on_some_ranks_or_all_end_as_in_one_process, overlap=True, view=False),
    partial(test_reducer.test_parameters_unused_on_some_ranks_or_all_end_as_in_one_process, overlap=False, view=True),
    test_reducer.test_several_backwards_in_a_step_are_all_reduced,
    test_reducer.test_more_backwards_than_the_step_before_made_stay_right,
    test_reducer.test_freezing_unfreezing_and_casting_after_wrapping_are_noticed,
    test_reducer.test_a_gradient_that_comes_after_its_reduction_started_is_an_error_not_a_wrong_result,
    test_reducer.test_a_communication_hook_replaces_the_reduction_and_averages_itself,
    test_reducer.test_an_exception_in_a_step_leaves_the_next_one_clean,
    test_reducer.test_gradients_as_views_live_in_the_buckets_also_when_zeroed_in_place,
    test_reducer.test_join_lets_ranks_end_at_different_steps_and_leaves_them_equal,
    test_reducer.test_accumulation_sends_nothing_until_its_last_step,
)
"""Messages one by one, through channels and the hosts; steps that leave their record or are given up; reductions. Other
tests of these files look at counts and refusals, or use what the device has not: sparse tensors, batch norm without a
gradient of its input."""


@ordered("copies:0")
@pytest.mark.usefixtures("ranks_on_sim")
@pytest.mark.parametrize("test", MESSAGES, ids=lambda test: getattr(test, "func", test).__name__.removeprefix("test_"))
def test_messages_and_reductions(test: Callable[[], None]) -> None:
    test()


# --- whole files ----------------------------------------------------------------------------------------------------

FULL = {
    "random:2": [f"{_TRANSPARENCY}/{each}.py" for each in ("test_pipeline_routing", "test_pipeline_schedules")],
    "copies:0": [f"{_TRANSPARENCY}/test_pipeline_failures.py", _BACKGROUND],
    "compute:0": [f"{_TRANSPARENCY}/test_sharded_state.py"],
    "random:1": [
        _BACKGROUND,
        f"{_TRANSPARENCY}/test_tensor_parallel.py::test_other_schedules_of_a_pipeline_equal_plain_pytorch",
    ],
}
"""With `full`. What is left out makes tensors on the CPU inside a model, which plain PyTorch refuses, too."""
ONLY_ON_THE_CPU = "not models_of_every_shape and not autocast"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", FULL)
def test_whole_files_train_without_races(order: str) -> None:
    needs_sim()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(
        [*command, *FULL[order], "-m", "not full", "-k", ONLY_ON_THE_CPU],
        cwd=_ROOT,
        env={**os.environ, RANKS_ON_SIM: order},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


# --- everything at once: the example on eight ranks -----------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much a training of gpt2_3d has to do."""

    layers: int
    steps: int
    microbatches: int


SMALL, LARGE = Sizes(layers=2, steps=2, microbatches=2), Sizes(layers=4, steps=3, microbatches=4)


def train_gpt2_3d(sizes: Sizes, *, offload: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, this rank's gradients, and how many bytes left its device; pipeline 2, tensor 2, data 2."""
    sys.path.insert(0, str(_ROOT / "examples/gpt2_3d"))
    memory, train = (importlib.import_module(name) for name in ("memory", "train"))
    AcceleratorLink.min_bytes = 0
    options = {"offload_activations": True, "activation_loading_horizon": 2} if offload else {}
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
    smp.init({**degrees, "microbatches": sizes.microbatches, "delayed_parameter_initialization": True, **options})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        gpt2 = GPT2LMHeadModel(train.configuration(argparse.Namespace(context=16, width=16, layers=sizes.layers)))
    model = smp.DistributedModel(gpt2)
    transformer: Any = model.get_module().transformer
    smp.set_activation_checkpointing(transformer.seq_layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(smp.dp_rank())
    losses = []
    for _ in range(sizes.steps):
        optimizer.zero_grad()
        tokens = torch.randint(256, (2 * sizes.microbatches, 16), generator=generator)
        losses.append(train.train_step(model, tokens).reduce_mean().item())
        optimizer.step()
    gradients = [each.grad.clone() for _, each in model.local_named_parameters() if each.grad is not None]
    offloaded = int(memory.Held.by_this_rank(model, optimizer).offloaded)
    smp.shutdown()
    return losses, gradients, offloaded


def train_in_orders(sizes: Sizes, orders: Sequence[Order]) -> int:
    """Train without offloading, then with it in each order; compare, and return how many bytes left this device."""
    offloaded = 0
    with in_order(ORDERS[0]):
        expected, theirs, _ = train_gpt2_3d(sizes, offload=False)
    for order in orders:
        with naming(f"offloading under {order}"), in_order(order):
            losses, gradients, offloaded = train_gpt2_3d(sizes, offload=True)
            assert losses == expected
            assert len(gradients) == len(theirs)
            assert all(map(torch.equal, gradients, theirs))
    return offloaded


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sizes", "orders"),
    [(SMALL, ORDERS[::3]), pytest.param(LARGE, ORDERS, marks=pytest.mark.full)],
    ids=["small", "large"],
)
def test_eight_ranks_of_all_kinds_offload_without_races(sizes: Sizes, orders: Sequence[Order]) -> None:
    assert min(run_on_sim(train_in_orders, sizes, orders, size=8, order=None, timeout=580)) > 0
