"""What `smp.DistributedModel` takes."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.model_state import ModelState
from smpkit.torch.offload_model.model import OffloadModel
from smpkit.torch.precision import half_dtype
from smpkit.torch.state import state

__all__ = ["check_arguments"]


def check_arguments(
    module: nn.Module, trace_device: str, trace_execution_times: bool, backward_passes: int, bucket_cap_mb: float
) -> None:
    """Refuse a model or an option of `smp.DistributedModel` that cannot work.

    Raises:
        UsageError: it is no module, wrapped already, a lazy one without shapes, or an option is out of its range.
        UnsupportedError: an OffloadModel in it does not go with the configuration.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedModel wraps a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, ModelState):
        raise UsageError("this model is a DistributedModel already", hint="wrap a model once")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "this model is wrapped in DistributedDataParallel", hint="pass the plain model and set `ddp: True`"
        )
    if state.model is not None:
        raise UsageError(
            "there is a DistributedModel already, and a script has one",
            hint="put all models that are trained together into one torch.nn.Module",
        )
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(each):
            raise UsageError(
                f"`{name}` has no shape yet: its module is a lazy one",
                hint="call the model once with a batch, on all ranks with the same seed, before it is wrapped",
            )
    for part in module.modules():
        if isinstance(part, OffloadModel):
            _check_offload_model(part)
    if trace_device not in ("gpu", "cpu"):
        raise UsageError(f"trace_device must be one of `gpu`, `cpu`, got `{trace_device}`")
    if trace_device == "cpu" and trace_execution_times:
        raise UsageError(
            "trace_execution_times measures on the GPU, but trace_device is `cpu`",
            hint="pass trace_device='gpu' or trace_execution_times=False",
        )
    if backward_passes < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, got {backward_passes}")
    if bucket_cap_mb <= 0:
        raise UsageError(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}")


def _check_offload_model(model: OffloadModel) -> None:
    cfg = state.cfg
    if state.pp_size > 1 or state.tp_size > 1 or cfg.sharded_data_parallel_degree > 1 or half_dtype(cfg) is not None:
        raise UnsupportedError(
            "there is an OffloadModel in this model, which moves its own weights: in a DistributedModel it works with"
            " data parallelism only",
            hint="remove pipeline, tensor and sharded data parallelism, fp16 and bf16, or use the plain model",
        )
    if state.dp_size > 1:
        model.expect_averaging("smp.DistributedModel")
