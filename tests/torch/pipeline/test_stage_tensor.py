"""Every kind of operation on a stage tensor: what the owner computes, what the others know of it, and the errors.

Both ranks are played in this process, one after the other: what the first tells and sends, the second finds.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import TensorSpec, spec_of, tensors_in
from smpkit.torch.pipeline.messages import Message
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.outputs import MISSING, describe_difference, infer_output, with_strides_of
from smpkit.torch.pipeline.random_streams import RandomStreams
from smpkit.torch.pipeline.split_backward import watching
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.stage_tensor import Current, StageTensor, current_microbatch, make_stage_tensor

OWNER, OTHER = 0, 1
METHODS: Any = Tensor
CPU = torch.device("cpu")
X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, True, True]])
WEIGHT = nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3))


def held(value: torch.Tensor) -> torch.Tensor:
    """Return the data of a value on its owner."""
    data = value.value if isinstance(value, StageTensor) else value
    assert data is not None
    return data


class Wire:
    """Stands for the transport of both ranks."""

    def __init__(self) -> None:
        self.told: deque[Any] = deque()
        self.sent: deque[Tensor] = deque()
        self.hosts = self

    def send_object(self, value: Any) -> None:
        self.told.append(value)

    def receive_object(self, _source: int, _what: str) -> Any:
        return self.told.popleft()

    def announce(self, _message: Message) -> None:
        pass

    def announced(self, message: Message) -> str:
        return message.transfer.spec.text

    def send(self, tensor: Tensor, _message: Message, *, copy: bool = False) -> None:
        self.sent.append(tensor.clone())

    def receive(self, _message: Message) -> Tensor:
        return self.sent.popleft()


@contextmanager
def running(rank: int, wire: Wire) -> Iterator[Microbatch]:
    """Run as one rank of two: the code inside belongs to a microbatch."""
    stage = StageContext(rank, 2, CPU, wire, RandomStreams(1, CPU), {})  # type: ignore[arg-type]
    microbatch = Microbatch(stage, 0)
    Current.microbatch = microbatch
    try:
        yield microbatch
    finally:
        Current.microbatch = None


def value_on(rank: int, plain: Tensor = X) -> StageTensor:
    """Return the value as `rank` has it: on OWNER with the data."""
    value = plain.clone().requires_grad_(plain.requires_grad) if rank == OWNER else None
    return make_stage_tensor(spec_of(plain), CPU, OWNER, value)


def on_both(code: Callable[[Any], Any], plain: Tensor = X, *, sends: bool = True) -> list[Any]:
    """Run the code on both ranks; return what it returned."""
    wire = Wire()
    found = []
    for rank in (OWNER, OTHER):
        with running(rank, wire):
            found.append(code(value_on(rank, plain)))
        assert sends or not (wire.told or wire.sent)
    assert not wire.told, "the other rank did not ask"
    return found


def added(x: Any) -> Any:
    x = x * 1
    x += 2.0
    return x


def assigned(x: Any) -> Any:
    x = x * 1
    x[0] = 7.0
    return x


def masked(x: Any) -> Any:
    x = x.clone()
    x.masked_fill_(MASK, 0.0).mul_(2)
    return x


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "add reversed": lambda x: 1 + x,
    "subtract from": lambda x: 1 - x,
    "divide by it": lambda x: 2 / x,
    "power": lambda x: x**2,
    "negate": lambda x: -x,
    "compare": lambda x: x > 0,
    "equal by element": lambda x: x == 3.0,
    "with a mask that all hold": lambda x: x * MASK,
    "a mask on the left": lambda x: MASK * x,
    "with itself": lambda x: x * x,
    "matrix product": lambda x: x @ x.T,
    "with a weight": lambda x: functional.linear(x, WEIGHT),
    "index": lambda x: x[0],
    "slices": lambda x: x[:, 1:],
    "a new axis": lambda x: x[None, ..., 0],
    "index by tensor": lambda x: x[torch.tensor([1, 1])],
    "index by mask": lambda x: x[MASK],
    "index by mask and slice": lambda x: x[:, MASK[0]],
    "masked select": lambda x: x.masked_select(MASK),
    "repeat interleave": lambda x: x.repeat_interleave(torch.tensor([2, 1]), 0),
    "view": lambda x: x.view(3, 2),
    "reshape by its shape": lambda x: x.reshape(x.shape[1], -1),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x.unsqueeze(0).expand(4, -1, -1),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape what is transposed": lambda x: x.mT.reshape(-1, 2),
    "chunks": lambda x: x.chunk(3, dim=1),
    "unpack": lambda x: [row * 2 for row in x],
    "split": lambda x: torch.split(x, [1, 2], dim=1),
    "cat": lambda x: torch.cat([x, x, X]),
    "stack by keyword": lambda x: torch.stack(tensors=[x, x], dim=1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "gelu": functional.gelu,
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "cross entropy": lambda x: functional.cross_entropy(x, torch.tensor([0, 2]), reduction="none", label_smoothing=0.1),
    "argmax": lambda x: x.argmax(-1),
    "named tuple": lambda x: x.max(dim=1),
    "named tuple's part": lambda x: torch.topk(x, 2).values,
    "sum": lambda x: x.sum(),
    "another dtype": lambda x: x.to(torch.float32),
    "half": lambda x: x.half(),
    "as another": lambda x: X.float().type_as(x),
    "to another": lambda x: X.float().to(x),
    "its shape for another": lambda x: X.flatten().view_as(x),
    "expanded as": lambda x: torch.ones(1, dtype=torch.float64).expand_as(x),
    "T": lambda x: x.T,
    "properties of a complex value": lambda x: [(z := torch.complex(x, 2 * x)).H, z.mT, z.real, z.imag],
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "zeros like": torch.zeros_like,
    "full like": lambda x: torch.full_like(x, 3.0),
    "new zeros": lambda x: x.new_zeros(2, 2),
    "new tensor": lambda x: x.new_tensor([1, 2]),
    "add in place": added,
    "assign to a part": assigned,
    "fill in place": masked,
    "in a container": lambda x: {"a": (x + 1, [x - 1]), "b": None},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "with gradient"])
def test_home_computes_and_the_other_rank_knows_the_shape(operation: str, requires_grad: bool) -> None:
    code, plain = OPERATIONS[operation], X.clone().requires_grad_(requires_grad)
    expected = tensors_in(code(plain))
    here, there = (tensors_in(found) for found in on_both(code, plain))
    assert len(here) == len(there) == len(expected) > 0
    for value, placeholder, wanted in zip(here, there, expected, strict=True):
        assert torch.equal(held(value), wanted)
        assert held(value).dtype == wanted.dtype
        assert spec_of(placeholder) == spec_of(value) == spec_of(wanted)
        if isinstance(placeholder, StageTensor):
            assert (placeholder.owner, placeholder.value) == (OWNER, None)
        else:
            assert torch.equal(placeholder, wanted), "every rank made it"


OF_SHAPE: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: (x.shape, type(x.shape), x.size(), x.size(-1), x.shape[0]),
    "dimensions": lambda x: (x.dim(), x.ndim, x.ndimension(), len(x), x.numel(), x.nelement(), torch.numel(x)),
    "layout": lambda x: (x.stride(), x.is_contiguous(), x.layout),
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.is_complex(), x.element_size(), x.itemsize, x.nbytes),
    "device": lambda x: (x.device, x.is_cuda, x.get_device()),
    "gradient": lambda x: (x.requires_grad, x.is_leaf),
    "result type": lambda x: torch.result_type(x, 1),
    "tensor": lambda x: (isinstance(x, Tensor), torch.is_tensor(x), hash(x) == hash(x)),
}


OF_VALUES: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.mean()),
    "int": lambda x: int(x[1, 1]),
    "index": lambda x: [10, 11, 12][x[0].argmax()],
    "bool": lambda x: bool((x > 100).any()),
    "branch": lambda x: 1 if x.sum() > 4 else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "contains": lambda x: (3.0 in x, 9.0 in x),
    "equal": lambda x: (torch.equal(x, X), x.equal(X + 1)),
    "close": lambda x: torch.allclose(x, X),
    "format": lambda x: f"{x.sum():.2f}",
    "complex": lambda x: complex(x.sum()),
}


@pytest.mark.parametrize("code", [*OF_SHAPE.values(), *OF_VALUES.values()], ids=[*OF_SHAPE, *OF_VALUES])
def test_what_python_asks_is_answered_alike_on_all_ranks(code: Callable[[Any], Any]) -> None:
    assert on_both(code, sends=code in OF_VALUES.values()) == [code(X)] * 2


def test_texts_say_where_a_value_lies() -> None:
    with running(OWNER, Wire()):
        assert repr(value_on(OWNER)) == "StageTensor(pp_rank 0, float64[2, 3])"
        assert f"{value_on(OWNER)}" == repr(value_on(OWNER))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def below(x: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        torch.sin(x)


REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "backward": (lambda x: x.sum().backward(), "`backward` was called on a value", "model.backward"),
    "register_hook": (lambda x: x.register_hook(print), "`register_hook` was called on a value", "torch.nn.Module"),
    "retain_grad": (lambda x: x.retain_grad(), "`retain_grad` was called on a value", "torch.nn.Module"),
    "storage": (lambda x: x.untyped_storage(), "`untyped_storage` was called on a value", "torch.nn.Module"),
    "attribute": (lambda x: setattr(x, "requires_grad", True), "an attribute of a value", "detach"),
    "deep copy": (copy.deepcopy, "cannot be copied deeply", "clone"),
    "pickle": (pickle.dumps, "cannot be saved inside the step", "return it"),
    "plain tensor in place": (
        lambda x: X.clone().requires_grad_().exp().add_(x),
        "`add_` changed in place a tensor of shape [2, 3] that every",
        "x = x + y",
    ),
    "another shape in place": (lambda x: x.unsqueeze_(0), "another shape in place, [1, 2, 3]", "x.unsqueeze(0)"),
    "below": (below, "below where smpkit can follow", "torch.nn.Module"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("rank", [OWNER, OTHER])
def test_what_cannot_be_done_is_refused_alike_on_all_ranks(what: str, rank: int) -> None:
    code, text, hint = REFUSED[what]
    wire = Wire()
    grown = spec_of(X[None])
    wire.told.append((spec_of(X.sum()), ()) if what == "backward" else (grown, ((0, grown),)))
    with running(rank, wire), pytest.raises(UsageError) as caught:
        code(value_on(rank))
    assert text in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("rank", [OWNER, OTHER])
def test_hooks_are_refused_under_zero_bubble_too(rank: int) -> None:
    # The owner took the hook, and the next microbatch failed for what `register_hook` had returned.
    for what in ("register_hook", "retain_grad"):
        code, text, _ = REFUSED[what]
        with running(rank, Wire()), watching(lambda _: None), pytest.raises(UsageError, match=text):
            code(value_on(rank))


def test_a_custom_function_on_a_value_of_another_rank_is_an_error() -> None:
    plain, wire = X.clone().requires_grad_(), Wire()
    for rank in (OWNER, OTHER):
        with running(rank, wire):
            cubed = Cube.apply(value_on(rank, plain))
            with pytest.raises(UsageError, match=r"`Cube`, a custom autograd\.Function, was applied"):
                cubed * 2


def test_a_value_outside_its_step_is_an_error() -> None:
    with pytest.raises(UsageError, match="outside the step that made it"):
        value_on(OWNER) + 1
    with pytest.raises(UsageError, match="outside the step that made it"):
        current_microbatch()


def without_gradients(x: Any) -> Any:
    with torch.no_grad():
        return x * 2


def product(x: Any) -> Any:
    return x.float() @ x.float().t()


def product_in_half_precision(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return product(x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x * 2, without_gradients),
        (product, product_in_half_precision),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x * 1, lambda x: x * True),
        (lambda x: x[0], lambda x: x[0, 0]),
        (lambda x: x * X[0], lambda x: x * X[:, :1]),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.sum(dim=0), lambda x: x.sum(dim=1)),
        (lambda x: x * 2, lambda x: x.detach() * 2),
        (lambda x: x * 2, lambda x: x[:1] * 2),
        (lambda x: x.to(torch.float32), lambda x: x.to(torch.float64)),
    ],
)
def test_calls_that_differ_a_little_are_not_taken_for_one(
    first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> None:
    plain = X.long().double().requires_grad_()

    def code(x: Any) -> list[Any]:
        return [first(x), second(x), first(x), second(x), first(x)]

    here, there = on_both(code, plain)
    specs = [spec_of(value) for value in code(plain)]
    assert [spec_of(value) for value in here] == specs
    assert [spec_of(value) for value in there] == specs


@pytest.mark.parametrize(("shape", "owner"), [((2, 3), OTHER), ((3,), OWNER), ((4, 2, 3), OTHER)])
def test_an_operation_runs_where_most_bytes_are_and_else_on_the_later_rank(shape: tuple[int, ...], owner: int) -> None:
    plain, wire = torch.ones(shape, dtype=X.dtype), Wire()
    wire.told.append((spec_of(X + plain), None))
    wire.sent.append(plain)
    with running(OWNER, wire) as microbatch:
        result = value_on(OWNER) + make_stage_tensor(spec_of(plain), CPU, OTHER)
    assert isinstance(result, StageTensor)
    assert result.owner == owner
    assert [(transfer.source, transfer.target) for transfer in microbatch.transfers] == [(1 - owner, owner)]
    if owner == OWNER:
        assert torch.equal(held(result), X + plain)
    else:
        assert torch.equal(wire.sent[-1], X)


def test_an_operation_with_a_weight_runs_where_the_weight_is() -> None:
    wire = Wire()
    wire.told.append((spec_of(functional.linear(X, WEIGHT)), None))
    with running(OWNER, wire) as microbatch:
        microbatch.stage.parameter_owners = {id(WEIGHT): OTHER}
        result = functional.linear(value_on(OWNER), WEIGHT)
    assert isinstance(result, StageTensor)
    assert result.owner == OTHER


def test_lengths_of_one_sum_and_another_maximum_are_another_call() -> None:
    def code(x: Any) -> list[Any]:
        pack = nn.utils.rnn.pack_padded_sequence
        return [pack(x, torch.tensor(lengths), batch_first=True).batch_sizes for lengths in ([3, 1], [2, 2])]

    for sizes in on_both(code, torch.ones(2, 3, 4)):
        assert [tuple(each.shape) for each in sizes] == [(3,), (2,)]


# --- what is inferred -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (METHODS.nonzero, (X,)),
        (METHODS.__getitem__, (X, make_stage_tensor(spec_of(MASK), CPU, 1))),
        (METHODS.add_, (X, 1)),
        (METHODS.view, (X, -1, 7)),
        (functional.batch_norm, (X, torch.zeros(3), torch.ones(3), None, None, True)),
        (functional.instance_norm, (X[None], torch.zeros(2), torch.ones(2))),
    ],
    ids=["values", "mask of one rank", "in place", "wrong", "batch norm", "instance norm"],
)
def test_what_specs_do_not_tell_is_not_inferred(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    def known(tensor: Tensor) -> TensorSpec | None:
        return tensor.spec if isinstance(tensor, StageTensor) else None

    first = make_stage_tensor(spec_of(args[0]), CPU, 1)
    with torch._C.DisableTorchFunction():
        assert infer_output(function, (first, *args[1:]), {}, known, CPU) is MISSING


def test_a_result_gets_the_strides_that_were_inferred_and_keeps_its_graph() -> None:
    x, spec = X.clone().requires_grad_(), spec_of(torch.empty(3, 2, dtype=X.dtype).mT)
    result = with_strides_of(spec, x)
    assert result.stride() == spec.stride != x.stride()
    assert torch.equal(result, x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    assert with_strides_of(spec_of(x), x) is x
    assert with_strides_of(spec_of(x), (x, x)) == (x, x)  # more than was inferred: the caller says so


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (X.t().contiguous().t(), "float64[2, 3] with stride=(3, 1) the first time and (1, 2) now"),
        (X.clone().requires_grad_(), "float64[2, 3] with requires_grad=False the first time and True now"),
        (X[:1], "float64[2, 3] the first time and float64[1, 3] now"),
    ],
)
def test_a_difference_beside_the_shape_is_named(now: Tensor, difference: str) -> None:
    assert describe_difference((spec_of(X),), (spec_of(now),)) == difference
