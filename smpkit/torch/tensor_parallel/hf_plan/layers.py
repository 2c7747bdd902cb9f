"""The layers of a block of a Hugging Face model, divided as the styles of its plan say, and how values enter the block.

::

    hidden ──_EnterBlockHook──► column-divided ──► (heads, activation) ──► row-divided, sum over ranks ──► hidden

A layer stays the object it was: its class gets a mixin in front (`Linear` becomes `Linear` with a sum at its end), and
its parameters become pieces. So names, references and `isinstance` hold as before.

Inside a block a rank's gradients are its own contribution, outside they are whole; the sum in the row-divided layer is
where one becomes the other. A block that lets something past that sum (a residual added inside, a gate on its result)
would silently train on wrong gradients, so `GradientPathCheck` walks the graph of each block's first call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional

from smpkit.errors import UnsupportedError
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.shards import TpShard, mark, shard_of, take_shard
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.collectives import is_dry_run
from smpkit.torch.tensor_parallel.layouts import Layout, enter_region, leave_region

__all__ = [
    "current_layout",
    "install_block_hooks",
    "shard_bare_parameter",
    "shard_linear",
    "shard_parameter",
    "swap_class",
    "why_not_divisible",
]


# --- whether a block can be divided -----------------------------------------------------------------------------------


_KEY_OR_VALUE: Final = ("k_proj", "v_proj")


def why_not_divisible(block: nn.Module, layers: Mapping[str, nn.Module], styles: Mapping[str, str]) -> str | None:
    """Return why the layers of a block (with their styles, by name) cannot be divided; None if they can."""
    # The sum over ranks is the way out of a block, and there is one.
    rows = [name for name, style in styles.items() if style.startswith(("rowwise", "packed_rowwise"))]
    if len(rows) != 1:
        return f"its result is added up in {len(rows)} places ({', '.join(sorted(rows))})"
    for name, layer in layers.items():
        features = _divided_features(layer, styles[name])
        if _heads_of_key(block, name, layer) is None and features % state.tp_size:
            return f"{state.tp_size} ranks do not divide the {features} features of `{name}`"
    return _refusal_of_heads(block, layers, rows[0]) if _is_attention(block) else None


def _divided_features(layer: nn.Module, style: str) -> int:
    assert isinstance(layer, nn.Linear)
    features = layer.in_features if style.startswith(("rowwise", "packed_rowwise")) else layer.out_features
    return features // 2 if style.startswith("packed") else features


def _refusal_of_heads(block: nn.Module, layers: Mapping[str, nn.Module], row: str) -> str | None:
    heads = _heads(block)
    if heads is None:
        return "its number of heads is not known (no `config.num_attention_heads`)"
    if heads % state.tp_size:
        return f"{state.tp_size} ranks do not divide its {heads} heads"
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        kv_heads = _heads_of_key(block, name, layer)
        if name == row or (kv_heads is None and layer.out_features % heads == 0):
            continue
        if kv_heads is None:
            return f"the {layer.out_features} features of `{name}` are not those of {heads} heads"
        if kv_heads % state.tp_size and state.tp_size % kv_heads:
            return f"its {kv_heads} key and value heads are neither divided by {state.tp_size} ranks nor divide them"
    return None


def _is_attention(block: nn.Module) -> bool:
    return hasattr(block, "head_dim") or "attention" in type(block).__name__.lower()


def _heads(block: nn.Module) -> int | None:
    heads = getattr(getattr(block, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _heads_of_key(block: nn.Module, name: str, layer: nn.Module) -> int | None:
    """Return how many heads a projection of keys or values has, where there may be fewer than of queries."""
    width = getattr(block, "head_dim", None)
    if not name.endswith(_KEY_OR_VALUE) or not isinstance(width, int) or not hasattr(block, "num_key_value_groups"):
        return None
    assert isinstance(layer, nn.Linear)
    return layer.out_features // width


# --- how its layers are divided ---------------------------------------------------------------------------------------


def shard_linear(layer: nn.Module, style: str, name: str, block: nn.Module, boundary: Layout) -> None:
    """Divide a linear layer of a block."""
    assert isinstance(layer, nn.Linear)
    if style.startswith(("rowwise", "packed_rowwise")):
        shard_parameter(layer.weight, 1, boundary, packed=style.startswith("packed"))
        swap_class(
            layer,
            _RowParallelLinearWholeInput if style in ("rowwise_split_input", "rowwise_rep") else _RowParallelLinear,
        )
        vars(layer)["tp_layout"] = boundary
        return
    heads = _heads_of_key(block, name, layer)
    if heads is not None and heads < state.tp_size:
        _use_one_kv_head(layer, heads, block)
        return
    for parameter in layer.parameters():
        shard_parameter(parameter, 0, boundary, packed=style.startswith("packed"))
    if style in ("colwise_gather_output", "colwise_rep"):
        swap_class(layer, _ColumnParallelLinearGatherOutput)
    else:
        layer.out_features //= state.tp_size  # for `repr`, and for models that reshape by it


def _use_one_kv_head(layer: nn.Linear, heads: int, block: nn.Module) -> None:
    """Keep a projection to fewer heads than ranks whole, and compute the one head that this rank's queries need."""
    width = layer.out_features // heads
    swap_class(layer, _OneKvHead)
    # Neighbouring ranks share a head. All hold the whole projection, whose gradients are summed over them.
    vars(layer)["tp_rows"] = (width * (state.tp_rank * heads // state.tp_size), width)
    queries = _heads(block)
    assert queries is not None
    # Hugging Face's attention repeats keys and values this many times: here once for each query head of this rank.
    vars(block)["num_key_value_groups"] = queries // state.tp_size


def shard_bare_parameter(parameter: nn.Parameter, boundary: Layout) -> None:
    """Divide a parameter that a block uses without a layer around it (a value per head)."""
    shard_parameter(parameter, max(parameter.dim() - 2, 0), boundary)


def shard_parameter(parameter: torch.Tensor, dim: int, boundary: Layout, *, packed: bool = False) -> None:
    """Make a parameter this rank's piece of itself; the object stays, so modules that share it share the piece."""
    known = shard_of(parameter)
    if known is not None and known.is_distributed:
        return  # shared, and divided already for the other module that has it
    shape = tuple(parameter.shape)
    parts = (shape[dim] // 2,) * 2 if packed else ()
    shard = TpShard(shape, dim, parts, state.tp_rank, state.tp_size, *boundary.shard_reduction)
    if isinstance(parameter, nn.Parameter) and is_delayed(parameter):
        parameter.data = parameter.data.new_empty(()).expand(shard.local_shape)
    else:
        parameter.data = take_shard(parameter.data, shard)
    mark(parameter, shard)


def swap_class(module: nn.Module, mixin: type) -> None:
    """Put a mixin in front of a module's class; its name stays, and `isinstance` holds as before."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": mixin.__module__})


class _RowParallelLinear:
    """Sums the products of all ranks' features, then adds the bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    tp_layout: Layout
    tp_path_check: GradientPathCheck

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = functional.linear(x, self.weight)
        output = self.tp_path_check.note_sum(
            leave_region(partial, _layout_of_tokens(partial, current_layout(self.tp_layout)))
        )
        return output if self.bias is None else output + self.bias


class _RowParallelLinearWholeInput(_RowParallelLinear):
    """Takes this rank's features of an input that has all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.weight.shape[1]
        return super().forward(x.narrow(-1, width * state.tp_rank, width))


class _ColumnParallelLinearGatherOutput:
    """Returns the features of all ranks; what each rank computes from them adds to the gradient."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.gather_to_tp(functional.linear(x, self.weight, self.bias), -1)


class _OneKvHead:
    """Computes the one head of keys or values that the queries of this rank attend to."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    tp_rows: tuple[int, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.narrow(0, *self.tp_rows)
        return functional.linear(x, self.weight.narrow(0, *self.tp_rows), bias)


# --- how values enter it ----------------------------------------------------------------------------------------------


def install_block_hooks(block: nn.Module, row: nn.Module, name: str, boundary: Layout) -> None:
    """Make a block take values of layout `boundary`; its row-divided layer returns them to it."""
    path_check = GradientPathCheck(name, type(block).__name__)
    block.register_forward_pre_hook(functools.partial(_enter_block, path_check, boundary), with_kwargs=True)
    block.register_forward_hook(path_check.check)
    vars(row)["tp_path_check"] = path_check


def current_layout(boundary: Layout) -> Layout:
    """Return the layout between blocks in this call.

    Without gradients sequences stay whole: nothing is kept that dividing them would save, and a generated token is a
    single position.
    """
    return Layout.REPLICATE if boundary is Layout.SHARD_SEQUENCE and not torch.is_grad_enabled() else boundary


def _layout_of_tokens(x: torch.Tensor, boundary: Layout) -> Layout:
    """Return the layout of values whose samples and positions may be one dimension: a part of each sequence."""
    return Layout.SHARD_BATCH if boundary is Layout.SHARD_SEQUENCE and x.dim() == 2 else boundary


def _enter_block(
    path_check: GradientPathCheck,
    boundary: Layout,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring values into the layout inside a block: a hook before its forward."""
    key = _find_hidden_states(args, kwargs)
    if key is None:
        raise UnsupportedError(
            f"`{path_check.name}` ({type(module).__name__}) was called without a tensor, so nothing enters it",
            hint="except it with smp.set_tensor_parallelism(module, enabled=False)",
        )

    def enter(value: Any, is_hidden: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(enter(each, False) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        if is_hidden:
            return path_check.note_input(enter_region(value, _layout_of_tokens(value, current_layout(boundary))))
        # Masks and positions are those of all samples already; to the gradient of a trained one every rank contributes.
        return path_check.note_input(collectives.copy_to_tp(value)) if value.requires_grad else value

    path_check.begin()
    entered_args = tuple(enter(value, index == key) for index, value in enumerate(args))
    return entered_args, {name: enter(value, name == key) for name, value in kwargs.items()}


def _find_hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the position or name of the hidden states among the arguments of a block; None if it got no tensor."""
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return "hidden_states"
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return index
    return next((name for name, value in kwargs.items() if isinstance(value, torch.Tensor)), None)


# --- whether all paths through it lead through the row-divided layer --------------------------------------------------


class GradientPathCheck:
    """Checks once that the result of a block depends on its inputs only through its row-divided layer.

    During the call it collects the graph nodes of what enters and of the sums; `check` then walks back from the result.
    """

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._checked = False
        self._input_nodes: set[Node] = set()
        self._sum_nodes: set[Node] = set()

    def begin(self) -> None:
        """Forget the call before."""
        self._input_nodes.clear()
        self._sum_nodes.clear()

    def note_input(self, x: torch.Tensor) -> torch.Tensor:
        """Record a value that enters the block, as the divided layers of this rank get it."""
        return self._note(x, self._input_nodes)

    def note_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Record a sum over the ranks."""
        return self._note(x, self._sum_nodes)

    def _note(self, x: torch.Tensor, nodes: set[Node]) -> torch.Tensor:
        # Once is enough: nodes of later calls would keep graphs alive for nothing.
        if not self._checked and x.grad_fn is not None and not is_dry_run(x):
            nodes.add(x.grad_fn)
        return x

    def check(self, module: nn.Module, _: Any, output: Any) -> None:
        """Check the graph of the block's result (a forward hook).

        Raises:
            UnsupportedError: there is a path past the sum.
        """
        result = output[0] if isinstance(output, tuple | list) else output
        if self._checked or not self._sum_nodes or not isinstance(result, torch.Tensor) or result.grad_fn is None:
            return
        rows = {id(bias) for bias in _biases_added_after_sum(module)}
        whole = {id(each): name for name, each in module.named_parameters() if id(each) not in rows}
        bypass = self._find_bypass(result.grad_fn, whole)
        if bypass is not None:
            raise UnsupportedError(
                f"`{self.name}` ({self.kind}) cannot be divided over tensor-parallel ranks by its plan: {bypass}"
                " reaches its result past its row-divided layer",
                hint="except it with smp.set_tensor_parallelism(module, enabled=False)",
            )
        self._checked = True
        self.begin()

    def _find_bypass(self, root: Node, whole: dict[int, str]) -> str | None:
        pending, seen = [root], {root}
        while pending:
            node = pending.pop()
            if node in self._sum_nodes:
                continue
            if node in self._input_nodes:
                return "what enters it"
            name = whole.get(id(getattr(node, "variable", None)))
            if name is not None:
                return f"`{name}`"
            following = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(following)
            pending.extend(following)
        return None


def _biases_added_after_sum(block: nn.Module) -> list[nn.Parameter]:
    """Return the biases that are added to the sum: those of the layers whose weight is divided by input features."""
    found = []
    for module in block.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            shard = shard_of(module.weight)
            if shard is not None and shard.dim == 1:
                found.append(module.bias)
    return found
