"""Replacing marked modules, on two real ranks; several cases a launch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.delayed import initialize, is_delayed
from smpkit.torch.placement.shards import TpShard, mark, shard_of, take_shard
from smpkit.torch.tensor_parallel import replace
from smpkit.torch.tensor_parallel.embedding import DistributedEmbedding
from smpkit.torch.tensor_parallel.linear import DistributedLinear
from smpkit.torch.tensor_parallel.registry import ReplacementRule, register
from smpkit.torch.tensor_parallel.state_dict import join_state
from tests.models_of_others import DIVISIBLE
from tests.ranks import run_ranks
from tests.torch.steps import announced, on_ranks


def start(**config: Any) -> None:
    smp.shutdown()
    smp.init({"tensor_parallel_degree": 2, "ddp": True, **config})


def marked(module: nn.Module, **config: Any) -> nn.Module:
    smp.set_tensor_parallelism(module, **config)
    return module


def distribute(module: nn.Module) -> Any:
    return replace.distribute(module)


def whole(root: nn.Module) -> dict[str, Tensor]:
    return join_state(root, root.state_dict())


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# --- what is replaced -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.free = nn.Linear(4, 4)


class Reads(nn.Module):
    """As DeBERTa's encoder does, hand on a table; as T5, look at a weight's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4), Tied()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.out.weight, Tensor):
            x = x.to(self.out.weight.dtype)
        return self.out(x + self.rows()) + self.inner.free.weight.sum()

    def rows(self) -> Tensor:
        return self.table.weight[0]


def kinds(module: nn.Module) -> list[type[nn.Module]]:
    """Return what the layers of a model are once it is distributed."""
    return [type(each) for each in distribute(module).modules() if not [*each.children()]]


class Special(nn.Linear):
    pass


def replace_in_models() -> None:
    whole, divided, table = nn.Linear, DistributedLinear, nn.Embedding
    assert kinds(marked(Reads())) == [table, divided, table, whole, whole]
    assert kinds(marked(Tied())) == [table, whole, divided]
    assert kinds(marked(nn.Sequential(whole(3, 4), whole(4, 3)))) == [whole, divided]
    part = marked(nn.Sequential(whole(4, 4), whole(4, 4), whole(4, 4)))
    smp.set_tensor_parallelism(part.get_submodule("1"), enabled=False)
    assert kinds(part) == [divided, whole, divided]
    # Hooks were lost with the modules, and normed weights could not be translated.
    assert kinds(marked(nn.Sequential(whole(4, 4), nn.utils.spectral_norm(whole(4, 4))))) == [divided, whole]
    hooked: Any = nn.Sequential(*[whole(4, 4) for _ in range(3)])
    hooked[0].register_forward_hook(lambda _module, _args, out: 2 * out)
    hooked[1].weight.register_hook(lambda gradient: 2 * gradient)
    assert kinds(marked(hooked)) == [whole, whole, divided]
    assert kinds(marked(table(6, 4))) == [DistributedEmbedding]
    one = whole(4, 4)
    assert kinds(marked(nn.ModuleDict({"first": one, "again": one}))) == [divided], "both are the same one"
    assert kinds(marked(nn.Sequential(Special(4, 4)))) == [Special]
    distribute(nn.Sequential(whole(4, 4)))
    distribute(marked(nn.Sequential(whole(4, 4)), no_such_argument=1))


@on_ranks(2)
def test_the_outermost_supported_modules_that_stand_alone_are_replaced() -> None:
    start()
    with announced() as lines:
        replace_in_models()
    text = "\n".join(lines)
    if smp.rank():
        assert text == "", "one rank speaks for all"
        return
    assert "Tensor parallelism over 2 ranks: 1 Linear -> DistributedLinear." in text
    assert "not distributed: Embedding `embedding`: it shares the weight `embedding.weight` with another module" in text
    assert "not distributed: Embedding `table`: Reads reads its weight by itself" in text
    assert "not distributed: Linear `0`: in_features 3 is not divisible by tensor_parallel_degree 2" in text
    assert "not distributed: Linear `0`: a hook was registered on it" in text
    assert "not distributed: Linear `1`: a hook was registered on its `weight`" in text
    assert "nothing is distributed: create the model under smp.tensor_parallelism()" in text
    assert "no distributed module has an argument `no_such_argument`: it has no effect" in text


class Listed(nn.Module):
    """Goes through a list beside its children, as the heads of MaskFormer, Mask2Former and OneFormer do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
        for number, layer in enumerate(self.layers):
            self.add_module(str(number), layer)


@on_ranks(2)
def test_lists_of_children_have_what_replaced_them() -> None:
    start()
    model = distribute(marked(Listed()))
    assert model.layers == [*model.children()]
    assert [type(each) for each in model.layers] == [DistributedLinear, nn.ReLU, DistributedLinear]


# --- copies -----------------------------------------------------------------------------------------------------------


def marks(module: nn.Module) -> dict[str, TpShard | None]:
    return {name: shard_of(each) for name, each in [*module.named_parameters(), *module.named_buffers()]}


@on_ranks(2)
def test_copies_are_marked_and_nothing_is_assigned() -> None:
    start(optimize="memory", prescaled_batch=True)
    torch.manual_seed(3)
    layer = smp.nn.DistributedTransformer(1, 2, 4, 8, 16).double()
    written = marks(layer)
    assert sum(each is not None and each.is_distributed for each in written.values()) >= 4
    assert sum(each is not None and not each.is_distributed for each in written.values()) >= 2
    stack = nn.ModuleList(copy.deepcopy(layer) for _ in range(2)).float().double()
    for each in stack:
        assert marks(each) == written
        assert_equal(whole(each), {name: value.float().double() for name, value in whole(layer).items()})
    assert all(mine is not theirs for mine, theirs in zip(stack[0].parameters(), layer.parameters(), strict=True))

    model = smp.DistributedModel(marked(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
    inner: Any = model.module
    kept = copy.deepcopy(inner)
    assert marks(kept) == marks(inner)
    for part in (model, inner, inner[0], kept, kept[0], stack, layer):
        with pytest.raises(UnsupportedError, match="assign=True"):
            part.load_state_dict(part.state_dict(), assign=True)


# --- weights ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_replaced_modules_keep_weights_dtype_mode_and_what_is_frozen() -> None:
    start()
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Embedding(6, 4, padding_idx=1), nn.Linear(4, 6), nn.LayerNorm(6)).double()
    model[1].weight.requires_grad = False
    model.eval()
    before = copy.deepcopy(model.state_dict())
    drawn = torch.random.get_rng_state()
    model = distribute(marked(model))
    assert torch.equal(torch.random.get_rng_state(), drawn), "no random number was drawn"
    assert model[1].weight.shape == (6, 2)
    assert model[1].weight.dtype == torch.float64
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True]
    assert not model[1].training
    assert_equal(whole(model), before)


@on_ranks(2)
def test_ranks_that_made_other_weights_take_those_of_the_first() -> None:
    start()
    torch.manual_seed(smp.rank())
    model = nn.Sequential(nn.Linear(4, 6))
    mine, other = smp.allgather(model.get_parameter("0.weight").detach().clone(), smp.WORLD)
    assert not torch.equal(mine, other)
    assert torch.equal(whole(distribute(marked(model)))["0.weight"], mine)


def build_delayed() -> nn.Sequential:
    torch.manual_seed(11)
    with smp.delay_param_initialization():
        return nn.Sequential(nn.Embedding(6, 4, padding_idx=1), nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)))


def delay(degree: int) -> dict[str, Tensor]:
    start(tensor_parallel_degree=degree)
    model = replace.distribute(marked(build_delayed()), at_degree_1=True)
    assert all(is_delayed(parameter) for parameter in model.parameters())
    initialize(model, [*model.parameters()], torch.device("cpu"), 11)
    if degree == 2:
        linear: Any = model.get_submodule("1.0")
        assert linear.weight.untyped_storage().nbytes() == 4 * 6 * 2, "a piece, not a view of the whole"
    return whole(model)


def test_delayed_weights_are_those_of_the_distributed_class_at_every_degree() -> None:
    [alone] = run_ranks(delay, 1, 1)
    assert alone["0.weight"].std() < 0.1  # N(0, 0.02), where torch's own embedding has N(0, 1)
    for ours in run_ranks(delay, 2, 2):
        assert_equal(ours, alone)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.layers(self.embedding(ids), src_key_padding_mask=ids == 0)
        return output[ids != 0]  # torch's fast path returns zeros for padding


@on_ranks(2)
@torch.no_grad()
def test_an_encoder_of_torch_is_evaluated_without_kernels_that_read_whole_weights() -> None:
    torch.manual_seed(0)
    start(prescaled_batch=True)
    module, ids = Encoder().double().eval(), torch.tensor([[1, 2, 3], [4, 0, 0]])
    expected = module(ids)
    torch.testing.assert_close(smp.DistributedModel(marked(module))(ids), expected)


# --- registered classes -----------------------------------------------------------------------------------------------


class Halved(nn.Module):
    """A scale per feature, divided over the ranks and never put together: enough to see what becomes of it."""

    def __init__(self, width: int, power: int = 1) -> None:
        super().__init__()
        self.width, self.power = width, power
        self.scale = nn.Parameter(torch.empty(width // smp.tp_size()))
        mark(self.scale, TpShard((width,), 0, (), smp.tp_rank(), smp.tp_size(), CommGroup.RDP_GROUP, 1.0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)

    def forward(self, parts: tuple[Tensor]) -> tuple[Tensor]:
        return (
            take_shard(parts[0], TpShard(parts[0].shape, -1, (), smp.tp_rank(), 2, CommGroup.RDP_GROUP, 1.0))
            * self.scale,
        )


class Scale(nn.Module):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor, *, offset: float = 0.0) -> Tensor:
        return (x + offset) * self.factors


def from_shape(shape: list[int]) -> tuple[Iterable[Any], Mapping[str, Any]]:
    return shape, {}


def as_tuple(x: Tensor, *, offset: float = 0.0) -> tuple[Iterable[Any], Mapping[str, Any]]:
    return ((x + offset,),), {}


@on_ranks(2)
def test_a_registered_class_is_called_as_ever_and_translated() -> None:
    start()
    smp.tp_register(
        Halved,
        from_shape,
        as_tuple,
        lambda result: result[0],
        to_distributed=lambda state, module: [("scale", lambda: state["factors"])],
    )(Scale)
    torch.manual_seed(5)
    plain = Scale([4])
    model = nn.Sequential(copy.deepcopy(plain))
    seen: list[Any] = []
    distributed = distribute(marked(model, power=3))
    assert isinstance(distributed[0], Halved)
    assert distributed[0].power == 3
    entry: Any = replace.applied_rule_of(distributed[0])
    assert entry.original is Scale
    distributed[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    x = torch.rand(3, 4)
    for module in (distributed[0], copy.deepcopy(distributed)[0]):
        ours = module(x, offset=1.0)
        assert torch.equal(ours, plain(x, offset=1.0)[:, 2 * smp.tp_rank() : 2 * smp.tp_rank() + 2])
    assert torch.equal(seen[0][0], x), "hooks see the call as users make it"


@on_ranks(2)
def test_without_a_translation_weights_are_made_afresh_in_the_same_way_at_every_degree() -> None:
    start()
    smp.tp_register_with_module(Scale, Halved, from_shape, as_tuple)
    with smp.tensor_parallelism():
        model = nn.Sequential(Scale([4]))
    said: list[str] = []
    with mock.patch.object(replace, "announce", said.extend):
        distributed = distribute(model)
    first, second = smp.allgather(whole(distributed)["0.scale"], smp.WORLD)
    assert smp.rank() > 0 or any("fresh weights for 1 Scale: weights that they have, loaded" in each for each in said)
    assert torch.equal(first, second)
    assert first.unique().numel() == 4, "a whole was drawn and taken apart, not one piece twice"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_other_models_and_wrong_translations_are_named() -> None:
    start()
    lines = r"`parameter 0.weight \[4, 4\] torch.float32` against `parameter 0.weight \[6, 4\]"
    with pytest.raises(UsageError, match=lines):
        distribute(marked(nn.Sequential(nn.Linear(4, 4 + 2 * smp.rank()))))
    with pytest.raises(UsageError, match="the model differs between ranks 0 and 1 of a tensor-parallel group"):
        distribute(marked(nn.Sequential(nn.Linear(4, 4)), enabled=smp.rank() == 0))
    for made, said in (
        (("scale", torch.zeros(3)), r"a translation made `scale` of Halved \[3\], not \[4\]"),
        (("other", torch.zeros(4)), "a translation made `other`, which Halved does not have"),
    ):
        entry = ReplacementRule(
            Scale, Halved, arguments=lambda _: ((4,), {}), to_distributed=lambda *_, made=made: [made]
        )
        register(entry)
        with pytest.raises(UsageError, match=said):
            distribute(marked(nn.Sequential(Scale([4]))))
    with pytest.raises(UsageError, match=r"before smp\.DistributedModel"):
        smp.set_tensor_parallelism(smp.DistributedModel(nn.Linear(4, 4)).module)


# --- what was set before wrapping -------------------------------------------------------------------------------------


class OwnOptimizer:
    """A script's own optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": [*parameters]}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@on_ranks(2)
def test_an_optimizer_of_before_wrapping_is_refused_where_its_parameters_were_replaced() -> None:
    hint = r"hint: make the optimizer of `model.parameters\(\)` after smp.DistributedModel$"
    replaced = r"was made before smp\.DistributedModel, which has replaced `0\.weight` and 1 other parameters of its"
    divided = "has states of parameters that smp.DistributedModel has divided"
    for kind, build, message in (
        (torch.optim.SGD, lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), f"SGD {replaced}"),
        (OwnOptimizer, lambda: nn.Sequential(nn.Linear(4, 4)), f"OwnOptimizer {replaced}"),
        (torch.optim.Adagrad, DIVISIBLE["Llama"].build, f"Adagrad {divided}"),
    ):
        for is_wrapped_first in (False, True):
            start()
            module = marked(build())
            calls = [(smp.DistributedOptimizer, kind(module.parameters())), (smp.DistributedModel, module)]
            (first, before), (second, after) = calls if is_wrapped_first else reversed(calls)
            first(before)
            with pytest.raises(UsageError, match=f"(?s){message}.*{hint}"):
                second(after)
    start()
    module = marked(DIVISIBLE["Llama"].build())
    inside = torch.optim.AdamW(module.parameters())
    model = smp.DistributedModel(module)
    smp.DistributedOptimizer(inside)
    assert [*map(id, inside.param_groups[0]["params"])] == [*map(id, model.parameters())]


@on_ranks(2)
def test_modules_that_are_checkpointed_or_hooked_before_wrapping_are_not_replaced() -> None:
    start()
    register(ReplacementRule(Flagged, DistributedLinear, arguments=lambda _: ((4, 4), {})))
    checkpointed: Any = DIVISIBLE["GPT2"].build()
    smp.set_activation_checkpointing(checkpointed.transformer.h[0].mlp)
    hooked: Any = DIVISIBLE["Llama"].build()
    hooked.model.embed_tokens.weight.register_hook(lambda gradient: 2 * gradient)
    for module, message in (
        (checkpointed, r"`transformer\.h\.0\.mlp` is checkpointed, and tensor parallelism replaces it"),
        (nn.Sequential(Flagged()), "`0` is checkpointed, and tensor parallelism replaces it"),
        (hooked, r"a hook was registered on `model\.embed_tokens\.weight`, which tensor"),
    ):
        start()
        with pytest.raises(UsageError, match=message):
            smp.DistributedModel(marked(module))


class Flagged(nn.Module):
    """A block of a Hugging Face model after `gradient_checkpointing_enable()`."""

    gradient_checkpointing = True


@on_ranks(2)
def test_states_of_other_shapes_are_refused_where_weights_are_divided() -> None:
    start(fp16=True)
    with smp.tensor_parallelism():
        module = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(module.parameters())
    states = {**optimizer.state_dict(), "state": {0: {"step": torch.ones(()), "exp_avg": torch.zeros(4, 6)}}}
    model = smp.DistributedModel(module)
    message = (
        r"`exp_avg` of parameter 0 in the optimizer state has the shape \[4, 6\], but the weight has \[6, 4\],"
        r" and this tensor-parallel rank's part \[6, 2\]"
    )
    hint = "go on from a partial checkpoint of smp.save_checkpoint, which resumes at any degrees"
    with pytest.raises(UsageError, match=rf"{message}\nhint: {hint}$"):
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())).load_state_dict(states)
