"""The state of this process in its job (`smp.state`): configuration, mesh, groups, device, model, optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.torch.core import devices
from smpkit.torch.core.context import Launch
from smpkit.torch.core.microbatches import MicrobatchCall, StepProgress
from smpkit.torch.core.step_participants import StepEngine, StepParticipants

__all__ = ["ModuleManager", "Runtime", "State", "WrappedModel", "WrappedOptimizer", "state"]


@dataclass(frozen=True)
class Runtime:
    """The result of `smp.init()`.

    Args:
        cfg: the evaluated configuration.
        launch: who this process is.
        mesh: the grid of all ranks.
        groups: this rank's process group of each kind.
        objects: all ranks, for CPU tensors: the group of `smp.send`, `smp.barrier` and others.
    """

    cfg: ModelParallelConfig
    launch: Launch
    mesh: Mesh
    groups: Mapping[CommGroup, dist.ProcessGroup]
    objects: dist.ProcessGroup


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
    """The part of `DistributedModel` that lower floors use; they cannot import the class."""

    module: nn.Module
    training: bool
    partitioned: bool
    is_prepared: bool
    engine: StepEngine
    participants: StepParticipants
    placement: Any
    pipeline: Any
    data_parallel: Any
    offloading: Any

    def modules(self) -> Iterator[nn.Module]: ...
    def local_state_dict(self) -> dict[str, Any]: ...
    def local_parameters(self) -> Iterator[nn.Parameter]: ...
    def local_buffers(self) -> Iterator[torch.Tensor]: ...
    def owns(self, parameter: torch.Tensor) -> bool: ...
    def check_backward(self, parameters: Iterable[torch.Tensor]) -> None: ...
    def run_post_step_hooks(self) -> None: ...
    def step_inputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def prepare(self, body: Callable[..., Any], call: MicrobatchCall) -> None: ...


class WrappedOptimizer(Protocol):
    """The part of `DistributedOptimizer` that lower floors use."""

    optimizer: torch.optim.Optimizer
    masters: Any
    param_groups: list[dict[str, Any]]

    def refresh_masters(self) -> None: ...
    def drop_foreign_states(self) -> None: ...
    def scale_for_backward(self) -> float: ...
    def model_parameter(self, parameter: torch.Tensor) -> torch.Tensor: ...
    def local_state_dict(self, gather_if_shard: bool = ...) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class State:
    """The process's place in the job; every attribute but the last four raises UsageError before `smp.init()`.

    What is asked for often looks at `runtime` itself, and lets `_ready` raise only if there is none: one frame less.
    """

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        """Set by `smp.init()`; the other attributes read it."""
        self.model: WrappedModel | None = None
        """The last model that was wrapped."""
        self.optimizer: WrappedOptimizer | None = None
        """The last optimizer that was wrapped."""
        self.step: StepProgress | None = None
        """The `@smp.step` call that runs now."""
        self.tracing = False
        """Whether the step runs on tensors without data, to measure the model."""
        self.module_manager = ModuleManager()
        """Hugging Face's `save_pretrained` takes its translation of state dicts from it; set with the model."""
        self.reset_hooks: list[Callable[[], object]] = []
        """Called by `smp.shutdown()`: they reset what other modules keep as long as the process groups live."""
        self.end_hooks: list[Callable[[], Exception | None]] = []
        """Called before the job ends, while its store is there: they finish work, and return why that failed."""

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
        return self.runtime is not None

    @property
    def _ready(self) -> Runtime:
        if self.runtime is None:
            raise UsageError(
                "smp.init() has not been called", hint="call smp.init() first, before using any other smp call"
            )
        return self.runtime

    @property
    def cfg(self) -> ModelParallelConfig:
        """The evaluated configuration, with defaults filled in."""
        return (self.runtime or self._ready).cfg

    @property
    def mesh(self) -> Mesh:
        """The grid of all ranks."""
        return (self.runtime or self._ready).mesh

    @property
    def launch(self) -> Launch:
        """What the launcher told this process."""
        return (self.runtime or self._ready).launch

    @property
    def rank(self) -> int:
        """Global rank."""
        return (self.runtime or self._ready).launch.rank

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return (self.runtime or self._ready).launch.world_size

    @property
    def local_rank(self) -> int:
        """Rank among those of this host."""
        return (self.runtime or self._ready).launch.local_rank

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        return (self.runtime or self._ready).launch.local_size

    @property
    def object_group(self) -> dist.ProcessGroup:
        """All ranks, for CPU tensors."""
        return (self.runtime or self._ready).objects

    @property
    def mp_size(self) -> int:
        """How many ranks together hold one model."""
        return (self.runtime or self._ready).mesh.mp_size

    @property
    def dp_size(self) -> int:
        """How many ranks hold (parts of) the same pipeline partition."""
        return (self.runtime or self._ready).mesh.dp_size

    @property
    def pp_size(self) -> int:
        """How many pipeline partitions there are."""
        return (self.runtime or self._ready).mesh.pp_size

    @property
    def tp_size(self) -> int:
        """How many ranks share distributed modules."""
        return (self.runtime or self._ready).mesh.tp_size

    @property
    def rdp_size(self) -> int:
        """How many exact replicas there are."""
        return (self.runtime or self._ready).mesh.rdp_size

    @property
    def timeout(self) -> timedelta:
        """Deadline of every wait between ranks."""
        return timedelta(seconds=self.cfg.timeout_seconds)

    @property
    def device(self) -> torch.device:
        """The GPU this process uses now, or the CPU.

        Asked for at each use, because scripts call `torch.cuda.set_device(smp.local_rank())` after `smp.init()`.
        """
        if self.runtime is None:  # checked here: this is asked for often
            self._ready  # noqa: B018 - raises
        return devices.current_device()

    def group(self, kind: CommGroup) -> list[int]:
        """Return the global ranks of this rank's group of a kind, ascending."""
        return list(self.mesh.group(kind, self.rank))

    def process_group(self, kind: CommGroup) -> dist.ProcessGroup:
        """Return this rank's group of a kind, for `torch.distributed`."""
        return self._ready.groups[kind]

    def index(self, kind: CommGroup) -> int:
        """Return this rank's position in its group of a kind."""
        return self.mesh.index(kind, self.rank)

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank, the names of the optimizer's parameters by their numbers in its state dict: the same on all."""
        if self.model is None or self.optimizer is None:
            raise UsageError("there is no model or no optimizer yet", hint="wrap both first")
        names = {id(parameter): name for name, parameter in self.model.module.named_parameters()}
        numbered = enumerate(each for group in self.optimizer.param_groups for each in group["params"])
        found = {index: names.get(id(self.optimizer.model_parameter(each))) for index, each in numbered}
        return [{index: name for index, name in found.items() if name is not None} for _ in range(self.tp_size)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """By tp_rank, the numbers of the optimizer's parameters in its state dict by their names."""
        return [{name: index for index, name in each.items()} for each in self.param_index_to_name_tp_group]

    @property
    def mp_rank(self) -> int:
        """Position among the ranks that together hold one model."""
        return self.index(CommGroup.MP_GROUP)

    @property
    def dp_rank(self) -> int:
        """Position among the ranks that hold (parts of) the same pipeline partition."""
        return self.index(CommGroup.DP_GROUP)

    @property
    def pp_rank(self) -> int:
        """Pipeline partition."""
        return self.mesh.coordinates(self.rank).pp

    @property
    def tp_rank(self) -> int:
        """Position among the ranks that share distributed modules."""
        return self.mesh.coordinates(self.rank).tp

    @property
    def rdp_rank(self) -> int:
        """Position among exact replicas."""
        return self.mesh.coordinates(self.rank).rdp


state = State()
"""The one state of this process (`smp.state`)."""
