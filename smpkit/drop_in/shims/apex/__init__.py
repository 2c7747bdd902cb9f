"""What public scripts import of NVIDIA's Apex. A few names compute; the others refuse when they are called.

There is no `apex.normalization`: libraries such as transformers use it wherever they can import it.
"""

import sys
from types import ModuleType

from smpkit.drop_in.removed_names import announce, refusing

announce("apex")

_REFUSED = {
    "fp16_utils": '`"fp16": true` in the model-parallel parameters, or torch.autocast',
    "optimizers": "smp.optimizers or torch.optim",
    "parallel": '`"ddp": true` in the model-parallel parameters, or torch.nn.parallel and torch.nn.SyncBatchNorm',
    "parallel.distributed": "torch.distributed",
}
"""Modules of which every name can be imported, and what to use instead."""

for _name, _instead in _REFUSED.items():
    _module = sys.modules[f"apex.{_name}"] = ModuleType(f"apex.{_name}")
    setattr(_module, "__getattr__", refusing(f"apex.{_name}", _instead))  # noqa: B010  a module declares no names
fp16_utils, optimizers, parallel = (sys.modules[f"apex.{_name}"] for _name in ("fp16_utils", "optimizers", "parallel"))
vars(fp16_utils)["__all__"] = [  # of `from apex.fp16_utils import *`
    *("BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler", "clip_grad_norm"),
    *("convert_module", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads"),
    *("network_to_half", "prep_param_lists", "to_python_float", "tofp16"),
]

from . import amp, multi_tensor_apply  # noqa: E402

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "optimizers", "parallel"]
