"""Tensor parallelism by the plan that a Hugging Face model carries, its layers divided where they stand.

A plan names layers and a style for each: `{"layers.*.self_attn.q_proj": "colwise", ...}`. Layers keep their classes and
names, and parameters become pieces of what they were. What a style means is what transformers says: values between
layers are whole and equal on all ranks, and each divided layer begins or ends a region where they are not::

    hidden ──copy──► colwise ──► (heads, activation of this rank) ──► rowwise ──sum──► hidden
             (gradients of the ranks add up)

A layer that is computed on all ranks alike has its whole gradient on each of them. One that sees the heads of its rank
only (a norm of queries) has a part of it: the plan names it `replicated_with_grad_allreduce`, or its place shows it.

Where each rank brings samples of its own, the model that runs the layers gathers its *inputs* (tokens and masks, a few
bytes per position) and returns this rank's samples: in between, all ranks compute on the samples of all of them.

With `optimize: memory` a rank holds a part between the layers: of each sequence, or its own samples. What the plan
names below one child of a layer (`self_attn`, `mlp`) is then a *block*, which gathers all and ends with a part of the
sum::

    part of hidden ──gather──► colwise ──► ... ──► rowwise ──reduce-scatter──► part of hidden

Everything whole in a stack of such layers has a part of its gradient on each rank. That is right only if all that has
parameters is a block or a norm; other stacks are refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from smpkit.errors import UnsupportedError
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import TpShard, is_tp_shard, mark
from smpkit.torch.tensor_parallel import collectives
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout, divide_parameter, enter_region
from smpkit.torch.tensor_parallel.linear import sum_shares
from smpkit.torch.tensor_parallel.marking import marking_of
from smpkit.torch.tensor_parallel.plan_vocabulary import are_tied, divide_vocabulary, in_forward

_log = logging.getLogger("smpkit")


@dataclass(frozen=True)
class _Division:
    """How a style divides a weight.

    Args:
        by_output: its output features; False: its input features.
        packed: two weights lie in it, one after the other, and each is divided by itself.
        whole_outside: the layer takes all features, or returns them.
    """

    by_output: bool
    packed: bool = False
    whole_outside: bool = False


_DIVISIONS: Final = {
    "colwise": _Division(by_output=True),
    "packed_colwise": _Division(by_output=True, packed=True),
    "colwise_gather_output": _Division(by_output=True, whole_outside=True),
    "colwise_rep": _Division(by_output=True, whole_outside=True),
    "rowwise": _Division(by_output=False),
    "packed_rowwise": _Division(by_output=False, packed=True),
    "rowwise_split_input": _Division(by_output=False, whole_outside=True),
    "rowwise_rep": _Division(by_output=False, whole_outside=True),
}
"""Styles of linear layers and of bare parameters."""
_EXPERTS: Final = ("moe_tp_experts", "all_reduce")
"""Styles of modules that multiply with bare parameters of theirs, which are divided: results are summed."""
_ADDS_UP: Final = "replicated_with_grad_allreduce"
_WHOLE: Final = ("replicate", "local_params", _ADDS_UP)
_OTHER: Final = ("mla_kv_a_proj", "moe_identity_expert", "embedding_rowwise")
"""`embedding_rowwise` is served for the word embedding only."""


@dataclass(frozen=True)
class _Named:
    """A module or bare parameter that the plan names; `owner` is the module around it.

    Args:
        readers: modules that read its weight by themselves.
    """

    name: str
    style: Any
    owner: Any
    target: Any
    readers: Sequence[nn.Module] = ()

    @property
    def division(self) -> _Division | None:
        return _DIVISIONS.get(self.style)

    @property
    def why_excepted(self) -> str | None:
        marking = marking_of(self.target) if isinstance(self.target, nn.Module) else None
        if marking is not None and not marking.enabled:
            return "it is excepted from tensor parallelism"
        is_read = self.readers and self.division is not None
        return f"{type(self.readers[0]).__name__} reads the weight of `{self.name}` by itself" if is_read else None


@dataclass(frozen=True)
class _Group:
    """What the plan names below one child of a layer: all of it is divided, or nothing.

    Args:
        name: of the child, from the root on.
        stack: the name of the list of layers that it lies in.
        members: what the plan names.
    """

    name: str
    stack: str
    members: list[_Named] = field(default_factory=list)

    @property
    def is_block(self) -> bool:
        """Whether its only sum over the ranks is the one that ends it."""
        ends = [not member.division.by_output for member in self.members if member.division is not None]
        return sum(ends) == 1 < len(ends) and not any(member.style in _EXPERTS for member in self.members)

    def unnamed_inside(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield norms and trained activations between divided layers that the plan does not name, with their names.

        They lie beside a layer that makes heads or features of this rank. One that is as wide as what such a layer
        takes lies before it (in latent attention, say), and sees whole values.
        """
        named = {member.target for member in self.members}
        widths: dict[nn.Module, set[int]] = {}
        for member in self.members:
            if member.division is not None and member.division.by_output and not member.division.whole_outside:
                weight = getattr(member.target, "weight", member.target)
                widths.setdefault(member.owner, set()).add(weight.shape[-1])
        for owner, taken in widths.items():
            for name, module in owner.named_children():
                shapes = [parameter.shape for parameter in module.parameters()]
                is_vector = all(len(shape) == 1 for shape in shapes)
                is_inside = bool(shapes) and taken.isdisjoint(shape[-1] for shape in shapes)
                if is_inside and module not in named and (is_vector or _is_norm(module)):
                    yield name, module


def has_tp_plan(module: nn.Module) -> bool:
    """Tell whether a module is a Hugging Face model that says how it can be divided."""
    return bool(_plan_of(module)) and hasattr(module, "config")


def _plan_of(module: nn.Module) -> Mapping[str, Any]:
    plan = inspect.getattr_static(module, "_tp_plan", None)  # PEFT's wrappers pass on what their model has
    return plan if isinstance(plan, Mapping) else {}


def _named_by_plan(root: nn.Module, readers: Mapping[nn.Module, Sequence[nn.Module]]) -> list[_Named]:
    plan = _plan_of(root)
    everything: list[tuple[str, Any]] = [*root.named_modules(), *root.named_parameters()]
    styled = ((name, plan.get(_pattern(name)), target) for name, target in everything)
    return [
        _Named(name, style, root.get_submodule(name.rpartition(".")[0]), target, readers.get(target, ()))
        for name, style, target in styled
        if style is not None
    ]


def _pattern(name: str) -> str:
    """Return a name as a plan writes it, with `*` for numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def apply_tp_plan(root: nn.Module, readers: Mapping[nn.Module, Sequence[nn.Module]]) -> None:
    """Divide the layers of a model over the tensor-parallel ranks as its plan says.

    What cannot be divided stays whole, and a line of the log says why: layers outside a list of layers, sizes that the
    ranks do not divide, parts that the user excepted, weights that other modules read.

    Args:
        root: the model.
        readers: of the weights of modules.

    Raises:
        UnsupportedError: a style that smpkit does not know; dropout where ranks bring samples of their own; with
            `optimize: memory`, a stack with something that is neither in a block nor a norm.
    """
    if state.tp_size == 1:
        return
    named = _named_by_plan(root, readers)
    _refuse_unknown_styles(root, named)
    vocabulary = divide_vocabulary(root, {part.target: part.style for part in named if part.why_excepted is None})
    named = [part for part in named if part.target not in vocabulary]
    undivided: dict[str, str] = {}
    groups = list(_divisible_groups(root, named, undivided))
    stacks = sorted({group.stack for group in groups})
    for base in sorted({_base_of(root, stack) for stack in stacks}):
        _prepare_base(root, root.get_submodule(base))
    if _divides_between_layers():
        for stack in stacks:
            _divide_stack(root, stack, [group.name for group in groups if group.stack == stack and group.is_block])
    for group in groups:
        inside = list(group.unnamed_inside())  # before their neighbours are divided
        for member in group.members:
            _divide(member)
        for _, module in inside:
            _mark_whole(module, adds_up=True)
    if state.rank == 0 and undivided:
        listed = "; ".join(f"`{name}`: {why}" for name, why in undivided.items())
        _log.info("%s: not divided over tensor-parallel ranks: %s", type(root).__name__, listed)


def _divides_between_layers() -> bool:
    return state.cfg.optimize == "memory"


# --- what can be divided ----------------------------------------------------------------------------------------------


def _refuse_unknown_styles(root: nn.Module, named: list[_Named]) -> None:
    for part in named:
        is_known = part.style in (*_DIVISIONS, *_EXPERTS, *_WHOLE, *_OTHER)
        is_elsewhere = part.style == "embedding_rowwise" and _stack_of(root, part.name) is not None
        if (not is_known or is_elsewhere) and part.why_excepted is None:
            # The plan of diffusers' Flux has objects among its styles.
            style = part.style if isinstance(part.style, str) else type(part.style).__name__
            raise UnsupportedError(
                f"the plan of {type(root).__name__} divides `{_pattern(part.name)}` by the style `{style}`, which"
                " smpkit does not know there",
                hint="except the model, or this part, with smp.set_tensor_parallelism(module, enabled=False)",
            )


def _divisible_groups(root: nn.Module, named: list[_Named], undivided: dict[str, str]) -> Iterator[_Group]:
    """Yield the groups that are divided; say in `undivided` why others are not, by the name in the plan."""
    groups: dict[str, _Group] = {}
    for part in named:
        stack = _stack_of(root, part.name)
        if stack is not None:
            child = ".".join(part.name.split(".")[: stack.count(".") + 3])
            groups.setdefault(child, _Group(child, stack)).members.append(part)
        elif part.division is not None:
            undivided[_pattern(part.name)] = part.why_excepted or "it lies outside of lists of layers"
    for group in groups.values():
        why = next(filter(None, [*map(_why_undivided, group.members), _why_heads_differ(group)]), None)
        if why is None:
            yield group
        else:
            undivided[_pattern(group.name)] = why


def _stack_of(root: nn.Module, name: str) -> str | None:
    """Return the name of the outermost list of layers around something; None if there is none."""
    parts = name.split(".")
    outer = (".".join(parts[:count]) for count in range(1, len(parts)) if parts[count].isdigit())
    return next((path for path in outer if isinstance(root.get_submodule(path), nn.ModuleList)), None)


def _base_of(root: nn.Module, stack: str) -> str:
    """Return the model that runs a list of layers: the nearest module around it that has a plan of its own."""
    name = stack
    while "." in name:
        name = name.rpartition(".")[0]
        if has_tp_plan(root.get_submodule(name)):
            return name
    return ""


def _why_undivided(named: _Named) -> str | None:
    """Return why something cannot be divided by its style; None if it can."""
    name, target, division = named.name, named.target, named.division
    if named.why_excepted is not None or division is None:
        return named.why_excepted
    if isinstance(target, nn.Parameter):
        if "gate_up" in name and not division.packed:  # halves of each expert, which its plan divides as one
            return f"the plan divides `{name}` as if it held one weight"
        features = target.shape[_dim_of(target, division)]
    else:
        if not isinstance(target, nn.Linear) or type(target).forward is not nn.Linear.forward:
            return f"`{name}` is no plain linear layer, but a {type(target).__name__}"
        if _is_attention(named.owner) and not division.whole_outside:
            why = (_why_heads_are_indivisible if division.by_output else _why_sum_is_inside)(named.owner, name, target)
            if why is not None or division.by_output:
                return why
        features = target.out_features if division.by_output else target.in_features
    features //= 1 + division.packed
    is_divisible = features % state.tp_size == 0
    return None if is_divisible else f"{state.tp_size} ranks do not divide the {features} features of `{name}`"


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "head_dim") or "attention" in type(module).__name__.lower()


def _heads(attention: Any) -> int | None:
    heads = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _kv_heads(attention: Any, name: str, layer: nn.Linear) -> int | None:
    """Return how many heads a projection of keys or values has, where there may be fewer than of queries."""
    width = getattr(attention, "head_dim", None)
    if name.endswith("v_proj"):
        width = getattr(attention, "v_head_dim", width)
    may_be_fewer = name.endswith(("k_proj", "v_proj")) and hasattr(attention, "num_key_value_groups")
    return layer.out_features // width if may_be_fewer and isinstance(width, int) else None


def _why_sum_is_inside(attention: Any, name: str, layer: nn.Linear) -> str | None:
    hidden = getattr(getattr(attention, "config", None), "hidden_size", layer.out_features)
    # Doge has factors of a mask there, one for each head.
    is_end = layer.out_features == hidden
    return None if is_end else f"`{name}` sums over the ranks what each of them needs for its own heads"


def _why_heads_are_indivisible(attention: Any, name: str, layer: nn.Linear) -> str | None:
    heads, kv_heads = _heads(attention), _kv_heads(attention, name, layer)
    if heads is None:
        return "its number of heads is not known (no `config.num_attention_heads`)"
    if heads % state.tp_size:
        return f"{state.tp_size} ranks do not divide its {heads} heads"
    if kv_heads is None and layer.out_features % heads:
        return f"the {layer.out_features} features of `{name}` are not those of {heads} heads"
    if kv_heads is not None and kv_heads % state.tp_size and state.tp_size % kv_heads:
        return f"its {kv_heads} key and value heads are neither divided by {state.tp_size} ranks nor divide them"
    return None


def _why_heads_differ(group: _Group) -> str | None:
    """Return what has weights of its own for each head (norms of queries of Cohere, of StableLM); None if nothing."""
    for name, module in group.unnamed_inside():
        has_list = any(isinstance(child, nn.ModuleList) for child in module.modules())
        if has_list or any(parameter.dim() > 1 for parameter in module.parameters()):
            return f"`{name}` has weights of its own for each head"
    return None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


# --- dividing ---------------------------------------------------------------------------------------------------------


def _divide(named: _Named) -> None:
    """Divide what a style names, and let it take and return what the style says."""
    target, style, division = named.target, named.style, named.division
    if division is not None and isinstance(target, nn.Parameter):
        divide_parameter(target, _dim_of(target, division), packed=division.packed)
    elif division is not None and division.by_output:
        _divide_column(target, named.name, division, named.owner)
    elif division is not None:
        divide_parameter(target.weight, 1, packed=division.packed)
        vars(target)["forward"] = functools.partial(_row, target, division.whole_outside)
    elif style == _ADDS_UP:
        _mark_whole(target, adds_up=True)
    elif style in _EXPERTS:
        target.register_forward_pre_hook(_enter_experts, with_kwargs=True)
        target.register_forward_hook(_sum_of_experts)
    elif style == "moe_identity_expert":
        target.register_forward_pre_hook(_share_of_identity)
    elif style == "mla_kv_a_proj" and not _divides_between_layers():
        target.register_forward_hook(functools.partial(_copy_rotated_part, named.owner))


def _dim_of(parameter: torch.Tensor, division: _Division) -> int:
    return max(parameter.dim() - 2, 0) if division.by_output else parameter.dim() - 1


def _mark_whole(module: nn.Module, *, adds_up: bool, except_for: torch.Tensor | None = None) -> None:
    """Mark the undivided parameters in a module with how their gradients are reduced.

    Args:
        adds_up: each rank has a part of the gradient; else all have the whole one, of the samples of all ranks.
        except_for: a parameter that is reduced as any other of data parallelism.
    """
    parts = Layout.SHARD_SEQUENCE if state.cfg.prescaled_batch else Layout.SHARD_BATCH
    group, scale = parts.replicated_reduction if adds_up else default_layout().shard_reduction
    for parameter in module.parameters():
        if parameter is not except_for and not is_tp_shard(parameter):
            mark(parameter, TpShard(tuple(parameter.shape), None, (), state.tp_rank, state.tp_size, group, scale))


def _divide_column(layer: nn.Linear, name: str, division: _Division, owner: nn.Module) -> None:
    kv_heads = None if division.whole_outside else _kv_heads(owner, name, layer)
    rows = None
    if kv_heads is not None and kv_heads < state.tp_size:
        # Neighbouring ranks share a head. All hold the whole projection, and compute the head that their queries need.
        width, heads = layer.out_features // kv_heads, _heads(owner)
        assert heads is not None
        rows = (width * (state.tp_rank * kv_heads // state.tp_size), width)
        # Hugging Face's attention repeats keys and values this many times: here once for each query head of this rank.
        vars(owner)["num_key_value_groups"] = heads // state.tp_size
        _mark_whole(layer, adds_up=True)
    else:
        for parameter in layer.parameters():
            divide_parameter(parameter, 0, packed=division.packed)
        if not division.whole_outside:
            layer.out_features //= state.tp_size  # for `repr`, and for models that reshape by it
    shared = None if _divides_between_layers() else _SharedInput.of(owner)
    vars(layer)["forward"] = functools.partial(_column, layer, shared, rows, division.whole_outside)


def _column(
    layer: nn.Linear, shared: _SharedInput | None, rows: tuple[int, int] | None, returns_all: bool, x: torch.Tensor
) -> torch.Tensor:
    """Return this rank's output features, or with `returns_all` those of all: the forward of a layer divided by them.

    Args:
        shared: how the input enters the region; None: the block around the layer has gathered it.
        rows: first and number of the output features that are computed, of a layer that all ranks hold whole.
    """
    weight: Any = layer.weight
    bias: torch.Tensor | None = layer.bias
    if rows is not None:
        weight, bias = weight.narrow(0, *rows), None if bias is None else bias.narrow(0, *rows)
    output = functional.linear(x if shared is None else shared.enter(x), weight, bias)
    if not returns_all:
        return output
    # In a block what each rank computes from all features is its part of the gradient, elsewhere all of it.
    return (collectives.gather_to_tp if shared is None else collectives.gather_from_tp)(output, -1)


def _row(layer: nn.Linear, takes_all: bool, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks: the forward of a layer that is divided by its input features."""
    if takes_all:
        width = layer.weight.shape[1]
        is_part = _divides_between_layers()  # of the gradient, which the block around the layer adds up
        x = x.narrow(-1, width * state.tp_rank, width) if is_part else collectives.scatter_to_tp(x, -1)
    return sum_shares(functional.linear(x, layer.weight), _layout_now(), layer.bias)


class _SharedInput:
    """The input of the layers in one module: those that get the same tensor share one exchange in backward."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(owner: nn.Module) -> _SharedInput:
        """Return that of a module, which forgets it at the end of its forward."""
        known: _SharedInput | None = vars(owner).get("_smp_shared_input")
        if known is None:
            known = vars(owner)["_smp_shared_input"] = _SharedInput()
            owner.register_forward_hook(known.forget, always_call=True)
        return known

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all ranks have, for computations that differ by rank."""
        last = self._last  # one read: another microbatch may run in another thread
        if last is None or last[0] is not x:
            self._last = last = (x, collectives.copy_to_tp(x))
        return last[1]

    def forget(self, *_: object) -> None:
        """Let go of the last input: a hook after the forward of the owner."""
        self._last = None


def _enter_experts(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def enter(value: Any) -> Any:  # hidden states, and the weights of the chosen experts
        is_trained = isinstance(value, torch.Tensor) and value.requires_grad
        return collectives.copy_to_tp(value) if is_trained else value

    return tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}


def _sum_of_experts(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return collectives.reduce_from_tp(output)


def _share_of_identity(_module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    # The results of all experts are summed over ranks, and this one is the same on all.
    return args[0] / state.tp_size


def _copy_rotated_part(attention: Any, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Copy the rotated part of DeepSeek's keys, which goes past the divided layer to the heads of every rank."""
    size: int = attention.config.qk_rope_head_dim
    whole, rotated = output[..., :-size], output[..., -size:]
    return torch.cat([whole, collectives.copy_to_tp(rotated)], -1)


# --- the model around the layers, and samples of its own on each rank -------------------------------------------------


def _prepare_base(root: Any, base: nn.Module) -> None:
    """Let the model that runs the layers compute on the samples of all ranks, where each brings its own."""
    base.register_forward_pre_hook(_note_gradients)
    base.register_forward_hook(_forget_gradients, always_call=True)
    base.register_forward_pre_hook(_refuse_outputs, with_kwargs=True)
    if state.cfg.prescaled_batch:
        return
    _refuse_dropout(base)
    embedding: Any = root.get_input_embeddings() if are_tied(root) else None
    table = None if embedding is None or is_tp_shard(embedding.weight) else embedding.weight
    if table is not None:
        # The head reads the table, too, for this rank's samples: it is reduced as an ordinary parameter.
        embedding.register_forward_hook(_divide_gradient)
    _mark_whole(base, adds_up=False, except_for=table)
    base.register_forward_pre_hook(_gather_inputs, with_kwargs=True)
    base.register_forward_hook(_return_own_samples, always_call=True)
    if hasattr(root, "generate"):
        vars(root)["generate"] = functools.partial(_generate, root)


def _note_gradients(_base: nn.Module, _args: Any) -> None:
    in_forward.has_gradients = torch.is_grad_enabled()


def _forget_gradients(_base: nn.Module, _args: Any, _output: Any) -> None:
    in_forward.has_gradients = None  # a recomputation in backward has them, too


def _refuse_dropout(base: nn.Module) -> None:
    # Not all dropout is a module: some models call the function, by what their configuration says.
    chances = {f"config.{name}": value for name, value in vars(base.config).items() if re.search("drop|jitter", name)}
    chances |= {name: module.p for name, module in base.named_modules() if isinstance(module, nn.Dropout)}
    for name, value in chances.items():
        if isinstance(value, float) and value > 0:
            raise UnsupportedError(
                f"{type(base).__name__} has dropout (`{name}`: {value}): ranks that bring samples of their own would"
                " draw other masks for values that must be equal",
                hint="set `prescaled_batch: true`, or the dropout to 0",
            )


def _divide_gradient(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / state.tp_size)  # type: ignore[no-untyped-call]


def _refuse_outputs(module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse optional outputs that this rank does not have whole."""
    for name, why in {
        "output_attentions": "each tensor-parallel rank has some of the heads",
        "output_hidden_states": "each tensor-parallel rank has a part of them (`optimize: memory`)",
    }.items():
        is_asked = kwargs.get(name) if kwargs.get(name) is not None else getattr(module.config, name, False)
        if is_asked and (name == "output_attentions" or _layout_now() is not Layout.REPLICATE):
            raise UnsupportedError(f"{type(module).__name__} was asked for `{name}`, but {why}", hint="leave it out")


def _gather_inputs(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if in_forward.gathered_by is not None:  # a model around this one has gathered them
        return args, kwargs
    tensors = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values()]
    samples = next((value.shape[0] for value in tensors if isinstance(value, torch.Tensor) and value.dim() > 1), None)
    if samples is None:
        raise UnsupportedError(
            "the model was called without a tensor that says how many samples there are",
            hint="pass `input_ids` or `inputs_embeds`",
        )
    cache = kwargs.get("past_key_values")
    if cache is not None and kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = _mask_of_nothing(kwargs, cache)
    gathered = tuple(_gather_input(value, "", samples) for value in args)
    named = {name: _gather_input(value, name, samples) for name, value in kwargs.items()}
    in_forward.gathered_by = base
    return gathered, named


def _mask_of_nothing(kwargs: Mapping[str, Any], cache: Any) -> torch.Tensor | None:
    """Return the mask that `generate` has left out, because no sample of this rank is padded; another's may be.

    Only with a cache: without one, positions may say that several sequences are in a sample, if there is no mask.
    """
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if tokens is None:
        return None
    length = tokens.shape[1] + cache.get_seq_length()
    return torch.ones((tokens.shape[0], length), dtype=torch.int64, device=tokens.device)


def _gather_input(value: Any, name: str, samples: int) -> Any:
    if isinstance(value, dict):  # masks by kind of layer
        return {key: _gather_input(mask, name, samples) for key, mask in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    if value.shape[0] == samples:
        return collectives.gather_from_tp(value, 0)
    if name == "position_ids" and value.dim() == 3 and value.shape[1] == samples:  # of several axes
        return collectives.gather_from_tp(value, 1)
    return value


def _return_own_samples(base: nn.Module, _args: Any, output: Any) -> Any:
    if in_forward.gathered_by is not base:
        return output
    in_forward.gathered_by = None

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return collectives.scatter_to_tp(value, 0) if value.dim() else value
        return tuple(map(own, value)) if type(value) is tuple else value

    if not isinstance(output, dict):
        return own(output)
    for name, value in output.items():
        output[name] = own(value)
    return output


def _generate(root: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate until the samples of all ranks have ended; a rank that ended before would be missed in every layer."""
    config = kwargs.get("generation_config") or root.generation_config
    if (kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1) > 1:
        raise UnsupportedError(
            "beam search reorders the cache by this rank's samples, but it has those of all tensor-parallel ranks",
            hint="set `prescaled_batch: true`, or `num_beams=1`",
        )
    return type(root).generate(root, *args, **{"synced_gpus": True, **kwargs})


# --- parts of the hidden states between the layers --------------------------------------------------------------------


def _layout_now() -> Layout:
    """Return the layout between layers in this call.

    Without gradients all is whole: nothing is kept that dividing would save, and a generated token is one position.
    """
    noted = in_forward.has_gradients
    if not (_divides_between_layers() and (torch.is_grad_enabled() if noted is None else noted)):
        return Layout.REPLICATE
    return Layout.SHARD_SEQUENCE if state.cfg.prescaled_batch else Layout.SHARD_BATCH


def _divide_stack(root: nn.Module, stack: str, blocks: list[str]) -> None:
    """Divide hidden states between the layers of a list, whose blocks gather them."""
    layers: Any = root.get_submodule(stack)
    for name, module in layers.named_modules(prefix=stack):
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and not _is_norm(module) and not any(f"{name}.".startswith(f"{block}.") for block in blocks):
            raise UnsupportedError(
                f"{type(root).__name__}: `optimize: memory` divides what lies between the layers of `{stack}`, but"
                f" `{name}` is not in a block that tensor parallelism divides, and may need all of it",
                hint="set `optimize: speed`",
            )
    _mark_whole(layers, adds_up=True)
    layers[0].register_forward_pre_hook(functools.partial(_on_hidden_states, _enter_stack), with_kwargs=True)
    for layer in layers:
        layer.register_forward_pre_hook(_refuse_more_trained_inputs, with_kwargs=True)
    layers[-1].register_forward_hook(_leave_stack)
    enter_block = functools.partial(_on_hidden_states, _enter_block)
    for name in blocks:
        root.get_submodule(name).register_forward_pre_hook(enter_block, with_kwargs=True)


def _on_hidden_states(
    change: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the hidden states among the arguments of a call: a hook before it."""
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    raise UnsupportedError(
        f"a layer of the model ({type(module).__name__}) was called without hidden states", hint="set `optimize: speed`"
    )


def _enter_stack(hidden: torch.Tensor) -> torch.Tensor:
    dim = _layout_now().dim
    return hidden if dim is None else collectives.scatter_to_tp(hidden, dim)


def _enter_block(hidden: torch.Tensor) -> torch.Tensor:
    return enter_region(hidden, _layout_now())


def _leave_stack(_module: nn.Module, _args: Any, output: Any) -> Any:
    dim = _layout_now().dim
    if dim is None:
        return output
    if isinstance(output, tuple):
        return collectives.gather_from_tp(output[0], dim), *output[1:]
    return collectives.gather_from_tp(output, dim)


def _refuse_more_trained_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse layers that read values with a gradient besides their hidden states: these would stay whole."""
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    trained = [name for name, value in named.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    if len(trained) > 1:
        raise UnsupportedError(
            f"a layer ({type(layer).__name__}) reads values with a gradient besides its hidden states"
            f" ({', '.join(trained[1:])}), which would not be divided with them",
            hint="set `optimize: speed`",
        )
