"""The state of this process in its job (`smp.state`): configuration, place, groups, device, model, optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.torch.core import devices
from smpkit.torch.core.context import Launch
from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress
from smpkit.torch.core.step_participants import StepParticipants


@dataclass(frozen=True, eq=False)
class Place:
    """Which rank this process is, and among how many; `smp.rank()` and its like say what each number means."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    mp_rank: int
    mp_size: int
    dp_rank: int
    dp_size: int
    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int
    rdp_rank: int
    rdp_size: int
    groups: Mapping[CommGroup, tuple[int, ...]]
    """The global ranks of this rank's group of each kind, ascending."""

    @classmethod
    def of(cls, launch: Launch, mesh: Mesh) -> Place:
        """Return the place that the launcher and the grid give this process."""
        groups = {kind: mesh.group(kind, launch.rank) for kind in CommGroup}
        numbers: dict[str, int] = {}
        for kind in set(CommGroup) - {CommGroup.WORLD}:
            axis = kind.name.removesuffix("_GROUP").lower()
            numbers[f"{axis}_rank"], numbers[f"{axis}_size"] = groups[kind].index(launch.rank), len(groups[kind])
        return cls(launch.rank, launch.world_size, launch.local_rank, launch.local_size, groups=groups, **numbers)


@dataclass(frozen=True)
class ModuleManager:
    """The part of SMP v1's object of this name that Hugging Face reads.

    Args:
        translate_functions: pairs of functions from a model's state dict to Hugging Face's and back. There is one pair
            where tensor parallelism has replaced modules; its second function changes nothing, since `load_state_dict`
            takes both forms.
    """

    translate_functions: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = ()


class WrappedModel(Protocol):
    """The part of `DistributedModel` that lower layers use; they cannot import the class."""

    module: nn.Module
    training: bool
    partitioned: bool
    is_prepared: bool
    engine: Any
    participants: StepParticipants
    placement: Any
    pipeline: Any
    data_parallel: Any
    offloading: Any

    def modules(self) -> Iterator[nn.Module]: ...
    def local_state_dict(self) -> dict[str, Any]: ...
    def local_parameters(self) -> Iterator[nn.Parameter]: ...
    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def local_buffers(self) -> Iterator[torch.Tensor]: ...
    def owns(self, parameter: torch.Tensor) -> bool: ...
    def check_update(self, parameters: Sequence[torch.Tensor]) -> None: ...
    def run_post_step_hooks(self) -> None: ...
    def step_inputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def prepare(self, body: Callable[..., Any], call: MicrobatchCall) -> None: ...


class WrappedOptimizer(Protocol):
    """The part of `DistributedOptimizer` that lower layers use."""

    optimizer: torch.optim.Optimizer
    masters: Any
    param_groups: list[dict[str, Any]]

    def refresh_masters(self) -> None: ...
    def drop_foreign_states(self) -> None: ...
    def scale_for_backward(self) -> float: ...
    def model_parameter(self, parameter: torch.Tensor) -> torch.Tensor: ...
    def local_state_dict(self, gather_if_shard: bool = ...) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class State(Place):
    """The process's place in the job, and what it trains; what `begin` sets raises UsageError before `smp.init()`."""

    cfg: ModelParallelConfig
    """The evaluated configuration, with defaults filled in."""
    launch: Launch
    """What the launcher told this process."""
    mesh: Mesh
    """The grid of all ranks."""
    object_group: dist.ProcessGroup
    """All ranks, for CPU tensors: the group of `smp.send`, `smp.barrier` and others."""
    process_groups: Mapping[CommGroup, dist.ProcessGroup]
    """This rank's process group of each kind."""

    def __init__(self) -> None:
        self.model: WrappedModel | None = None
        """The last model that was wrapped."""
        self.optimizer: WrappedOptimizer | None = None
        """The last optimizer that was wrapped."""
        self.has_several_optimizers = False
        """Whether an optimizer other than the last one has taken a step."""
        self.step: StepProgress | None = None
        """The `@smp.step` call that runs now."""
        self.tracing = False
        """Whether the step runs on tensors without data, to measure the model."""
        self.module_manager = ModuleManager()
        """Hugging Face's `save_pretrained` takes its translation of state dicts from it; set with the model."""
        self.start_hooks: list[Callable[[], object]] = []
        """Called at the end of `smp.init()`, by all ranks: they start what other modules do for the job."""
        self.reset_hooks: list[Callable[[], object]] = []
        """Called by `smp.shutdown()`: they reset what other modules keep as long as the process groups live."""
        self.end_hooks: list[Callable[[], Exception | None]] = []
        """Called before the job ends, while its store is there: they finish work, and return why that failed."""

    def begin(
        self,
        cfg: ModelParallelConfig,
        launch: Launch,
        mesh: Mesh,
        process_groups: Mapping[CommGroup, dist.ProcessGroup],
        object_group: dist.ProcessGroup,
    ) -> None:
        """Set what `smp.init()` has learnt of this process's place."""
        self.cfg, self.launch, self.mesh = cfg, launch, mesh
        self.process_groups, self.object_group = process_groups, object_group
        vars(self).update(vars(Place.of(launch, mesh)))

    def end(self) -> None:
        """Forget what `begin` has set, and the model and optimizer."""
        for name in _SET_BY_INIT:
            vars(self).pop(name, None)
        self.model = self.optimizer = self.step = None
        self.has_several_optimizers = False
        self.module_manager = ModuleManager()

    def __getattr__(self, name: str) -> Any:
        if name in _SET_BY_INIT:
            raise UsageError(
                "smp.init() has not been called", hint="call smp.init() first, before using any other smp call"
            )
        raise AttributeError(f"'State' object has no attribute '{name}'")

    @property
    def is_v1_script(self) -> bool:
        """Whether the script has imported SMP v1's name, and so expects v1's behaviour where ours differs."""
        return "smdistributed.modelparallel" in sys.modules

    @property
    def loss_scale(self) -> float:
        """What backward multiplies the loss by, and the optimizer's step takes out again."""
        return 1.0 if self.optimizer is None else self.optimizer.scale_for_backward()

    @property
    def initialized(self) -> bool:
        """Whether `smp.init()` has been called."""
        return "rank" in vars(self)

    @property
    def timeout(self) -> timedelta:
        """Deadline of every wait between ranks."""
        return timedelta(seconds=self.cfg.timeout_seconds)

    @property
    def device(self) -> torch.device:
        """The GPU this process uses now, or the CPU.

        Asked for at each use, because scripts call `torch.cuda.set_device(smp.local_rank())` after `smp.init()`.
        """
        self.rank  # noqa: B018 - raises before `smp.init()`
        return devices.current_device()

    def refuse_inside_step(self, call: str) -> None:
        """Refuse `call`, which uses or clears gradients, in a step in which backwards are still to come."""
        step = self.step
        if step is not None and (self.pp_size > 1 or step.num_microbatches > 1) and not self.tracing:
            raise UsageError(
                f"{call} was called inside a step, where the gradients of all microbatches are not there yet",
                hint="call `zero_grad` before the step, and what uses gradients after it",
            )

    def group(self, kind: CommGroup) -> list[int]:
        """Return the global ranks of this rank's group of a kind, ascending."""
        return list(self.groups[kind])

    def process_group(self, kind: CommGroup) -> dist.ProcessGroup:
        """Return this rank's group of a kind, for `torch.distributed`."""
        return self.process_groups[kind]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank, the names of the optimizer's parameters by their numbers in its state dict: the same on all."""
        if self.model is None or self.optimizer is None:
            raise UsageError("there is no model or no optimizer yet", hint="wrap both first")
        names = {id(parameter): name for name, parameter in self.model.module.named_parameters()}
        numbered = enumerate(parameter for group in self.optimizer.param_groups for parameter in group["params"])
        by_number = {index: names.get(id(self.optimizer.model_parameter(parameter))) for index, parameter in numbered}
        return [{index: name for index, name in by_number.items() if name is not None} for _ in range(self.tp_size)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """By tp_rank, the numbers of the optimizer's parameters in its state dict by their names."""
        return [{name: index for index, name in indices.items()} for indices in self.param_index_to_name_tp_group]


_SET_BY_INIT: Final = frozenset(Place.__annotations__) | frozenset(State.__annotations__)

state = State()
"""The one state of this process (`smp.state`)."""
