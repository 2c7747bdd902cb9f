"""`sharded_data_parallel_degree`: parameters, gradients and optimizer states divided over groups of replicas.

Built on torch's `fully_shard`. The ranks of RDP_GROUP form a mesh; a *sharding group* is one of its rows::

    degree 4 of 8 replicas          shard ──►
                      replicate │   0  1  2  3      each row holds the model once, in four parts
                                ▼   4  5  6  7      each column holds equal parts

Each repeated block of the model (the layers of a transformer) is gathered as a whole just before its forward and
backward, and so is the rest of the model. Gradients are reduced to the parts in a row after every backward, and
averaged over the columns once, in the last microbatch of the last pass of an accumulation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from smpkit.errors import UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core import devices
from smpkit.torch.core.devices.backends import connects
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.core.warn import warn_user
from smpkit.torch.data_parallel.data_parallel import DataParallel, ReductionOptions, broadcast_parameters
from smpkit.torch.data_parallel.replicas import UPDATES_COMPARED, check_same, check_same_model, norms_of_weights
from smpkit.torch.data_parallel.sharded_parameters import is_registered, set_shard_attributes
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.init import extra_group
from smpkit.torch.placement.blocks import repeated_blocks
from smpkit.torch.placement.delayed import initialize
from smpkit.torch.placement.dtensor import distribute_like, full_tensor_of
from smpkit.torch.placement.placement import ParameterPlacement, Placement
from smpkit.torch.placement.shards import copy_mark_to, hook_on_weight
from smpkit.torch.precision.cast import half_dtype, kept_in_float32
from smpkit.torch.tensor_parallel.agreement import common_seed

if TYPE_CHECKING:
    from smpkit.torch.core.microbatches import StepProgress


def shard_model(module: nn.Module, placement: Placement, reduction: ReductionOptions) -> ShardedDataParallel:
    """Divide a model over this rank's sharding group, and return its `ShardedDataParallel`.

    Weights that have no memory yet (`delay_param_initialization`) get it block by block, so that no rank ever holds
    more than one block whole.
    """
    check_same_model(module, placement)
    placement.make_groups()
    for placed in placement:
        if placed.grad_scale != 1:
            raise UnsupportedError(
                f"`{placed.name}` has a gradient that is multiplied by {placed.grad_scale:g}, which sharded data "
                "parallelism does not do",
                hint="set `prescaled_batch: true` and `optimize: speed`, or sharded_data_parallel_degree to 1",
            )
    hooked = hook_on_weight(module)
    if hooked is not None:
        _refuse_hook(hooked)
    blocks = repeated_blocks(module)
    _warn_of_large_blocks(module, blocks)
    apart, apart_alone = _gathered_apart(module, blocks)
    whole = [placed for placed in placement if not _is_divisible(placed.parameter) or placed.parameter in apart_alone]
    seed = common_seed()
    _materialize(module, whole, seed)
    left = {placed.parameter: placed for placed in placement if placed not in whole}
    mesh = _mesh()
    # What lies inside first: `fully_shard` gives a module what none inside it has taken.
    inner = dict.fromkeys(block for block in (*apart, *blocks) if block is not module)
    gathered: dict[nn.Module, list[str]] = {}
    for block in [*inner, module]:
        parts = [left.pop(parameter) for parameter in block.parameters() if parameter in left]
        _materialize(module, parts, seed)
        is_large = sum(placed.parameter.numel() for placed in parts) >= state.cfg.sdp_param_persistence_threshold
        is_used_outside = any(is_registered(placed.parameter) for placed in parts)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=block is not module and is_large and not is_used_outside,
            mp_policy=_FLOAT32 if block in apart else _precision(),
            ignored_params={placed.parameter for placed in whole},
        )
        _name_as_before(type(block))
        block.register_forward_pre_hook(_refuse_other_weights, prepend=True)  # before torch's own, which replaces them
        gathered[block] = [placed.name for placed in parts]
        for part in parts:
            # `fully_shard` made new parameters; an optimizer made earlier still refers to the old ones.
            part.parameter.data = part.parameter.new_empty(0)
    _settle_dtypes(module)
    set_shard_attributes(module.parameters())
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):  # torch would take the hook, and never call it
            vars(parameter)["register_hook"] = functools.partial(_refuse_hook, name)
    return ShardedDataParallel(module, placement, whole, reduction, mesh.get_group("shard"), gathered)


class ShardedDataParallel(DataParallel):
    """One rank's part of a model that is divided over a sharding group.

    Args:
        before: of the parameters as they were before `fully_shard` made others of them.
        whole: of those that it left whole, whose gradients are averaged as those of replicas are.
        gathered: the names of the weights that each block gathers.
    """

    def __init__(
        self,
        module: nn.Module,
        before: Iterable[ParameterPlacement],
        whole: Sequence[ParameterPlacement],
        reduction: ReductionOptions,
        shard_group: dist.ProcessGroup,
        gathered: Mapping[nn.Module, Sequence[str]],
    ) -> None:
        super().__init__(module, whole, reduction)
        self.shard_group = shard_group
        """The ranks that together hold the model once."""
        assert isinstance(module, FSDPModule)
        self._root = module
        self._failed = False
        now = dict(module.named_parameters())
        self._replaced = {placed.parameter: now[placed.name] for placed in before}
        """What took the place of each parameter from before."""
        for parameter, replacement in self._replaced.items():
            copy_mark_to(replacement, parameter)
        module.register_forward_pre_hook(_with_whole_arguments, with_kwargs=True)
        module.register_forward_hook(self._end_forward)
        self._ran: list[str] = []
        """The blocks that have run with gradients since the last update."""
        self._written: list[tuple[Sequence[str], torch.Tensor]] = []
        """The weights that they gathered, and which of these had another norm after the forward."""
        self._updates_left = UPDATES_COMPARED
        """Updates before which ranks still look at what forwards did; the base counts reductions of whole weights."""
        names = {block: name for name, block in module.named_modules()}
        self._notes: list[RemovableHandle] = []
        for block, weights in gathered.items():
            self._note_forwards(block, names[block] or "the model", weights)

    def _note_forwards(self, block: nn.Module, name: str, weights: Sequence[str]) -> None:
        """Note the forwards of a block in `_ran` and `_written`."""
        before = torch.empty(0, device="cpu")

        def norms() -> torch.Tensor:
            return norms_of_weights(map(self._root.get_parameter, weights))

        def begin(*_: object) -> None:
            nonlocal before
            if torch.is_grad_enabled():
                self._ran.append(name)
                before = norms()

        def end(*_: object) -> None:
            if torch.is_grad_enabled():
                self._written.append((weights, ~torch.isclose(before, norms(), 0, 0, equal_nan=True)))

        self._notes.append(block.register_forward_pre_hook(begin))
        # Before torch's own hook, which frees what the block has gathered.
        self._notes.append(block.register_forward_hook(end, prepend=True))

    def _refuse_written(self) -> None:
        """Refuse forwards that write to weights: these are copies, which `fully_shard` frees."""
        written = [weight for weights, flags in self._written for weight in compress(weights, flags.tolist())]
        self._written = []
        if written:
            raise UnsupportedError(
                f"`{written[0]}` was written to in a forward, which sharded data parallelism would lose: it gathers"
                " weights anew for each pass",
                hint="write to it between steps (`parameter.data.mul_(mask)` after `optimizer.step()`), or let the"
                " forward compute with another tensor (`self.weight * self.mask`)",
            )

    def replace_parameters_of(self, optimizer: Any) -> None:
        """Put the divided parameters into an optimizer that was made with the whole ones, and divide its states."""
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]
        # Some optimizers have states from the beginning, such as Adagrad; others of training before.
        for before, after in self._replaced.items():
            for key, value in optimizer.state.pop(before, {}).items():
                same = isinstance(value, torch.Tensor) and value.shape == after.shape
                optimizer.state.setdefault(after, {})[key] = distribute_like(
                    value.to(after.dtype) if same else value, after
                )

    def keep_gathered(self, parameter: nn.Parameter) -> None:
        """Keep the block of a parameter, of before or now, gathered from its forward to its backward."""
        divided = self._replaced.get(parameter, parameter)
        for module in self._root.modules():
            if isinstance(module, FSDPModule) and any(parameter is divided for parameter in module.parameters()):
                module.set_reshard_after_forward(False, recurse=False)

    def begin_step(self, step: StepProgress) -> None:
        self._refuse_after_failure()
        super().begin_step(step)

    def before_backward(self, step: StepProgress) -> None:
        # The all-reduce over the columns is linear in the gradients, so one at the end of an accumulation is enough.
        last = step.microbatch == step.num_microbatches - 1
        self._root.set_requires_all_reduce(last and self._reduces_now())

    def before_last_backward(self) -> None:
        """Do nothing: `fully_shard` reduces while backward runs, every time."""

    def end_step(self, step: StepProgress) -> None:
        if step.total_backwards:
            self._reduce_rest()
        super().end_step(step)
        self._reshard(may_go_backward=not step.detach_outputs)

    def _reduce_rest(self) -> None:
        """Reduce what blocks got after `fully_shard` took their backward for over.

        It does when it has the gradient of a block's input. That of a gradient penalty comes before the gradients of
        the other calls of the block, so these would stay on the weights that were gathered, and go with them.
        """
        fully_shard.state(self._root)._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def _end_forward(self, *_: object) -> None:
        if state.step is None:
            self._reshard(may_go_backward=True)

    def _reshard(self, *, may_go_backward: bool) -> None:
        """Give the module its parts back, which `fully_shard` does only in a backward, unless one may still come.

        Until then the module has other parameters than the optimizer, and what a script writes to them is lost.
        """
        if may_go_backward and self._root.training and torch.is_grad_enabled():
            return
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def end_accumulation(self) -> None:
        self._reduce_rest()
        # An update changes the parts. Where blocks stay gathered after a backward, the next forward of one outside of a
        # step would find the weights of before.
        self._reshard(may_go_backward=False)
        # A gather takes what the others send: parts of another block, if they run another one.
        ran, self._ran = self._ran, []
        if ran:
            check_same(
                ran,
                self.shard_group,
                "the layers that ran differ",
                "calls",
                "run the same layers on all ranks: set `layerdrop` and its like to 0, or draw from a common seed",
            )
            self._refuse_written()
            self._updates_left -= 1
            if not self._updates_left:
                for hook in self._notes:
                    hook.remove()
        passes = self._reduction.passes_per_reduction
        if (left := self._passes % passes) and self.shard_group.size() < state.rdp_size:
            raise UnsupportedError(
                f"gradients were to be used after {left} of {passes} passes, but sharding groups"
                " average them in the last",
                hint="leave out passes that fill no accumulation, or set backward_passes_per_step to 1",
            )
        super().end_accumulation()

    def begin_outside_step(self, training: bool) -> None:
        """Get ready for a backward outside any step, which averages over all replicas: averages add up."""
        self._refuse_after_failure()
        if torch.is_grad_enabled():
            self._root.set_requires_all_reduce(True)
            self._begin_pass(training, self.reducer.finish)

    def abandon_forward_outside_step(self) -> None:
        self._failed = True

    def abandon_step(self, error: BaseException) -> None:
        self._failed = True
        if _FREED in str(error):
            error.add_note(
                "these weights had been freed, by an earlier backward or because a layer's output was changed in place"
                " (write `y = y + x`, not `y += x`); for a gradient penalty (create_graph=True) call"
                " `model.get_module().set_reshard_after_backward(False)`, which keeps all blocks until the update"
            )

    def _refuse_after_failure(self) -> None:
        """Refuse a pass after one that failed: blocks lie gathered then, and gradients are on their way."""
        if self._failed:
            raise UsageError(
                "a step failed, and sharded data parallelism cannot go on after that",
                hint="resume from a checkpoint in a new process",
            )


def _with_whole_arguments(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the model whole tensors where a script made DTensors, as by `weight.new_zeros` for a first hidden state."""
    return map_leaves(full_tensor_of, (args, kwargs))


_FREED: Final = "out of bounds for storage of size 0"
"""Torch's words for a use of weights that `fully_shard` has freed."""


def _is_divisible(parameter: nn.Parameter) -> bool:
    """Return whether `fully_shard` can divide a parameter; others stay whole on every rank.

    It divides along the first dimension, which the temperature of a CLIP lacks, and takes no parameters without
    elements, of complex numbers, or of integers and numbers of 8 bits (frozen weights of quantised models).
    """
    return parameter.ndim > 0 and parameter.numel() > 0 and parameter.is_floating_point() and parameter.itemsize > 1


def _name_as_before(kind: type) -> None:
    """Give a class that `fully_shard` made the names of the module's own: others go by them.

    By a model's class, Hugging Face's Trainer knows that labels are shifted before it smooths them.
    """
    own = kind.__bases__[-1]
    kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__


def _settle_dtypes(module: nn.Module) -> None:
    """Let `fully_shard` choose the dtypes of gradients while everything is trained.

    Else it does so in the first forward, and for a block that is frozen there it chooses none: once that is unfrozen,
    its gradients in half precision would meet weights in float32.
    """
    frozen = [param for param in module.parameters() if isinstance(param, DTensor) and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    fully_shard.state(module)._lazy_init()  # type: ignore[attr-defined]
    for param in frozen:
        param.requires_grad_(False)


def _refuse_other_weights(block: nn.Module, *_: object) -> None:
    """Refuse weights that a script put in the place of divided ones: torch would compute with its own."""
    group = fully_shard.state(block)._fsdp_param_group  # type: ignore[attr-defined]
    for sharded in () if group is None else group.fsdp_params:
        held = sharded._module_info.module._parameters.get(sharded._module_info.param_name)
        if held is not sharded.sharded_param and held is not getattr(sharded, "_unsharded_param", None):
            raise UnsupportedError(
                f"a forward got another tensor as its `{sharded._param_fqn}` (torch.func.functional_call, or an"
                " assignment), which sharded data parallelism would not use: it gathers the weight that it divided",
                hint="set sharded_data_parallel_degree to 1, or copy the values: `weight.data.copy_(values)`",
            )


def _refuse_hook(name: str, *_: object) -> NoReturn:
    raise UnsupportedError(
        f"a hook was registered on `{name}`, which sharded data parallelism gathers anew for each pass",
        hint="use `register_post_accumulate_grad_hook` after smp.DistributedModel: `grad` is this rank's part",
    )


def _mesh() -> DeviceMesh:
    """Return RDP_GROUP as rows of sharding groups."""
    degree = state.cfg.sharded_data_parallel_degree
    rows = torch.tensor(state.group(CommGroup.RDP_GROUP), device="cpu").view(-1, degree)
    row, column = divmod(state.rdp_rank, degree)
    shard = extra_group(tuple(rows[row].tolist()))
    if devices.is_asynchronous(state.device) and not connects(shard, state.device):
        # Its collectives on tensors of a GPU end the process with SIGSEGV (torch 2.11).
        raise UnsupportedError(
            f"sharded_data_parallel_degree is {degree}, and between these ranks only gloo carries tensors of"
            f" {state.device}, which cannot gather parameters there",
            hint="give each rank a GPU of its own, or NCCL 2.30 with SMPKIT_SHARED_GPU_NCCL=1",
        )
    if len(rows) == 1:
        return DeviceMesh.from_group(shard, state.device.type, mesh_dim_names=("shard",))
    replicate = extra_group(tuple(rows[:, column].tolist()))
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], state.device.type, mesh=rows, mesh_dim_names=names)


@torch.no_grad()
def _materialize(root: nn.Module, parts: Sequence[ParameterPlacement], seed: int) -> None:
    """Give the parameters of one block, on this rank's device, the values of the first replica."""
    initialize(root, [placed.parameter for placed in parts], state.device, seed)
    for placed in parts:
        value = placed.parameter.data.to(state.device).contiguous()  # which `fully_shard` requires
        # Parts stay in float32 and are their own master weights; `fully_shard` casts a block when it gathers it.
        is_cast = value.dtype in (torch.float16, torch.bfloat16, torch.float64) and _precision().param_dtype is not None
        placed.parameter.data = value.float() if is_cast else value
    broadcast_parameters(parts)


_FLOAT32: Final = MixedPrecisionPolicy(cast_forward_inputs=False)


def _precision() -> MixedPrecisionPolicy:
    half = half_dtype(state.cfg)
    # What is float32 between blocks (the residual stream of a Mamba) stays so, as without sharding.
    return _FLOAT32 if half is None else MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)


def _gathered_apart(root: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """Return the modules that are not gathered with their block, the innermost first, and the parameters beside them.

    `fully_shard` casts all that it gathers at once, and takes one dtype only, so what half precision leaves in float32,
    or is of another dtype than the block (adapters in float32 of a model in bfloat16), is gathered by itself. A
    parameter of a module that holds others (the sinks of an attention), or of several modules, cannot be.
    """
    half = half_dtype(state.cfg)
    if half is None:
        apart = _of_other_dtypes([*blocks, root])
    else:
        pairs = kept_in_float32(root, half)
        apart = {parameter for module, key in pairs if (parameter := module._parameters.get(key)) is not None}
    modules = [module for module in reversed([*root.modules()]) if any(True for _ in module.parameters(False))]
    holders = Counter(parameter for module in modules for parameter in module.parameters(False))
    apart_alone = {parameter for parameter in apart if holders[parameter] > 1}
    modules = [module for module in modules if apart.difference(apart_alone).issuperset(module.parameters())]
    return modules, apart.difference(parameter for module in modules for parameter in module.parameters())


def _of_other_dtypes(blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that are of another dtype than most of the first of these blocks that has them."""
    seen, others = set[nn.Parameter](), set[nn.Parameter]()
    for block in blocks:
        sizes, parts = Counter[torch.dtype](), [parameter for parameter in block.parameters() if parameter not in seen]
        for parameter in parts:
            sizes[parameter.dtype] += parameter.numel() if _is_divisible(parameter) else 0
        seen.update(parts)
        others.update(parameter for parameter in parts if parameter.dtype is not sizes.most_common(1)[0][0])
    return others


def _warn_of_large_blocks(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    sizes = sorted((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), reverse=True)
    rest = sum(parameter.numel() for parameter in root.parameters()) - sum(sizes)
    live, most = rest + sum(sizes[:2]), state.cfg.sdp_max_live_parameters
    if live > most:
        warn_user(
            f"{live} parameters are gathered at once (what belongs to no repeated block, and two blocks), more than "
            f"sdp_max_live_parameters ({most}): a block is gathered as a whole",
        )


# --- DTensors, where torch gives other numbers than the script asked for ----------------------------------------------


def _of_whole(read: Callable[[torch.Tensor], Any]) -> Callable[[DTensor], Any]:
    """Return what reads a number, such as `Tensor.item`, also where each rank has a share of it: of a norm, say.

    Torch reads this rank's share (pytorch/pytorch#166638): of a norm that was too small, or of `isnan().any()`, by
    which ranks would then decide differently. All ranks take part, as in a step of a pipeline. DTensors of jobs that
    `shard_model` has not divided are read as torch reads them.
    """

    def number(tensor: DTensor) -> Any:
        is_ours = state.model is not None and isinstance(state.model.data_parallel, ShardedDataParallel)
        if not is_ours or not any(placement.is_partial() for placement in tensor.placements):
            return read(tensor)
        with waiting("a number of divided weights or gradients", tensor.device_mesh.mesh.flatten().tolist()):
            return read(tensor.full_tensor())

    return number


for _name in ("item", "__bool__", "__float__", "__int__"):
    setattr(DTensor, _name, _of_whole(getattr(torch.Tensor, _name)))

_DATA: Final[Any] = torch.Tensor.data


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Set `tensor.data`, unless it is a part of a parameter: torch would take it, and go on with the old numbers."""
    if "register_hook" in vars(tensor):  # that of `shard_model`
        raise UnsupportedError(
            f"`.data` of a parameter of shape {list(tensor.shape)} was assigned, of which sharded data parallelism"
            " keeps this rank's part elsewhere",
            hint="copy into it, `parameter.data.copy_(values)`, and keep `parameter.data.clone()` to go back to",
        )
    _DATA.__set__(tensor, value)


DTensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]
