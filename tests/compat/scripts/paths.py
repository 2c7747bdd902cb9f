"""Every import path of SMP v1 that public code uses; run with one process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import torch

assert importlib.util.find_spec("smdistributed") is not None

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import __version__
from smdistributed.modelparallel.torch import *  # noqa: F403
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.step import StepOutput
from smdistributed.modelparallel.torch.step import step as step_decorator
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg

import smpkit.torch

# Versions are compared in both of these ways.
major, minor = (int(part) for part in __version__.split(".")[:2])
assert (major, minor) >= (1, 10)
assert int("".join(smdistributed.modelparallel.__version__.split(".")[:2])) >= 110

# The same objects under both names.
for name in smpkit.torch.__all__:
    assert getattr(smp, name) is getattr(smpkit.torch, name), name
assert DistributedModel is smp.model.DistributedModel is smpkit.torch.DistributedModel
assert state is smp.state is smp.state_mod.state
assert checkpoint is smp.patches.checkpoint.checkpoint is smpkit.torch.checkpoint
assert checkpoint_sequential is smpkit.torch.checkpoint_sequential
assert init is smpkit.torch.init  # noqa: F405  from the star

# Tensor parallelism, mixed precision, fused optimizers.
assert smp.nn.FusedLayerNorm is FusedLayerNorm is smpkit.torch.nn.FusedLayerNorm
for name in ("Linear", "Embedding", "TransformerLMHead", "Transformer", "TransformerLayer", "AttentionLayer"):
    assert issubclass(getattr(smp.nn, f"Distributed{name}"), smp.nn.DistributedModule)
assert smp.nn.FlashAttentionLayer is not None
assert smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2 is translate_state_dict_to_hf_gpt2
for family in ("gpt2", "bert", "roberta", "gptj", "gptneo", "gptneox"):
    translations = importlib.import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{family}")
    assert callable(getattr(translations, f"translate_state_dict_to_hf_{family}"))
    assert callable(getattr(translations, f"translate_hf_state_dict_to_smdistributed_{family}"))
assert smp.amp.GradScaler is smpkit.torch.amp.GradScaler
assert smp.optimizers.FusedLAMB is smp.optimizers.FusedLamb
assert smp.optimizers.FusedAdam is not smp.optimizers.FusedNovoGrad

# `step` is a decorator here and a module there.
import smdistributed.modelparallel.torch.step as step_path

assert step_decorator is smp.step is smpkit.torch.step is step_path
assert smp.step.StepOutput is StepOutput is smp.StepOutput
assert inspect.ismodule(importlib.import_module("smdistributed.modelparallel.torch.step"))
assert set(smp.__all__) <= set(dir(smp))

# A replicated parameter lies along no axis.
assert get_distribution_axis(torch.nn.Parameter(torch.zeros(2))) is None
assert rmsg("hello") == "hello"

# The launcher of AWS's images looks for the names of the classes in these modules.
for module in (smp.exceptions, importlib.import_module("smdistributed.modelparallel.backend.exceptions")):
    errors = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    assert errors
    assert all(issubclass(kind, Exception) for kind in errors)

# Where there is no GPU, what says `cuda` stays on the CPU.
if not torch.cuda.is_available():
    torch.cuda.set_device(smpkit.torch.core.runtime.device if smp.is_initialized() else 0)
    torch.cuda.synchronize()
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(0),
        torch.ones(2).to(torch.device("cuda", 1), torch.float32, True),
        torch.ones(2).to(dtype=torch.float64, device="cuda"),
        torch.ones(2).cuda(0),
        torch.ones(2).pin_memory(),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2, device="cuda").to(torch.device("cuda")).weight,
    ]
    assert [tensor.device.type for tensor in made] == ["cpu"] * len(made)
    assert made[5].dtype is torch.float64
    assert torch.cuda.memory_allocated() == 0
    torch.optim.SGD([torch.nn.Parameter(made[0])])  # loads the compiler, which looks at all functions of torch.cuda
