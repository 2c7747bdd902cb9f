"""What models and steps do besides calling layers works over pipelines as in one process."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.models import WIDTH, Case, Loop, Stack, block, mse_step, vectors
from tests.models_of_others import EAGER, GROUPED, causal
from tests.torch.steps import in_a_row, on_ranks
from tests.train import Way, same
from tests.transparency.recorded import placed, record


def collecting_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    out = model(input_ids=ids, labels=labels, output_router_logits=True, output_hidden_states=True)
    loss = out.loss + 1e-2 * sum(hidden.pow(2).mean() for hidden in out.hidden_states)
    model.backward(loss)
    return loss, out.aux_loss, out.router_logits, out.hidden_states


class Reused(Loop):
    """Uses a layer's weight as a value, and another layer's for a head."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        weight = self.first.weight
        hidden = functional.linear(hidden, weight) + self.norm(weight).mean(0)
        # Laid out as the transposed weight, on the rank that has it, and sent to another.
        scaled = self.norm(weight.T * hidden.mean())
        return self.norm(hidden @ weight[1:].T @ scaled[:-1])


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


def swish(x: Tensor) -> Tensor:
    return SwishFunction.apply(x)


class Swish(nn.Module):
    """As in EfficientNets: without weights, and with a custom Function."""

    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


class Surrogate(nn.Module):
    """As in spiking networks: the Function is hidden in an attribute."""

    def __init__(self, more: float) -> None:
        super().__init__()
        self.spike = lambda x: SwishFunction.apply(x) + more

    def forward(self, x: Tensor) -> Tensor:
        return self.spike(x)


def swishing() -> nn.Module:
    return nn.Sequential(block(), Swish(), block(), Surrogate(0.5), block(), Swish())


class Remembering(Stack):
    """Registers a hook at its first call, and keeps a list."""

    def __init__(self) -> None:
        super().__init__(2)
        self.seen: list[int] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.layers[0].register_forward_hook(lambda _module, _args, out: 2 * out)
            self.hooked = True
        self.seen.append(len(self.seen))
        return super().forward(x) + WIDTH * len(self.seen)


class Tabled(Stack):
    """Keeps what a function has computed, as BEiT, DINOv3 and RT-DETR of transformers do with tables of positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + positions(len(x)))


@functools.lru_cache
def positions(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64, device="cpu")[:, None] / size


def scripted() -> nn.Module:
    return nn.Sequential(block(), torch.jit.script(block()), block())


class Extended(nn.Linear):
    """Returns more than the next layer needs."""

    def __init__(self, more: Callable[[Tensor], object]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.more = more

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, self.more(x)


class Extending(nn.Module):
    """Keeps what its first layer returns beside the input of its second."""

    def __init__(self, more: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Extended(more), block()])
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x, self.kept = self.layers[0](x)
        return self.layers[1](x)


class Kept:
    """As a cache of keys and values: smpkit does not look into it."""

    def __init__(self, x: Tensor) -> None:
        self.values = [x]


def as_distribution(x: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1)


def likelihood_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out, distribution = model.module.layers[0](x)
    loss: Tensor = (model.module.layers[1](distribution.mean) - out).square().mean() - distribution.log_prob(y).mean()
    model.backward(loss)
    return loss


class Filling(Stack):
    """Fills buffers of its own, as graph networks, mixtures of experts and decoders do."""

    def forward(self, x: Tensor) -> Tensor:
        gathered = torch.zeros(2 * len(x), WIDTH, dtype=x.dtype)
        filled = x.new_empty(len(self.layers), *x.shape)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            gathered.index_add_(0, torch.arange(len(x)) * 2, x)
            filled[number] = x
        gathered = torch.zeros_like(gathered).scatter_add_(0, torch.zeros_like(gathered, dtype=torch.int64), gathered)
        return x + gathered[0] + filled.mean(0)


class Decoding(Stack):
    """Goes round its layers, and fills one output from step to step, as decoders with attention do."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.zeros(len(x), 3, WIDTH, dtype=x.dtype)
        for step in range(3):
            x = super().forward(x)
            outputs[:, step] = x
        return outputs.mean(1)


class Querying(Stack):
    """Repeats a table of queries for each sample, as the DETRs of transformers and MaskFormers do."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
        hidden = torch.zeros_like(queries)
        for layer in self.layers:
            hidden = layer(hidden + queries + x[:, None])
        return hidden.mean(1)


class Matching(Stack):
    """Looks at an earlier value without gradients, as MaskFormer's loss does to match masks with labels."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        with torch.no_grad():
            row = x[0]
            nearest = torch.cdist(first, x).argmin(1) + (first[0] * row).argmax() * 0
        return x * first[nearest] * row


def summing_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sum losses up in a tensor, as losses of several parts and auxiliary losses are."""
    loss = torch.tensor(0.0, dtype=x.dtype)
    for weight in (1.0, 0.5):
        loss += weight * functional.mse_loss(model(weight * x), y)
    model.backward(loss)
    return loss


PLACED, EVENLY = Way(pipeline=2, microbatches=2, placement=13), Way(pipeline=2, placement=-1)
TRACED = replace(PLACED, placement=None, traced=True)
VIRTUAL = replace(EVENLY, placement=None, config={"virtual_pipeline_degree": 2})
SPLIT = Way(pipeline=4, placement=5, config={"pipeline": "zero_bubble"})
ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Way]] = {
    # Parameters were NaN on the ranks that do not hold them.
    "weights as values": (Reused, mse_step, PLACED),
    "a weight that is repeated for each sample": (Querying, mse_step, EVENLY),
    "a weight that is repeated, randomly placed": (Querying, mse_step, SPLIT),
    "custom Functions in modules without weights": (swishing, mse_step, PLACED),
    "tracing leaves no hooks and nothing in lists": (Remembering, mse_step, TRACED),
    # The trial of the step is done with tensors without data, which the function gave in training, too.
    "tracing leaves nothing in the caches of functions": (Tabled, mse_step, TRACED),
    "an object of which nobody asks for anything": (functools.partial(Extending, Kept), mse_step, EVENLY),
    "a distribution that a layer returns": (functools.partial(Extending, as_distribution), likelihood_step, EVENLY),
    "fresh tensors that values of layers fill": (Filling, mse_step, EVENLY),
    "fresh tensors, randomly placed": (Filling, mse_step, SPLIT),
    "a fresh tensor that is filled in a loop over time": (Decoding, mse_step, EVENLY),
    "values and views without gradients, from several ranks": (Matching, mse_step, EVENLY),
    "views without gradients of a value from an earlier visit": (Matching, mse_step, VIRTUAL),
    "a sum of losses that begins with a number": (Stack, summing_step, EVENLY),
    "a scripted layer": (scripted, mse_step, Way(pipeline=2, microbatches=2)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("row", ROWS)
def test_it_trains_as_in_one_process(row: str) -> None:
    build, step, way = ROWS[row]
    same(Case(build, vectors, step), way)


def test_outputs_that_hugging_face_collects_by_hooks_are_those_of_one_process() -> None:
    # Each rank had what its own layers had collected: the loss of the routers missed all others'.
    same(replace(causal("Mixtral", GROUPED, num_local_experts=4, **EAGER), step=collecting_step), PLACED)


def test_a_fresh_tensor_that_values_of_layers_fill_is_planned_without_data() -> None:
    case = Case(Filling, vectors, mse_step)
    graph = record(case, placed([f"layers.{rank}" for rank in range(4)], range(4)))
    # The first rank fills both tensors, so each of the others sends it what it has made, once.
    assert [value.source.rank for value in graph.values if value.target.rank == 0] == [1, 2, 3]


# --- how often what is called, and where ------------------------------------------------------------------------------


class Counted(nn.Linear):
    """Counts its calls, the backwards through it, and the hooks on its input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.calls.append("input"))
        out = super().forward(x)
        out.register_hook(lambda _: self.calls.append("output"))
        return out.tanh()


def begin(*layers: nn.Module, **options: Any) -> Any:
    return in_a_row(*layers, **{"microbatches": 2, "skip_tracing": True, **options})


@on_ranks(3)
def test_units_and_hooks_run_once_for_each_microbatch_from_the_first_step_on() -> None:
    layers = [Counted() for _ in range(3)]
    model = begin(*layers, microbatches=4)
    for _ in range(4):
        smp.step(mse_step)(model, torch.ones(8, WIDTH), torch.ones(8, WIDTH))
        calls = layers[smp.pp_rank()].calls
        assert (calls.count("forward"), calls.count("output")) == (4, 4)
        assert calls.count("input") == (4 if smp.pp_rank() else 0)  # the model's own needs no gradient
        calls.clear()
    assert not any(layer.calls for layer in layers)


class Fetching(Stack):
    """Keeps what backward needs under hooks, around layers of several ranks, and counts how often each is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []

    def fetch(self, kept: tuple[int, Tensor]) -> Tensor:
        self.fetched[kept[0]] += 1
        return kept[1]

    def keep(self, tensor: Tensor) -> tuple[int, Tensor]:
        self.fetched.append(0)
        return len(self.fetched) - 1, tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.keep, self.fetch):
            for index in (0, 2, 1, 3, 0, 2):
                x = x + self.layers[index](x)
        return x


@on_ranks(2)
def test_a_split_backward_fetches_once_what_hooks_around_several_ranks_keep() -> None:
    # Segments that began inside the hooks were walked through twice.
    module = Fetching()
    model = begin(*module.layers, around=module, microbatches=3, pipeline="zero_bubble")
    smp.step(mse_step)(model, torch.ones(6, WIDTH), torch.ones(6, WIDTH))
    assert max(module.fetched) == 1


class Centring(nn.Module):
    """Keeps a running mean, and nothing else."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x - self.mean


class Centred(Centring):
    """Keeps a running mean beside the layer in it, as the module around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear(x))


CENTRED: dict[str, Callable[[], nn.Module]] = {
    "around a unit": Centred,
    "beside a unit": lambda: nn.Sequential(OrderedDict(linear=nn.Linear(WIDTH, WIDTH), centring=Centring())),
}


@pytest.mark.parametrize("name", CENTRED)
@on_ranks(2)
def test_buffers_in_a_module_of_one_rank_are_those_of_the_rank_that_changes_them(name: str) -> None:
    # A state dict had them as the last rank had them: as they were at first.
    model = begin(CENTRED[name](), block())
    smp.step(mse_step)(model, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    whole = model.state_dict()
    [mean] = [each for key, each in whole.items() if key.endswith("mean")]
    assert mean.abs().sum() > 0
    num_own = 1 - smp.pp_rank()
    assert sum(key.endswith("mean") for key in model.local_state_dict()) == num_own
    assert len(list(model.local_named_buffers())) == num_own
    model.load_state_dict({key: torch.full_like(each, 2.0) for key, each in whole.items()})
    assert all(bool((each == 2).all()) for each in model.buffers() if each.device.type != "meta")
    smp.barrier()


@on_ranks(2)
def test_a_synchronised_norm_waits_for_replicas_and_not_for_other_stages() -> None:
    # Torch's default is all ranks of the job; on a CPU its forward is refused by torch.
    norm = nn.SyncBatchNorm(WIDTH)
    begin(nn.Linear(WIDTH, WIDTH), norm)
    assert norm.process_group is smp.get_dp_process_group()
