"""Bit hashes of what training gives over a grid of ways to train: losses, gradients and weights after a few steps.

CPUs with other instruction sets round elsewhere. So hashes hold for one kind of machine, and elsewhere are compared
with those that another commit gives there.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer
from tests.goldens import adapter
from tests.goldens.items import DETAIL, Items
from tests.models import CASES, Case
from tests.ranks import run_ranks
from tests.transparency import checkpointed_models, models

__all__ = ["collect", "machine", "settings"]

STEPS, BATCH = 3, 8
PIPELINE_STEPS = 2
"""A third step may follow another schedule, by what the second one took: tied gradients are then added up otherwise."""
WORLDS = (1, 2, 4)
_FLAGS = ("amx_bf16", "avx2", "avx512_bf16", "avx512_fp16", "avx512f", "avx512_vnni", "avx_vnni", "asimd", "sve")

Found = dict[str, Any]
"""By name, what came out on a rank: `output of step 0`, `gradient of head.weight`, `head.weight`."""
Setting = Callable[[], Found]


def machine() -> dict[str, str]:
    """Return what decides how this machine rounds."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    fields = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    flags = {*values.get("flags", values.get("Features", "")).split()}
    return {
        "architecture": platform.machine(),
        "cpu": values.get("vendor_id", values.get("CPU implementer", "unknown")),
        "cpu capability of torch": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(flag for flag in _FLAGS if flag in flags),
        "torch": torch.__version__,
    }


def collect() -> Items:
    items: Items = {}
    for size in WORLDS:
        ranks = run_ranks(_run, size, size, timeout=900)
        for name in ranks[0]:
            items[f"{size} rank{'s' * (size > 1)}: {name}"] = _item([rank[name] for rank in ranks])
    return items


def settings(size: int) -> dict[str, Setting]:
    """Return every way to train on a number of ranks."""
    return dict({1: _on_one, 2: _on_two, 4: _on_four}[size]())


def _run(size: int) -> dict[str, dict[str, str]]:
    logging.disable(logging.CRITICAL)
    return {name: _hashed(name, setting) for name, setting in settings(size).items()}


def _hashed(name: str, setting: Setting) -> dict[str, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {key: _hash(value) for key, value in setting().items()}
    except BaseException as error:
        raise AssertionError(f"`{name}` failed") from error


def _item(ranks: list[dict[str, str]]) -> dict[str, Any]:
    """Return one hash each of outputs, gradients and weights of all ranks, and in detail each of them."""
    detail = {f"{name} on rank {rank}": value for rank, found in enumerate(ranks) for name, value in found.items()}
    kinds: dict[str, list[str]] = {"outputs": [], "gradients": [], "weights": []}
    for name, value in detail.items():
        kind = {"output": "outputs", "gradient": "gradients"}.get(name.split(" ", 1)[0], "weights")
        kinds[kind].append(f"{name}: {value}")
    item = {kind: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for kind, lines in kinds.items() if lines}
    return {**item, DETAIL: detail}


def _hash(value: Any) -> str:
    """Return the hash of a tensor's raw bytes, with its type and shape; other values as they are written."""
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {[*value.shape]} {hashlib.sha256(data).hexdigest()[:16]}"


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Give the leaves of what a step returned."""
    if isinstance(value, smp.StepOutput):
        value = list(value.outputs)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name} {key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name} {index}")
    else:
        yield name, value


def _held(model: smp.DistributedModel) -> Found:
    """Return the gradients and weights, and the buffers, that this rank holds."""
    found: Found = {}
    for name, parameter in model.local_named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else _local(parameter.grad)
        found[f"weight {name}"] = _local(parameter)
    for name, buffer in model.local_named_buffers():
        found[f"weight {name} (buffer)"] = _local(buffer)
    return found


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- ways to train ----------------------------------------------------------------------------------------------------


def _num_steps(config: Mapping[str, Any]) -> int:
    return STEPS if config.get("pipeline_parallel_degree", 1) == 1 else PIPELINE_STEPS


def _case(case: Case, **config: Any) -> Setting:
    """Train a model of the pipeline tests."""

    def train() -> Found:
        smp.init({"ddp": True, "microbatches": 4, **config})
        torch.manual_seed(7)
        model = smp.DistributedModel(case.build().to(case.dtype))
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.05, momentum=0.9))
        step = smp.step(case.step)
        found: Found = {}
        for number in range(_num_steps(config)):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 + number + 1000 * smp.dp_rank())
            found |= _flat(step(model, *case.batch(BATCH, generator)), f"output of step {number}")
            optimizer.step()
        found |= _held(model)
        smp.shutdown()
        return found

    return train


@smp.step
def _net_step(model: Any, tokens: Tensor, targets: Tensor, divisor: int) -> Tensor:
    loss = models.loss_of(lambda x: model(x).float(), tokens, targets)  # type: ignore[arg-type]
    model.backward(loss / divisor)
    return loss


@smp.step
def _net_step64(model: Any, tokens: Tensor, targets: Tensor, divisor: int) -> Tensor:
    loss = models.loss_of(model, tokens, targets)
    model.backward(loss / divisor)
    return loss


class Marked(nn.Module):
    """What tensor parallelism distributes: an embedding, linear layers and a head, and a layer that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.TOKENS, models.WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(4)
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, models.TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.head(self.frozen(x))
        return result


def _net(
    build: Callable[[], nn.Module] = models.Net,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    marked: bool = False,
    kind: str = "AdamW",
    wrapping: Mapping[str, Any] | None = None,
    **config: Any,
) -> Setting:
    """Train a small model of tokens, with everything that replicas, half precision and sharding do."""

    def train() -> Found:
        smp.init({"ddp": True, **config})
        half = config.get("fp16") or config.get("bf16")
        torch.manual_seed(7)
        module = build() if half else build().double()
        if marked:
            smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(
            module, **{"backward_passes_per_step": accumulation, "bucket_cap_mb": 0.001, **(wrapping or {})}
        )
        rule = {
            "AdamW": lambda given: torch.optim.AdamW(given, lr=0.05, weight_decay=0.1, eps=1e-4),
            "SGD": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9),
            "LAMB": lambda given: smp.optimizers.FusedLAMB(given, lr=0.05, max_grad_norm=0.1),
            "NovoGrad": lambda given: smp.optimizers.FusedNovoGrad(given, lr=0.01, norm_type=0, weight_decay=0.1),
        }[kind]
        scaling: Any = {}
        if half:
            args = {"init_scale": 2.0**22, "scale_window": 2, "scale_factor": 4.0, "min_scale": 1.0, "delayed_shift": 1}
            scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": args}
        optimizer = smp.DistributedOptimizer(rule(model.parameters()), **scaling)
        step_function = _net_step if half else _net_step64
        found: Found = {}
        for step in range(2 * STEPS if half else _num_steps(config)):
            optimizer.zero_grad()
            for turn in range(accumulation):
                tokens, targets = models.batch(step * accumulation + turn)
                prescaled = config.get("prescaled_batch", False)
                first, count = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
                mine = slice(first, None, count)
                output = step_function(model, tokens[mine], targets[mine], accumulation)
                found |= _flat(output, f"output of step {step} {turn}")
            if clip is not None:
                found[f"output of step {step}, norm"] = smp.clip_grad_norm_(model, clip)
            optimizer.step()
            if half:
                found[f"output of step {step}, loss scale"] = optimizer.loss_scale
        found |= _held(model)
        smp.shutdown()
        return found

    return train


def language_model() -> nn.Module:
    return smp.nn.DistributedTransformerLMHead(
        num_layers=2,
        num_attention_heads=4,
        attention_head_size=4,
        hidden_size=16,
        intermediate_size=24,
        vocab_size=models.TOKENS,
        num_positions=models.CONTEXT,
        attention_dropout_prob=0.1,
        hidden_dropout_prob=0.1,
        initializer_range=0.2,
        use_normal_initialization=True,
        causal_mask_size=models.CONTEXT,
        pre_layernorm=True,
        post_layernorm=False,
    ).double()


@smp.step
def _language_step(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model((tokens, None, None, None, tokens))[0]
    model.backward(loss)
    return loss


def _language(**config: Any) -> Setting:
    """Train a transformer of `smp.nn`, with dropout."""

    def train() -> Found:
        smp.init({"ddp": True, **config})
        torch.manual_seed(7)
        model = smp.DistributedModel(language_model())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        found: Found = {}
        for step in range(_num_steps(config)):
            optimizer.zero_grad()
            tokens, _ = models.batch(step)
            prescaled = config.get("prescaled_batch", False)
            first, count = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
            found |= _flat(_language_step(model, tokens[first::count].contiguous()), f"output of step {step}")
            optimizer.step()
        found |= _held(model)
        smp.shutdown()
        return found

    return train


def _checkpointed(variant: checkpointed_models.Variant, degree: int) -> Setting:
    """Train with checkpointed layers, and with one schedule: no deeper one fits."""

    def train() -> Found:
        options = {**variant.options, "active_microbatches": degree}
        with checkpointed_models.world(degree, variant.microbatches, options):
            torch.manual_seed(7)
            module = checkpointed_models.Model(variant)
            model = smp.DistributedModel(module)
            if variant.strategy is not None:
                smp.set_activation_checkpointing(module.layers, strategy=variant.strategy)
            found = checkpointed_models.run(
                model, checkpointed_models.train_step_of(variant), checkpointed_models.batch
            )
        losses = {f"output of step {step}": loss for step, loss in enumerate(found.pop("losses"))}
        named = {name if name.startswith("gradient of") else f"weight {name}": each for name, each in found.items()}
        return losses | named

    return train


def _offload_model(*, checkpoint: bool, microbatches: int, slices: int, ours: bool, device: bool) -> Setting:
    def train() -> Found:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(0.2), nn.Linear(24, 24), nn.ReLU()]
        module = nn.Sequential(*layers, nn.Linear(24, 1))
        cpu = torch.device("cpu")
        links = adapter.emulated_links() if device else None
        model = OffloadModel(copy.deepcopy(module), cpu, cpu, slices, checkpoint, microbatches, links=links)
        if ours:
            optimizer: Any = OffloadOptimizer(model, torch.optim.AdamW, max_grad_norm=0.1, lr=1e-3, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        found: Found = {}
        for step in range(STEPS):
            loss = model(torch.randn(7, 6)).square().mean()
            loss.backward()
            found[f"output of step {step}"] = loss.detach()
            if not ours:
                found |= {f"gradient of {name} in step {step}": p.grad for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        return found | {f"weight {name}": each.detach().clone() for name, each in model.state_dict().items()}

    return train


# --- the grid ---------------------------------------------------------------------------------------------------------

_FEW = ("Sequential", "skip connections", "tied modules", "tied neighbours", "BatchNorm", "several backwards")
_PIPELINES: dict[str, dict[str, Any]] = {
    "simple": {"pipeline": "simple"},
    "interleaved": {"pipeline": "interleaved"},
    "zero_bubble": {"pipeline": "zero_bubble"},
}
_VIRTUAL: dict[str, dict[str, Any]] = {
    "2 virtual stages": {"virtual_pipeline_degree": 2},
    "zero_bubble, 2 virtual stages": {"pipeline": "zero_bubble", "virtual_pipeline_degree": 2},
}
_DEEP = ("Sequential", "skip connections", "parameters of the root", "encoder and decoder")


def _variants() -> dict[str, checkpointed_models.Variant]:
    make = checkpointed_models.Variant
    return {
        "none": make(None, 4, dropout=0.3),
        "each layer": make("each", 4, dropout=0.3),
        "contiguous": make("contiguous", 4, tied=True),
        "group_2, autocast": make("group_2", 4, autocast=True, dropout=0.3, frozen=True),
        "each layer, offloading, horizon 1": make("each", 4, dropout=0.3, horizon=1),
        "contiguous, offloading, horizon 2": make("contiguous", 4, autocast=True, horizon=2),
        "group_2, offloading, horizon 4": make("group_2", 4, tied=True, horizon=4),
    }


def _halves(**config: Any) -> Iterator[tuple[str, Setting]]:
    yield "fp16", _net(fp16=True, microbatches=2, clip=0.5, **config)
    yield "bf16, accumulated", _net(bf16=True, microbatches=2, accumulation=2, kind="SGD", **config)


def _on_one() -> Iterator[tuple[str, Setting]]:
    for name, case in CASES.items():
        yield f"plain, {name}", _case(case)
    yield "plain, 1 microbatch", _net()
    yield "plain, accumulated and clipped", _net(accumulation=2, clip=0.3, microbatches=2)
    for kind in ("SGD", "LAMB", "NovoGrad"):
        yield f"plain, {kind}", _net(kind=kind, microbatches=2)
    yield "plain, language model of smp.nn", _language(microbatches=2)
    yield from ((f"plain, {name}", setting) for name, setting in _halves())
    for name, variant in _variants().items():
        yield f"checkpointing: {name}", _checkpointed(variant, 1)
    for checkpoint in (False, True):
        for microbatches, slices, ours, device in ((1, 2, False, False), (3, 5, True, False), (3, 2, True, True)):
            name = (
                f"{slices} slices, {microbatches} microbatches, checkpoint {checkpoint}, ours {ours}, device {device}"
            )
            yield (
                f"OffloadModel: {name}",
                _offload_model(
                    checkpoint=checkpoint, microbatches=microbatches, slices=slices, ours=ours, device=device
                ),
            )


def _on_two() -> Iterator[tuple[str, Setting]]:
    for schedule, config in _PIPELINES.items():
        for name, case in CASES.items():
            yield f"pp2 {schedule}, {name}", _case(case, pipeline_parallel_degree=2, **config)
    for schedule, config in _VIRTUAL.items():
        for name in _DEEP:
            yield f"pp2 {schedule}, {name}", _case(CASES[name], pipeline_parallel_degree=2, **config)
    # More steps than other pipelines run, so a schedule that is never planned again.
    simple = {"pipeline_parallel_degree": 2, "pipeline": "simple"}
    yield from ((f"pp2, {name}", setting) for name, setting in _halves(**simple))
    for name, variant in _variants().items():
        yield f"pp2, checkpointing: {name}", _checkpointed(variant, 2)
    for name in _FEW:
        yield f"dp2, {name}", _case(CASES[name])
    yield "dp2, 1 microbatch", _net()
    yield "dp2, accumulated and clipped", _net(accumulation=2, clip=0.3, microbatches=2)
    yield "dp2, reduced at the end", _net(microbatches=4, wrapping={"overlapping_allreduce": False})
    yield "dp2, gradients of their own", _net(microbatches=4, wrapping={"gradient_as_bucket_view": False})
    yield from ((f"dp2, {name}", setting) for name, setting in _halves())
    sharded: dict[str, Any] = {"shard_optimizer_state": True}
    yield "dp2, sharded state", _net(microbatches=2, clip=0.3, **sharded)
    yield "dp2, sharded state, LAMB", _net(microbatches=2, kind="LAMB", **sharded)
    yield from ((f"dp2, sharded state, {name}", setting) for name, setting in _halves(**sharded))
    yield "dp2, sharded parameters", _net(sharded_data_parallel_degree=2, microbatches=2)
    modes: dict[str, dict[str, Any]] = {
        "speed": {"optimize": "speed"},
        "memory": {"optimize": "memory"},
        "prescaled": {"prescaled_batch": True},
    }
    for mode, config in modes.items():
        given = {"tensor_parallel_degree": 2, "microbatches": 2, **config}
        yield f"tp2 {mode}, marked", _net(Marked, marked=True, **given)
        yield f"tp2 {mode}, language model of smp.nn", _language(**given)
    tensor = {"tensor_parallel_degree": 2}
    yield from ((f"tp2, {name}", setting) for name, setting in _halves(build=Marked, marked=True, **tensor))


def _on_four() -> Iterator[tuple[str, Setting]]:
    pipeline = {"pipeline_parallel_degree": 4}
    for schedule, config in _PIPELINES.items():
        for name in _FEW:
            yield f"pp4 {schedule}, {name}", _case(CASES[name], **pipeline, **config)
    yield (
        "pp4 2 virtual stages, tied neighbours",
        _case(CASES["tied neighbours"], virtual_pipeline_degree=2, **pipeline),
    )
    both: dict[str, Any] = {"pipeline_parallel_degree": 2}
    for schedule, config in _PIPELINES.items():
        for name in _FEW[:4]:
            yield f"pp2 dp2 {schedule}, {name}", _case(CASES[name], **both, **config)
    yield "pp2 dp2, sharded state", _net(microbatches=2, clip=0.3, shard_optimizer_state=True, **both)
    yield from ((f"pp2 dp2, {name}", setting) for name, setting in _halves(pipeline="simple", **both))
    both["tensor_parallel_degree"] = 2
    for schedule, config in _PIPELINES.items():
        yield f"pp2 tp2 {schedule}, marked", _net(Marked, marked=True, microbatches=4, **both, **config)
        yield f"pp2 tp2 {schedule}, language model of smp.nn", _language(microbatches=4, **both, **config)
    tensor: dict[str, Any] = {"tensor_parallel_degree": 2, "microbatches": 2}
    yield "tp2 dp2, sharded state", _net(Marked, marked=True, shard_optimizer_state=True, **tensor)
    yield "tp2 dp2, prescaled", _language(prescaled_batch=True, **tensor)
