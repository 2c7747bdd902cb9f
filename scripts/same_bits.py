"""Compare the bits of losses, gradients and weights with those that another commit gives on this machine.

Nothing is recorded, because other CPUs round differently. The ways to train are this checkout's in both runs; smpkit is
the commit's in one of them. Exit status: 0 if all bits are equal, 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import smpkit
import smpkit.torch as smp
from smpkit.testing import run_ranks
from tests.models import CASES, Case, token_step, tokens
from tests.transparency.test_checkpointing import Stacked, autocast_step, checkpoint_stack

ROOT = Path(__file__).parents[1]
Results = dict[str, Any]
"""What came out on a rank, by name."""
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-4)
LAMB = partial(smp.optimizers.FusedLAMB, lr=0.05, max_grad_norm=0.1)
NOVOGRAD = partial(smp.optimizers.FusedNovoGrad, lr=0.01, norm_type=0, weight_decay=0.1)
LOSS_SCALING = {"init_scale": 2.0**22, "scale_window": 2, "scale_factor": 4.0, "min_scale": 1.0, "delayed_shift": 1}


def train(
    case: Case,
    rule: Callable[..., torch.optim.Optimizer] = SGD,
    accumulation: int = 1,
    clip: float | None = None,
    divided: bool = False,
    checkpointed: str | None = None,
    ddp_options: dict[str, Any] | None = None,
    **config: Any,
) -> Results:
    """Train a model over the ranks that `config` describes; return what came out on this rank."""
    smp.init({"ddp": True, "microbatches": 4, **config})
    torch.manual_seed(7)
    module: Any = case.build().to(case.dtype)
    if divided:
        smp.set_tensor_parallelism(module)
    options = {"backward_passes_per_step": accumulation, "bucket_cap_mb": 0.001, **(ddp_options or {})}
    model = smp.DistributedModel(module, **options)
    if checkpointed is not None:
        checkpoint_stack(checkpointed, module)
    half = "fp16" in config or "bf16" in config
    scaling: Any = {"dynamic_loss_scale": True, "dynamic_loss_args": LOSS_SCALING} if half else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = smp.DistributedOptimizer(rule(trained), **scaling)
    train_step = smp.step(case.step)
    results: Results = {}
    replica = smp.rdp_rank() if "prescaled_batch" in config else smp.dp_rank()
    # A third step of a pipeline may follow another schedule, chosen by what the second one took, and add up otherwise.
    for step in range(6 if half else 2 if smp.pp_size() > 1 else 3):
        optimizer.zero_grad()
        for turn in range(accumulation):
            generator = torch.Generator().manual_seed(100 + 10 * step + turn + 1000 * replica)
            outputs = tree_leaves(train_step(model, *case.batch(8, generator)))
            for number, output in enumerate(outputs):
                results[f"output {number} of step {step}, batch {turn}"] = tree_leaves(
                    getattr(output, "outputs", output)
                )
        if clip is not None:
            results[f"gradient norm of step {step}"] = smp.clip_grad_norm_(model, clip)
        optimizer.step()
        if half:
            results[f"loss scale of step {step}"] = optimizer.loss_scale
    for name, parameter in model.local_named_parameters():
        results |= {f"weight {name}": parameter, f"gradient of {name}": parameter.grad}
    results |= {f"buffer {name}": buffer for name, buffer in model.local_named_buffers()}
    smp.shutdown()
    return results


def train_offloaded(checkpoint: bool, microbatches: int, slices: int) -> Results:
    """Train an `OffloadModel` on a device that the CPU emulates."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(0.2), nn.Linear(24, 24), nn.Linear(24, 1)]
    with mock.patch("smpkit.torch.offload_model.model.is_the_host", return_value=False):
        model = smpkit.OffloadModel(nn.Sequential(*layers), "cpu", "cpu", slices, checkpoint, microbatches)
    optimizer = smpkit.OffloadOptimizer(model, torch.optim.AdamW, max_grad_norm=0.1, lr=1e-3, weight_decay=0.1)
    results: Results = {}
    for step in range(3):
        results[f"loss of step {step}"] = loss = model(torch.randn(7, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return results | {f"weight {name}": weight for name, weight in model.state_dict().items()}


def token_model() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(11, 8), *blocks, nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 11))


def language_model() -> nn.Module:
    sizes: Any = {"num_layers": 2, "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16}
    sizes |= {"intermediate_size": 24, "vocab_size": 11, "num_positions": 5, "causal_mask_size": 5}
    return smp.nn.DistributedTransformerLMHead(**sizes, attention_dropout_prob=0.1, initializer_range=0.2)


def language_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model((ids, None, None, None, labels))[0]
    model.backward(loss)
    return loss


NET = Case(token_model, tokens, token_step)
HALF_NET = Case(token_model, tokens, token_step, torch.float32)
LANGUAGE = Case(language_model, tokens, language_step)
FEW = ("Sequential", "skip connections", "tied modules", "tied neighbours", "BatchNorm", "several backwards")
DEEP = ("Sequential", "skip connections", "parameters of the root", "encoder and decoder")
PIPELINES = ((2, 2, 1, CASES), (2, 2, 2, DEEP), (4, 4, 1, FEW), (4, 2, 1, FEW))
"""Ranks, stages, virtual stages per rank, models."""
PP2: dict[str, Any] = {"pipeline_parallel_degree": 2, "pipeline": "simple"}
TP2: dict[str, Any] = {"tensor_parallel_degree": 2, "divided": True}
SHARDED = {"shard_optimizer_state": True}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "dp2": (2, {}),
    "dp2, reduced at the end": (2, {"ddp_options": {"overlapping_allreduce": False}}),
    "dp2, sharded state": (2, SHARDED),
    "pp2": (2, PP2),
    "pp2 dp2, sharded state": (4, {**PP2, **SHARDED}),
    "tp2": (2, TP2),
    "tp2, memory": (2, {**TP2, "optimize": "memory"}),
    "tp2, prescaled": (2, {**TP2, "prescaled_batch": True}),
    "tp2 dp2, sharded state": (4, {**TP2, **SHARDED}),
    "pp2 tp2": (4, {**PP2, **TP2}),
}


def ways(size: int) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Yield the ways to train on a number of ranks, with their names."""
    for name, world in ((name, world) for name, (ranks, world) in WORLDS.items() if ranks == size):
        yield f"{name}, AdamW, clipped", partial(train, NET, ADAMW, clip=0.3, **world)
        if size < 4:  # LAMB with sharded state fails over tensor and data parallelism
            yield f"{name}, LAMB", partial(train, NET, LAMB, **world)
            yield f"{name}, NovoGrad, accumulated", partial(train, NET, NOVOGRAD, accumulation=2, **world)
        yield f"{name}, fp16, clipped", partial(train, HALF_NET, ADAMW, clip=0.5, fp16=True, **world)
        yield f"{name}, bf16, accumulated", partial(train, HALF_NET, accumulation=2, bf16=True, **world)
        yield f"{name}, language model of smp.nn", partial(train, LANGUAGE, **world)
    for ranks, stages, virtual, names in PIPELINES:
        for schedule in ("simple", "interleaved", "zero_bubble") if ranks == size else ():
            config: dict[str, Any] = {
                "pipeline_parallel_degree": stages,
                "virtual_pipeline_degree": virtual,
                "pipeline": schedule,
            }
            for name in names if virtual == 1 or schedule != "simple" else ():
                yield f"pp{stages}, {virtual} virtual, {schedule}, {name}", partial(train, CASES[name], **config)
    if size == 1:
        yield from ((f"plain, {name}", partial(train, case)) for name, case in CASES.items())
        for how in ((False, 1, 2), (True, 1, 2), (False, 3, 5), (True, 3, 5)):
            yield f"OffloadModel, checkpoint, microbatches, slices {how}", partial(train_offloaded, *how)
    if size == 2:
        yield from ((f"dp2, {name}", partial(train, CASES[name])) for name in FEW)
        yield "dp2, sharded parameters", partial(train, NET, sharded_data_parallel_degree=2)
    for strategy in ("each", "contiguous", "group_2") if size < 4 else ():
        for horizon in (None, 1, 2, 4):
            case = Case(Stacked(0.3, tied=horizon != 1), tokens, autocast_step, torch.float32)
            config = {"pipeline_parallel_degree": size, "active_microbatches": size}
            if horizon is not None:
                config |= {"offload_activations": True, "activation_loading_horizon": horizon}
            name = f"pp{size}, checkpointing {strategy}, offloading {horizon}"
            yield name, partial(train, case, checkpointed=strategy, **config)


def hashed(value: Any) -> str:
    """Return the hash of a tensor's bytes, with its type and shape; other values as they are written."""
    if isinstance(value, list):
        return str([hashed(each) for each in value])
    if not isinstance(value, Tensor):
        return repr(value)
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{local.dtype} {[*local.shape]} {hashlib.sha256(data).hexdigest()[:16]}"


def run(size: int, only: str) -> dict[str, str]:
    """Return the hash of each value that comes out on this rank, by the way to train and its name."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    hashes: dict[str, str] = {}
    for way, train_so in ways(size):
        if only in way:
            rank = f"{way}: rank {os.environ['RANK']}"
            try:
                hashes |= {f"{rank}, {name}": hashed(value) for name, value in train_so().items()}
            except Exception as error:
                raise AssertionError(f"`{way}` fails") from error
    return hashes


def write(file: str, only: str) -> None:
    """Write what all ranks give with the smpkit of the current folder."""
    assert Path(smpkit.__file__).is_relative_to(Path.cwd()), smpkit.__file__
    ranks = [rank for size in (1, 2, 4) for rank in run_ranks(run, size, size, only, timeout=3600)]
    Path(file).write_text(json.dumps({name: value for rank in ranks for name, value in rank.items()}))


def hashes_of(tree: Path, only: str) -> dict[str, str]:
    """Return what all ranks give with the smpkit of a folder."""
    with tempfile.NamedTemporaryFile() as file:
        code = f"from scripts.same_bits import write; write({file.name!r}, {only!r})"
        paths = map(str, (tree, tree / "estimator", tree / "container", ROOT))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True)
        hashes: dict[str, str] = json.loads(file.read())
        return hashes


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/same-bits", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--against", metavar="COMMIT", required=True)
    parser.add_argument("--only", metavar="TEXT", default="", help="ways to train with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", options.against, "smpkit", "estimator", "container"]
        packed = subprocess.run(archive, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        before, now = hashes_of(Path(folder).resolve(), options.only), hashes_of(ROOT, options.only)
    different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in different:
        print(f"differs: {name}")
    changed, all_ways = ({name.partition(": ")[0] for name in names} for names in (different, now))
    print(f"{len(changed)} of {len(all_ways)} ways to train give other bits than {options.against}")
    return 1 if different or not now else 0


if __name__ == "__main__":
    sys.exit(main())
