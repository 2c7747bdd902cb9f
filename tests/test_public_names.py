"""What is public is listed, sorted, and there."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import smpkit
import smpkit.errors
import smpkit.testing
import smpkit.testing.simulated_device
import smpkit.torch

DOCUMENTED = """
    init is_initialized is_tracing shutdown rank size local_rank local_size mp_rank mp_size dp_rank dp_size pp_rank
    pp_size tp_rank tp_size rdp_rank rdp_size get_mp_group get_dp_group get_tp_group get_pp_group get_rdp_group
    get_world_process_group get_mp_process_group get_dp_process_group get_tp_process_group get_pp_process_group
    get_rdp_process_group CommGroup RankType WORLD MP_GROUP DP_GROUP TP_GROUP PP_GROUP RDP_GROUP WORLD_RANK MP_RANK
    DP_RANK TP_RANK PP_RANK RDP_RANK send recv_from broadcast allgather barrier dp_barrier mp_barrier step StepOutput
    DistributedModel DistributedOptimizer partition set_partition
    delay_param_initialization save load save_checkpoint resume_from_checkpoint
    latest_checkpoint save_pretrained load_pretrained CheckpointReader stop_requested state
    checkpoint checkpoint_sequential set_activation_checkpointing offload_report progress
    clip_grad_norm_ log launch
    model_creation set_tensor_parallelism tensor_parallelism tp_register tp_register_with_module register_parameter
    amp nn optimizers
""".split()  # noqa: SIM905


def test_the_runtime_has_the_documented_names_and_no_others() -> None:
    assert sorted(DOCUMENTED) == sorted(smpkit.torch.__all__) == dir(smpkit.torch)


@pytest.mark.parametrize(
    "module",
    [smpkit, smpkit.errors, smpkit.testing, smpkit.testing.simulated_device, smpkit.torch],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_there(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_importing_smpkit_imports_neither_torch_nor_boto3() -> None:
    code = (
        "import smpkit, sys; print([name for name in ('torch', 'boto3', 'pydantic', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_runtime_loads_none_of_torch_that_only_some_jobs_use() -> None:
    """Sharded data parallelism and checkpoints: they took every rank, and every tool, more than a second."""
    code = (
        "import sys, smpkit.torch as smp;"
        " slow = ('torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch.distributed.fsdp');"
        " print([name for name in slow if name in sys.modules], callable(smp.save_checkpoint))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[] True"
