"""What people put around a model that offloads: data-parallel wrappers, autocast, loss scales, torch.compile.

Checkpoints keep inputs, or what a policy of torch's names, too.
"""

from __future__ import annotations

import copy
import io
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

import smpkit
from smpkit.errors import UsageError
from smpkit.torch.core import offloader
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, assert_idle, assert_same, inputs, slow
from tests.torch.recompute.test_policies import MUST, SAVE, contexts
from tests.torch.steps import on_ranks

LAYERS, STEPS = 4, 3
PRODUCT = torch.ops.aten.addmm.default
Contexts = Callable[[], Any]
"""The `context_fn` of a checkpoint."""


class Layer(nn.Module):
    """Checkpoints itself, as those of Hugging Face do, unless others do that."""

    def __init__(self, contexts: Contexts | None = noop_context_fn) -> None:
        super().__init__()
        self.linear, self.contexts = nn.Linear(WIDTH, WIDTH), contexts

    def forward(self, x: Tensor) -> Any:
        if self.contexts is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False, context_fn=self.contexts)

    def run(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x)) + x


def model(contexts: Contexts | None = noop_context_fn) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(contexts) for _ in range(LAYERS)))


def fsdp2(contexts: Contexts, *, is_inside: bool = False) -> nn.Module:
    """Divide each layer; checkpoints are in what is divided, or around it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided: Any = model(None if is_inside else contexts)
    for name, layer in divided.named_children():
        fully_shard(layer, mesh=mesh)
        if is_inside:
            setattr(divided, name, checkpoint_wrapper(layer, context_fn=contexts))
    return fully_shard(divided, mesh=mesh)


OVER_RANKS: dict[str, Callable[[Contexts], nn.Module]] = {
    "DDP": lambda contexts: nn.parallel.DistributedDataParallel(model(contexts), gradient_as_bucket_view=True),
    "FSDP": lambda contexts: FullyShardedDataParallel(
        model(contexts), auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu")
    ),
    "FSDP2": fsdp2,
    "FSDP2 in checkpoints": partial(fsdp2, is_inside=True),
}


def train(model: nn.Module, rank: int = 0, *, scales: bool = False) -> list[Tensor]:
    """Return losses, this rank's part of all gradients and, at the end, of all weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        with torch.autocast("cpu", torch.bfloat16, enabled=scales):
            loss = model(x).square().sum()
        scaler.scale(loss).backward()
        values += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        scaler.step(optimizer)
        scaler.update()
    values += [each.detach().clone() for each in model.parameters()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def assert_trains_as_without(
    wrap: Callable[[Contexts], nn.Module], rank: int = 0, *, scales: bool = False, by_policy: bool = False
) -> None:
    saves, offloads = (contexts(each, PRODUCT) if by_policy else noop_context_fn for each in (SAVE, MUST))
    expected = train(wrap(saves), rank, scales=scales)
    assert len(expected) > STEPS
    for link in (None, slow()):
        wrapped = wrap(offloads)
        with smpkit.offload_activations(wrapped, lead=1, link=link, min_bytes=0) as offload:
            assert_same(train(wrapped, rank, scales=scales), expected)
            assert_idle(offload._engine)
            steps = offload.report().steps[:STEPS]
        least = BOUNDARY_BYTES // 2 if scales else BOUNDARY_BYTES
        # The input of each layer, what a policy names, and no weight.
        tensors = 2 * LAYERS if by_policy else LAYERS
        assert all(least * tensors <= step.bytes_out <= BOUNDARY_BYTES * tensors for step in steps)


@pytest.mark.parametrize(
    ("wrap", "by_policy"), [*((name, False) for name in OVER_RANKS), ("FSDP2", True), ("FSDP2 in checkpoints", True)]
)
@on_ranks(2)
def test_wrappers_over_ranks_train_as_without_and_no_weight_leaves(wrap: str, by_policy: bool) -> None:
    dist.init_process_group("gloo")
    assert_trains_as_without(OVER_RANKS[wrap], dist.get_rank(), by_policy=by_policy)
    dist.destroy_process_group()


@pytest.mark.parametrize("scales", [False, True])
def test_data_parallel_trains_as_without_also_with_autocast_and_a_loss_scale(scales: bool) -> None:
    assert_trains_as_without(lambda contexts: nn.DataParallel(model(contexts)), scales=scales)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it traces
def test_compiled_layers_train() -> None:
    expected = train(model())
    compiled = model()
    for layer in compiled.children():
        layer.run = torch.compile(layer.run, backend="aot_eager")  # type: ignore[assignment, arg-type]
    with smpkit.offload_activations(compiled, min_bytes=0) as offload:
        for ours, plain in zip(train(compiled), expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)  # other kernels, other rounding
        assert offload.report().bytes_out >= STEPS * LAYERS * BOUNDARY_BYTES


# --- the call itself --------------------------------------------------------------------------------------------------


def test_without_a_checkpointed_layer_it_says_so_once() -> None:
    """As in a job: bits stay the same, so nobody would notice."""
    plain = model(None)
    with warnings.catch_warnings(record=True) as caught, smpkit.offload_activations(plain):
        warnings.simplefilter("always")
        plain.eval()(torch.ones(BATCH, WIDTH))  # Hugging Face's models checkpoint in training only
        plain.train()
        for _ in range(2):
            plain(torch.ones(BATCH, WIDTH)).sum().backward()
    (warning,) = caught
    assert "offload_activations has no effect" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = model()
        with smpkit.offload_activations(layers):
            layers(torch.ones(BATCH, WIDTH)).sum().backward()


def test_a_model_that_is_trained_without_its_own_call_is_named_once() -> None:
    """Lightning calls the `training_step` of a module, which calls modules inside."""
    outer = nn.ModuleDict({"inner": model()})
    with smpkit.offload_activations(outer):
        with pytest.warns(UserWarning, match="its forward has not been called"):
            outer["inner"](inputs()).sum().backward()
        outer["inner"](inputs()).sum().backward()


def test_it_works_until_it_is_closed_and_only_inside_the_model() -> None:
    trained, x = model(), torch.randn(BATCH, WIDTH)
    offload = smpkit.offload_activations(trained)
    with pytest.raises(RuntimeError):
        trained(torch.randn(BATCH, 3))
    assert offloader.current() is offloader.KEEPING
    with torch.no_grad():
        trained(x)
    assert offload.report().num_steps == 1  # the one that failed
    trained(x).sum().backward()
    assert offload.report().num_steps == 2
    assert offload.report().bytes_out > 0
    offload.close()
    trained(x).sum().backward()
    assert offload.report().num_steps == 2
    assert not trained._forward_pre_hooks | trained._forward_hooks


def test_an_interrupted_forward_leaves_nothing_installed_for_long() -> None:
    """As in a notebook: torch calls no hook at the end of a forward that Ctrl-C ends."""
    trained, x = model(), torch.randn(BATCH, WIDTH)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with smpkit.offload_activations(trained) as offload:
        handle = trained[2].register_forward_pre_hook(interrupt)  # type: ignore[index]
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                trained(x)
        handle.remove()
        trained(x).sum().backward()
        assert offloader.current() is offloader.KEEPING
        assert offload.report().num_steps == 3
        trained[2].register_forward_pre_hook(interrupt)  # type: ignore[index]
        with pytest.raises(KeyboardInterrupt):
            trained(x)
    assert offloader.current() is offloader.KEEPING


def test_two_threads_train_a_model_each() -> None:
    """One begins its forward while the other's runs, and ends it later."""
    models = first, second = model(), model()
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: second(inputs()).sum().backward())

    def begin_second(*_: Any) -> None:
        thread.start()
        assert begun.wait(10)

    def wait(*_: Any) -> None:
        begun.set()
        assert go_on.wait(10)

    first[2].register_forward_pre_hook(begin_second)  # type: ignore[index]
    second[2].register_forward_pre_hook(wait)  # type: ignore[index]
    with smpkit.offload_activations(first) as one, smpkit.offload_activations(second) as other:
        first(inputs()).sum().backward()
        assert offloader.current() is offloader.KEEPING
        go_on.set()
        thread.join()
        assert offloader.current() is offloader.KEEPING
        assert one.report().bytes_out == other.report().bytes_out == LAYERS * BOUNDARY_BYTES
    assert_same(*([each.grad for each in trained.parameters()] for trained in models))


def test_a_model_in_a_checkpoint_leaves_nothing_installed() -> None:
    """Its forward in backward ends as soon as backward has what it needs, without a hook."""
    trained = model()
    with smpkit.offload_activations(trained) as offload:
        trained(inputs()).sum().backward()
        for _ in range(2):
            checkpoint(trained, inputs(), use_reentrant=False).sum().backward()
            assert offloader.current() is offloader.KEEPING
        assert offload.report().num_steps == 3


def test_copies_of_the_model_are_plain_models() -> None:
    """Those of torch's AveragedModel, and a model that is saved whole; an engine cannot be copied."""
    trained, x = model(), torch.randn(BATCH, WIDTH)
    offload, file = smpkit.offload_activations(trained, min_bytes=0), io.BytesIO()
    trained(x).sum().backward()
    torch.save(trained, file)
    file.seek(0)
    bytes_out = offload.report().bytes_out
    for copied in (copy.deepcopy(trained), torch.load(file, weights_only=False)):
        copied.zero_grad()
        copied(x).sum().backward()
        assert_same([each.grad for each in copied.parameters()], [each.grad for each in trained.parameters()])
    assert offload.report().bytes_out == bytes_out > 0


def test_copies_of_data_parallel_are_refused_by_name() -> None:
    """Those run in threads, one for each GPU; Hugging Face's Trainer makes them where it sees several."""
    trained = model()
    with smpkit.offload_activations(trained), pytest.raises(UsageError, match="DataParallel runs a model with offload"):
        trained._replicate_for_data_parallel()(torch.ones(BATCH, WIDTH))


BAD: list[tuple[nn.Module, dict[str, Any], str]] = [
    (nn.Linear(2, 2), {"lead": 0}, "`lead` is 0"),
    (nn.Linear(2, 2), {"min_bytes": -1}, "min_bytes is -1"),
    (nn.Linear(2, 2), {"host_budget_bytes": 0.5}, "host_budget_bytes is 0.5"),
    (nn.Linear(2, 2), {"deadline_seconds": math.nan}, "deadline_seconds is nan; it must be a number of"),
    (nn.Linear(2, 2), {"link": 25e9}, "link is 25000000000.0; it must be a link"),
    (nn.GELU(), {}, "the parameters of this GELU lie on no device"),
    (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]), {}, "lie on cpu, meta"),
]


@pytest.mark.parametrize(("model", "options", "message"), BAD)
def test_rejects_wrong_arguments(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        smpkit.offload_activations(model, **options)
