"""Tensor parallelism by the plan that a Hugging Face model carries, its layers divided where they stand.

A plan names layers and a style for each: `{"layers.*.self_attn.q_proj": "colwise", ...}`. Layers keep their classes and
names, and parameters become pieces of what they were. Styles are read block by block (a *block* is the attention or the
MLP of a layer), because a block as a whole has one way in and one way out::

    hidden ──enter──► colwise ──► (heads, activation) ──► rowwise ──leave──► hidden
                      └── between the two a rank has its own heads, and its gradients are its own contribution: what ──┘
                          all ranks hold there (a norm of queries, say) gets the sum of all ranks' gradients

Between blocks a rank holds what the `Layout` says. Without `prescaled_batch` the model runs on the inputs of all
ranks of the group, so that masks and positions are those of the samples that the blocks see.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.hf_plan import layers as plan_layers
from smpkit.torch.tensor_parallel.hf_plan.head import shard_vocabulary
from smpkit.torch.tensor_parallel.hf_plan.stacks import install_base_hooks, install_stack_hooks
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout, mark_replicated, stack_layout
from smpkit.torch.tensor_parallel.marking import marking_of

__all__ = ["ParallelBlock", "apply_tp_plan", "has_tp_plan", "parallel_blocks", "styles_of"]

_log = logging.getLogger("smpkit")

COLUMN: Final = frozenset({"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"})
"""Styles that divide output features."""
ROW: Final = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles that divide input features."""
WHOLE: Final = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "local_params"}
)
"""Styles that leave a layer whole: what they say of its gradient is true of every whole layer in a block."""
_EXPERTS: Final = "moe_tp_experts"


@dataclass(frozen=True)
class ParallelBlock:
    """A module that is entered and left once, with the layers in it that are divided.

    Args:
        name, module: from the root on.
        stack: the name of the list of layers that it lies in.
        layers: styles of the divided layers in it, by name from the root on.
        parameters: styles of the divided bare parameters in it.
    """

    name: str
    module: nn.Module
    stack: str
    layers: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)


def has_tp_plan(module: nn.Module) -> bool:
    """Tell whether a module is a Hugging Face model that says how it can be divided."""
    return bool(_plan_of(module)) and hasattr(module, "config")


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def styles_of(root: nn.Module) -> dict[str, str]:
    """Return the styles of the modules and parameters of `root` that its plan names, by name from the root on."""
    plan = _plan_of(root)
    names = [name for name, _ in root.named_modules()] + [name for name, _ in root.named_parameters()]
    generic = {name: re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names}
    return {name: plan[generic[name]] for name in names if generic[name] in plan}


def apply_tp_plan(root: nn.Module, _config: Mapping[str, Any] | None = None) -> None:
    """Divide the layers of a model over the tensor-parallel ranks as its plan says.

    What cannot be divided stays whole, and a line of the log says why: styles that smpkit does not know (experts),
    layers outside the list of layers, sizes that the ranks do not divide, parts that the user excepted.
    """
    if state.tp_size == 1:
        return
    styles = styles_of(root)
    blocks = [block for block in parallel_blocks(root, styles) if _is_divisible(root, block)]
    boundaries = _boundaries(root, blocks, styles)
    _mark_layers(root, blocks, boundaries)
    for name, boundary in boundaries.items():
        install_stack_hooks(root.get_submodule(name), boundary)
    for base, several in _base_models(root, boundaries).items():
        inside = {boundary for name, boundary in boundaries.items() if _base_of(root, name) == base}
        install_base_hooks(root.get_submodule(base), base or type(root).__name__, inside, several=several)
    for block in blocks:
        _shard_block(root, block, boundaries[block.stack])
    divided = {name for block in blocks for name in (*block.layers, *block.parameters)}
    divided |= shard_vocabulary(root, styles, {name for name in styles if _is_excluded(root, name)})
    _log_undivided_layers(root, styles, divided)


def _base_models(root: nn.Module, stacks: Iterable[str]) -> dict[str, bool]:
    """Return the models that run lists of layers, each with whether it runs several."""
    count = Counter(_base_of(root, name) for name in stacks)
    return {base: lists > 1 for base, lists in sorted(count.items())}


def _boundaries(root: nn.Module, blocks: Sequence[ParallelBlock], styles: Mapping[str, str]) -> dict[str, Layout]:
    """Return the layout between the layers of each list."""
    stacks = {block.stack for block in blocks}
    several = _base_models(root, stacks)
    # The layers of one list may read what those of another made, of all samples and positions.
    equal = Layout.REPLICATE if state.cfg.prescaled_batch else Layout.REPLICATE_GATHERED
    chosen = {name: equal if several[_base_of(root, name)] else stack_layout() for name in sorted(stacks)}
    for name, boundary in chosen.items():
        base = root.get_submodule(_base_of(root, name))
        # REPLICATE_GATHERED needs equal values on all ranks, and dropout would draw other masks on each: ranks with
        # samples of their own have random numbers of their own. Experts are not divided, so with it every rank would
        # run the samples of the whole group through all of them, and balance their load over these.
        if boundary is Layout.REPLICATE_GATHERED and (_has_dropout(base) or _expert_names(styles_of(base))):
            chosen[name] = Layout.SHARD_BATCH
        # A layer that stays whole gets what lies between the blocks, and may need all positions of it.
        whole = _needs_positions(root, name, blocks, styles) if boundary is Layout.SHARD_SEQUENCE else None
        if whole is not None:
            chosen[name] = Layout.REPLICATE
            if state.rank == 0:
                _log.warning(
                    "%s: `optimize: memory` does not divide sequences between the layers of `%s`, because `%s` is not"
                    " divided over tensor-parallel ranks and may need whole ones",
                    type(root).__name__,
                    name,
                    whole,
                )
    return chosen


def _needs_positions(
    root: nn.Module, stack: str, blocks: Sequence[ParallelBlock], styles: Mapping[str, str]
) -> str | None:
    """Return the name of an undivided module in a list of layers that may read several positions; None without one."""
    # Norms, routers and experts take each position by itself, and a block gathers what it needs.
    apart = [block.name for block in blocks] + [name.rpartition(".")[0] for name in _expert_names(styles)]
    name: str
    for name, module in root.get_submodule(stack).named_modules(prefix=stack):
        has_own = next(module.parameters(recurse=False), None) is not None
        is_apart = any(name == each or _is_inside(name, each) for each in apart)
        if has_own and not is_apart and "norm" not in type(module).__name__.lower():
            return name
    return None


def _expert_names(styles: Mapping[str, str]) -> list[str]:
    return [name for name, style in styles.items() if style == _EXPERTS]


def _has_dropout(base: nn.Module) -> bool:
    # Not all dropout is a module: some models call the function, by what their configuration says.
    configured = [value for name, value in vars(base.config).items() if "drop" in name and isinstance(value, float)]
    return any(value > 0 for value in configured) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules()
    )


def _mark_layers(root: nn.Module, blocks: Sequence[ParallelBlock], boundaries: Mapping[str, Layout]) -> None:
    """Mark the parameters of the layers that stay whole with how their gradients are reduced."""
    # Inside a block a rank's gradient is its contribution to the whole gradient. Where ranks have samples of their own,
    # the average over the data-parallel ranks divides the sum of contributions by the right number; where they share
    # one batch, contributions have to be added, as for parts of a sequence.
    inside = Layout.SHARD_BATCH if default_layout() is Layout.SHARD_BATCH else Layout.SHARD_SEQUENCE
    ids: set[int] = set()
    for block in blocks:
        row = root.get_submodule(_row_of(block))
        for parameter in block.module.parameters():
            if parameter is not row.bias:  # added after the sum, where gradients are whole
                ids.add(id(parameter))
                mark_replicated(parameter, inside)
    for name, boundary in boundaries.items():
        for parameter in root.get_submodule(name).parameters():
            if id(parameter) not in ids:
                mark_replicated(parameter, boundary)


def _log_undivided_layers(root: nn.Module, styles: Mapping[str, str], divided: set[str]) -> None:
    if state.rank:
        return
    whole = sorted({(re.sub(r"\.\d+\.", ".*.", name), style) for name, style in styles.items() if name not in divided})
    whole = [(name, style) for name, style in whole if style not in WHOLE]
    if whole:
        names = ", ".join(f"`{name}` ({style})" for name, style in whole)
        _log.info("%s: not divided over tensor-parallel ranks: %s", type(root).__name__, names)
    experts = {id(each): each for name in _expert_names(styles) for each in root.get_submodule(name).parameters()}
    if experts:
        own, every = sum(map(_bytes, experts.values())), sum(map(_bytes, root.parameters()))
        _log.warning(
            "%s: experts are not divided by tensor parallelism: each rank holds all of them, %.1f MiB of its %.1f MiB"
            " of parameters, with their gradients and optimizer states; shard these with `shard_optimizer_state` or"
            " `sharded_data_parallel_degree`",
            type(root).__name__,
            own / 2**20,
            every / 2**20,
        )


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


# --- blocks ---------------------------------------------------------------------------------------------------------


def parallel_blocks(root: nn.Module, styles: Mapping[str, str]) -> list[ParallelBlock]:
    """Group the divided layers into blocks: the smallest modules with both a column- and a row-divided layer."""
    linear = {
        name: style
        for name, style in styles.items()
        if style in COLUMN | ROW and _is_plain_linear(root, name) and not _is_excluded(root, name)
    }
    rows = [name for name, style in linear.items() if style in ROW]
    blocks: dict[str, ParallelBlock] = {}
    for name, style in linear.items():
        around = next((each for each in _ancestors(name) if _has_both(each, linear, rows)), None)
        stack = None if around is None else _stack_of(root, around)
        if around is not None and stack is not None:
            block = blocks.setdefault(around, ParallelBlock(around, root.get_submodule(around), stack))
            block.layers[name] = style
    for block in blocks.values():
        for name, _ in block.module.named_parameters(recurse=False):
            full = f"{block.name}.{name}"
            if styles.get(full) in COLUMN:
                block.parameters[full] = styles[full]
    # A block inside another block would be entered twice.
    return [block for block in blocks.values() if not any(_is_inside(block.name, other) for other in blocks)]


def _has_both(name: str, linear: Mapping[str, str], rows: list[str]) -> bool:
    return any(_is_inside(row, name) for row in rows) and any(
        _is_inside(each, name) and style in COLUMN for each, style in linear.items()
    )


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _stack_of(root: nn.Module, name: str) -> str | None:
    """Return the name of the outermost list of layers around a module; None if there is none."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        outer = ".".join(parts[:count])
        if parts[count].isdigit() and isinstance(root.get_submodule(outer), nn.ModuleList):
            return outer
    return None


def _base_of(root: nn.Module, stack: str) -> str:
    """Return the model that runs a list of layers: the nearest module around it that has a plan of its own."""
    for name in _ancestors(stack):
        if has_tp_plan(root.get_submodule(name)):
            return name
    return ""


def _is_plain_linear(root: nn.Module, name: str) -> bool:
    try:
        module = root.get_submodule(name)
    except AttributeError:  # a parameter
        return False
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_excluded(root: nn.Module, name: str) -> bool:
    try:
        marking = marking_of(root.get_submodule(name))
    except AttributeError:  # a parameter
        return False
    return marking is not None and not marking.enabled


def _is_divisible(root: nn.Module, block: ParallelBlock) -> bool:
    layers = {name: root.get_submodule(name) for name in block.layers}
    why = plan_layers.why_not_divisible(block.module, layers, block.layers)
    if why is not None and state.rank == 0:
        _log.info(
            "`%s` (%s) is not divided over tensor-parallel ranks: %s", block.name, type(block.module).__name__, why
        )
    return why is None


# --- dividing -------------------------------------------------------------------------------------------------------


def _row_of(block: ParallelBlock) -> str:
    return next(name for name, style in block.layers.items() if style in ROW)


def _shard_block(root: nn.Module, block: ParallelBlock, boundary: Layout) -> None:
    plan_layers.install_block_hooks(block.module, root.get_submodule(_row_of(block)), block.name, boundary)
    for name, style in block.layers.items():
        plan_layers.shard_linear(root.get_submodule(name), style, name, block.module, boundary)
    for name in block.parameters:
        plan_layers.shard_bare_parameter(root.get_parameter(name), boundary)
