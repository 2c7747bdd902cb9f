"""The SMP v1 API: `import smpkit.torch as smp`.

::

    smp.init()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(model, tokens, targets):
        loss = F.cross_entropy(model(tokens), targets)
        model.backward(loss)
        return loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from smpkit.on_demand import names_on_demand
from smpkit.plan.mesh import CommGroup
from smpkit.torch import amp as amp
from smpkit.torch import api
from smpkit.torch import model as model
from smpkit.torch import nn as nn
from smpkit.torch import optimizers as optimizers
from smpkit.torch.api import *  # noqa: F403 - what it lists
from smpkit.torch.checkpoints.save_load import load, save
from smpkit.torch.data_parallel.sharded_parameters import register_parameter
from smpkit.torch.distributed.init import init, shutdown
from smpkit.torch.distributed.objects import (
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from smpkit.torch.distributed.signals import stop_requested
from smpkit.torch.launch import launch
from smpkit.torch.log import log, progress
from smpkit.torch.model import DistributedModel
from smpkit.torch.offloading import offload_report
from smpkit.torch.optim.gradient_norm import clip_grad_norm_
from smpkit.torch.optimizer import DistributedOptimizer
from smpkit.torch.placement.delayed import delay_param_initialization
from smpkit.torch.placement.manual import partition, set_partition
from smpkit.torch.recompute.api import checkpoint, checkpoint_sequential, set_activation_checkpointing
from smpkit.torch.run_summary import install as _end_with_summary
from smpkit.torch.step import StepOutput, step
from smpkit.torch.tensor_parallel.marking import model_creation, set_tensor_parallelism, tensor_parallelism
from smpkit.torch.tensor_parallel.registry import tp_register, tp_register_with_module

if TYPE_CHECKING:
    from smpkit.torch.checkpoints.huggingface import load_pretrained, save_pretrained
    from smpkit.torch.checkpoints.reader import CheckpointReader
    from smpkit.torch.checkpoints.resume import latest_checkpoint, resume_from_checkpoint
    from smpkit.torch.checkpoints.save import save_checkpoint

_end_with_summary()

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
TP_GROUP = CommGroup.TP_GROUP
PP_GROUP = CommGroup.PP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
TP_RANK = RankType.TP_RANK
PP_RANK = RankType.PP_RANK
RDP_RANK = RankType.RDP_RANK

__all__ = ["DistributedModel", "DistributedOptimizer", "StepOutput", "init", "shutdown", "step"]
__all__ += api.__all__
__all__ += ["DP_GROUP", "MP_GROUP", "PP_GROUP", "RDP_GROUP", "TP_GROUP", "WORLD", "CommGroup"]
__all__ += ["DP_RANK", "MP_RANK", "PP_RANK", "RDP_RANK", "TP_RANK", "WORLD_RANK", "RankType"]
__all__ += ["allgather", "barrier", "broadcast", "dp_barrier", "mp_barrier", "recv_from", "send"]
__all__ += ["delay_param_initialization", "model_creation", "partition", "register_parameter", "set_partition"]
__all__ += ["set_tensor_parallelism", "tensor_parallelism", "tp_register", "tp_register_with_module"]
__all__ += ["checkpoint", "checkpoint_sequential", "clip_grad_norm_", "offload_report", "set_activation_checkpointing"]
__all__ += ["CheckpointReader", "latest_checkpoint", "load", "resume_from_checkpoint", "save", "save_checkpoint"]
__all__ += ["launch", "load_pretrained", "log", "progress", "save_pretrained", "stop_requested"]
__all__ += ["amp", "nn", "optimizers"]

_ON_DEMAND: Final = {
    "CheckpointReader": "smpkit.torch.checkpoints.reader",
    "latest_checkpoint": "smpkit.torch.checkpoints.resume",
    "load_pretrained": "smpkit.torch.checkpoints.huggingface",
    "resume_from_checkpoint": "smpkit.torch.checkpoints.resume",
    "save_checkpoint": "smpkit.torch.checkpoints.save",
    "save_pretrained": "smpkit.torch.checkpoints.huggingface",
}
"""Names and their modules, imported when first used: torch's own checkpoints take every rank a second."""

__getattr__ = names_on_demand(__name__, _ON_DEMAND)


def __dir__() -> list[str]:
    return sorted(__all__)
