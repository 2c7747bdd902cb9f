"""Scripts in SMP v1's API, composed by seed from what public scripts do, each with its plain PyTorch reference.

`draw(seed)` decides, asking smpkit's own schema which parameters may stand together. `Drawn.script()` is the script and
`Drawn.reference()` the same training in one process without SMP. Both are texts that run by themselves and share the
model and the data::

    python -m tests.compat.random_scripts 7 > train.py

prints a script, after comments that say how to run it.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from dataclasses import dataclass
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError

STEPS: Final = 4
SAVED: Final = 2
"""After how many steps the first job saves; one that resumes does a step later."""
ROWS: Final = 16
"""Rows of a batch of the whole job."""

PRECISIONS: Final = {
    "fp64": "torch.float64",
    "fp32": "torch.float32",
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
}


@dataclass(frozen=True)
class Job:
    """On how many ranks, with which parameters of the job."""

    ranks: int
    parameters: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        alias = {"pipeline_parallel_degree": "partitions"}.get(key, key)
        return self.parameters.get(key, self.parameters.get(alias, 1))

    @property
    def replicas(self) -> int:
        """How many parts a batch is cut into, each for a replica; tensor ranks have own ones if not prescaled."""
        tensor = self["tensor_parallel_degree"] if self.parameters.get("prescaled_batch") else 1
        return self.ranks // self["pipeline_parallel_degree"] // tensor

    @property
    def parts(self) -> int:
        """How many parts a batch is cut into, over replicas and microbatches."""
        return self.replicas * int(self["microbatches"])


@dataclass(frozen=True)
class Drawn:
    """What a seed has decided."""

    seed: int
    first: Job
    second: Job
    """The job that goes on from the checkpoint."""
    precision: str
    model: str
    """`blocks`; `sequence`, torch's own encoder before an LSTM; or `gpt2` of Hugging Face, which tensor parallelism
    replaces by a DistributedTransformer."""
    checkpoint: str
    """`local`: smp.save of local state dicts; `whole`: of whole ones; `partial`, `full`: smp.save_checkpoint."""
    again: bool
    """Whether the second job saves, too, and a third goes on as the first one was."""
    settings: dict[str, Any]
    """Constants of the texts, by name; what they do is said where they are drawn."""

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    @property
    def jobs(self) -> list[Job]:
        """The jobs, of which each goes on from the checkpoint of the one before."""
        return [self.first, self.second, self.first][: 3 if self.again else 2]

    @property
    def marked(self) -> bool:
        """Whether modules are created to be distributed."""
        return self.first["tensor_parallel_degree"] * self.second["tensor_parallel_degree"] > 1

    def same_arithmetic(self, job: Job) -> bool:
        """Tell whether the job adds the same numbers in the same order as the reference, which has the first's parts.

        Hugging Face's loss, weights used on two ranks, divided layers and norms are rounded elsewhere. A job that goes
        on from other numbers has other ones, too.
        """
        if job != self.first and not self.same_arithmetic(self.first):
            return False
        sharded = job["sharded_data_parallel_degree"] > 1
        same_parts = (job.replicas, job["microbatches"]) == (self.first.replicas, self.first["microbatches"])
        one_backward = job["microbatches"] == self["ACCUMULATION"] == 1
        in_order = job.replicas == 1 or (job.replicas == 2 and (not sharded or one_backward))
        uses_twice = self["TIED"] or self["REPEATED"]
        elsewhere = uses_twice and any(j["pipeline_parallel_degree"] > 1 for j in (self.first, job))
        rounded = self.model != "blocks" or self.marked or self["CLIP"] or self["DROPOUT"]
        rounded = rounded or self["OPTIMIZER"] == "lamb"
        return same_parts and in_order and not (elsewhere or rounded or (sharded and self.half))

    def tolerance(self, job: Job) -> float:
        """By how much a loss of the job may differ, relative to the reference."""
        if self.same_arithmetic(job):
            return 0.0
        if self["DROPOUT"]:  # the reference has none
            return 0.5
        if self.half and self["OPTIMIZER"] == "adagrad":  # its first steps are as large for what is all rounding
            return 0.3
        if self.model == "gpt2":  # Hugging Face computes the loss in float32
            return 0.05 if self.half else 1e-4
        return {"fp64": 1e-8, "fp32": 1e-3}.get(self.precision, 0.05)

    @property
    def has_statistics(self) -> bool:
        """Whether the model has batch normalisation."""
        return self.model != "gpt2" and self["NORM"] == "batch"

    @property
    def counts_batches_once(self) -> bool:
        """Whether running statistics are right.

        Torch's recomputation counts a batch twice, as the schedule has it; and how the calls of a layer that is called
        twice take turns over microbatches is the schedule's, too, which the first step of a job does not have yet.
        """
        return not self.has_statistics or (self["RECOMPUTE"] != "torch" and not self["REPEATED"])

    def same_validation(self, job: Job) -> bool:
        """Tell whether a job's evaluation is that of the reference; running statistics are of a replica's own part."""
        is_alone = self.first.replicas == job.replicas == 1
        return not self.has_statistics or (is_alone and self.counts_batches_once)

    def repeats_validation(self, job: Job) -> bool:
        """Tell whether a job evaluates as the one before; a checkpoint has the running statistics of one replica."""
        return self.same_validation(job) or (self.counts_batches_once and not self["EVALUATED"])

    def repeats_to_the_bit(self, job: Job) -> bool:
        """Tell whether two runs of a job give the same bits.

        The gradients of a weight that is used twice are added in the schedule's order, which the first step of a job
        does not have yet, and which zero bubble decides by measured times. More than two replicas add up in an order
        that the buckets of gradients decide, and a job that began with frozen layers has other ones. Microbatches of
        packed sequences take other ways than the first: a job adds up those that follow its schedule before the
        others in its first step of a kind, and all in their order from then on.
        """
        departs = self.model == "sequence" and job["pipeline_parallel_degree"] > 1
        in_turns = self["REPEATED"] and job.parameters.get("pipeline") in ("interleaved", "zero_bubble")
        return not (departs or in_turns or (self["FROZEN"] and job.replicas > 2))

    @property
    def half(self) -> bool:
        """Whether the job computes in half precision."""
        return self.precision in ("fp16", "bf16")

    def script(self) -> str:
        """Return the script, for all jobs."""
        pieces = ["import smdistributed.modelparallel.torch as smp\n", "place = smp.partition\n"]
        return "\n".join([_IMPORTS, *pieces, self._constants(), _MODELS[self.model], _COMMON, _SCRIPT])

    def reference(self) -> str:
        """Return the same training in plain PyTorch: `losses`, by step and microbatch, `validation` and `norms`."""
        pieces = ["place = contextlib.nullcontext\n", self._constants(), _MODELS[self.model]]
        return "\n".join([_IMPORTS, *pieces, _COMMON, _REFERENCE])

    def alone(self) -> str:
        """Say how to run the script without the test."""
        lines = [f"seed {self.seed}: {self}", "in a folder with start.pt, which the reference leaves there:"]
        for resume, job in enumerate(self.jobs):
            given = shlex.quote(json.dumps(job.parameters))
            run = f"torchrun --nproc-per-node {job.ranks} train.py --resume {resume} --report report{resume}.json"
            lines.append(f"smpkit compat --parameters {given} -- {run}")
        return "".join(f"# {line}\n" for line in lines)

    def _constants(self) -> str:
        scale = 2.0**8 if self.precision == "fp16" else 1.0
        constants: dict[str, Any] = {
            "SEED": self.seed,
            "STEPS": STEPS,
            "SAVED": SAVED,
            "ROWS": ROWS,
            "HALF": self.half,
            "SCALE": scale,
        }
        constants |= {"REPLICAS": self.first.replicas, "MICROBATCHES": self.first["microbatches"]}
        constants |= {"MARKED": self.marked, "CHECKPOINT": self.checkpoint, **self.settings}
        lines = [f"{name} = {value!r}\n" for name, value in constants.items()]
        return "".join([f"DTYPE = {PRECISIONS[self.precision]}\n", *lines])


# --- the texts --------------------------------------------------------------------------------------------------------

_IMPORTS: Final = """\
import argparse
import contextlib
import json

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from smpkit.torch import optimizers
"""

_BLOCKS: Final = """\
TOKENS, WIDTH = 24, 8
NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = NORMS[NORM](WIDTH)
        self.grow = nn.Linear(WIDTH, 2 * WIDTH)
        self.shrink = nn.Linear(2 * WIDTH, WIDTH)

    def inside(self, x):
        return self.shrink(torch.tanh(self.grow(self.norm(x))))

    def forward(self, x):
        if RECOMPUTE == "torch":
            y = torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)
        else:
            y = self.inside(x)
        return x + functional.dropout(y, DROPOUT, self.training)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with place(0):
            self.embedding = nn.Embedding(TOKENS, WIDTH)
            self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        with place(smp.pp_size() - 1 if "smp" in globals() else 0):
            self.last = Block()
            self.head = nn.Linear(WIDTH, TOKENS)
        if TIED:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, mask=None):
        x = self.blocks(self.embedding(tokens).sum(1))
        if REPEATED:
            x = self.blocks[0](x)
        return {"logits": self.head(self.last(x)), "mask": mask}


def build():
    torch.manual_seed(SEED)
    return Model()


def layers_of(model):
    return model.blocks


"""

_SEQUENCE: Final = """\
TOKENS, WIDTH = 24, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=DROPOUT, batch_first=True)
        with place(0):
            self.embedding = nn.Embedding(TOKENS, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, 2)
        with place(smp.pp_size() - 1 if "smp" in globals() else 0):
            self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, TOKENS)
        if not MARKED:
            nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, tokens):
        lengths = 1 + tokens[:, 0] % tokens.shape[1]
        padded = torch.arange(tokens.shape[1]) >= lengths[:, None]
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padded)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.recurrent(packed)
        return {"logits": self.head(last[-1])}


def build():
    torch.manual_seed(SEED)
    return Model()


def layers_of(model):
    return model.encoder.layers


"""

_LOSS: Final = """\
torch.manual_seed(SEED)
teacher = nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)).requires_grad_(False)
teacher = teacher if HALF else teacher.to(DTYPE)


def loss_of(model, batch):
    logits = model(batch["tokens"])["logits"]
    logits = logits.float() if HALF else logits
    loss = functional.cross_entropy(logits, batch["target"], label_smoothing=SMOOTHED)
    if DISTILLED:
        wanted = teacher(batch["tokens"]).sum(1).softmax(-1)
        loss = loss + functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
    return loss


"""

_GPT2: Final = """\
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 24


def build():
    torch.manual_seed(SEED)
    sizes = {"vocab_size": TOKENS, "n_positions": 6, "n_embd": 16, "n_layer": 4, "n_head": 4, "use_cache": False}
    without = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": DROPOUT, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **without))


def layers_of(model):
    return getattr(model.transformer, "seq_layers", None) or model.transformer.h


def loss_of(model, batch):
    tokens = batch["tokens"]
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)["loss"]


"""

_MODELS: Final = {"blocks": _BLOCKS + _LOSS, "sequence": _SEQUENCE + _LOSS, "gpt2": _GPT2}

_COMMON: Final = """\
def batch_of(number, rows=ROWS):
    generator = torch.Generator().manual_seed(1000 * SEED + number)
    begin = torch.randint(TOKENS, (rows, 1), generator=generator)
    tokens = (begin + torch.arange(6 - number % 2 * 2 if LENGTHS else 6)) % TOKENS
    return {"tokens": tokens, "target": (begin[:, 0] * 5 + 1) % TOKENS}


def passes_of(step):
    return range(1 if SHORT and step % 2 else ACCUMULATION)


def freeze(model, step):
    for parameter in layers_of(model)[0].parameters():
        parameter.requires_grad_(step >= FROZEN)


def thaw(model, optimizer, step, masters=None):
    if LATER and step == FROZEN:
        parameters = list(layers_of(model)[0].parameters())
        optimizer.add_param_group({"params": [masters[each] if masters else each for each in parameters]})


def decay(parameters):
    # On what a script finds in `grad`: some ranks have no gradient of a parameter.
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach(), alpha=DECAYED)


def averaged(average, parameters):
    weights = [each.detach() for each in parameters]
    return [old.lerp(new, 0.5) for old, new in zip(average or weights, weights)]


def copy(parameters, values):
    with torch.no_grad():
        for parameter, value in zip(parameters, values):
            parameter.copy_(value)



OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-2, weight_decay=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=2e-2),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=2e-2, amsgrad=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=2e-2),
    "lamb": lambda parameters: optimizers.FusedLAMB(parameters, lr=2e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def make_optimizer(parameters):
    if LATER:
        parameters = [p for p in parameters if p.requires_grad]
    if GROUPED:
        parameters = list(parameters)
        large, small = ([p for p in parameters if (p.ndim > 1) == each] for each in (True, False))
        parameters = [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 1e-2}]
    return OPTIMIZERS[OPTIMIZER](parameters)


def make_schedule(optimizer):
    if WARMED:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8 if SCHEDULE else 1.0)
"""

_SCRIPT: Final = """

DUMMIES = {
    "none": {"tokens": None, "target": None},
    "empty": {"tokens": torch.empty(0), "target": torch.empty(0, dtype=torch.bool)},
    "other": {"tokens": torch.zeros(3, 1), "target": None},
}


@smp.step
def train_step(model, tokens, target=None):
    loss = loss_of(model, tokens if IN_ONE else {"tokens": tokens, "target": target})
    model.backward(loss / ACCUMULATION)
    return {"loss": loss, "log": [loss.detach() * 2, None]} if IN_DICT else loss


@smp.step
def test_step(model, tokens, target=None):
    return loss_of(model, tokens if IN_ONE else {"tokens": tokens, "target": target})


def share_of(number, rows=ROWS):
    prescaled = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    share = {name: part.chunk(size)[rank] for name, part in batch_of(number, rows).items()}
    share = DUMMIES.get(DUMMY, share) if smp.pp_rank() > 0 else share
    return [share] if IN_ONE else [share["tokens"], share["target"]]


def everywhere(output):
    # The losses of all microbatches of all replicas.
    output = output["loss"] if isinstance(output, dict) else output
    mine = [loss.item() for loss in output.outputs]
    return [loss for theirs in smp.allgather(mine, smp.DP_GROUP) for loss in theirs]


def evaluate(model):
    model.eval()
    with torch.no_grad():
        losses = everywhere(test_step(model, *share_of(0, FEWER)))
    model.train()
    return losses


def clip(model, optimizer):
    if CLIP is None or smp.state.cfg.sharded_data_parallel_degree > 1:
        return
    if HALF:
        optimizer.clip_master_grads(CLIP)
    else:
        smp.clip_grad_norm_(model.parameters(), CLIP)


def save(model, optimizer, content, args):
    if CHECKPOINT == "partial":
        smp.save_checkpoint(args.folder, TAG.format(content["step"]), partial=True, user_content=content, **HOW)
    elif CHECKPOINT == "full":
        smp.save_checkpoint(args.folder, "half", partial=False, user_content=content)
    elif CHECKPOINT == "whole":
        content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if smp.rank() == 0:
            smp.save(content, args.folder + ".pt", partial=False)
        smp.barrier()
    else:
        sharded = smp.state.cfg.shard_optimizer_state or smp.state.cfg.sharded_data_parallel_degree > 1
        states = optimizer.local_state_dict(gather_if_shard=False)
        content |= {"model": model.local_state_dict(), "optimizer": states}
        if sharded or smp.rdp_rank() == 0:
            smp.save(content, args.folder + ".pt", partial=True, v3=sharded)
        smp.barrier()


def load(model, optimizer, args):
    if CHECKPOINT == "partial":
        return smp.resume_from_checkpoint(args.folder, partial=True)
    if CHECKPOINT == "full":
        return smp.resume_from_checkpoint(args.folder, tag="half", partial=False, load_optimizer=False)
    content = smp.load(args.folder + ".pt", partial=CHECKPOINT == "local")
    model.load_state_dict(content["model"])
    states = content["optimizer"]
    if CHECKPOINT == "local":
        optimizer.load_state_dict(states)
    else:
        model.register_post_step_hook(lambda model, optimizer: optimizer.load_state_dict(states))
    return content


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--start", default="start.pt")
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--report", default="report.json")
    args, _ = parser.parse_known_args()
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    with contextlib.ExitStack() as contexts:
        if CHECKPOINT in ("partial", "full"):  # as of 2022, when there was one context for all
            contexts.enter_context(smp.model_creation(tensor_parallelism=MARKED, dtype=None if HALF else DTYPE))
        else:
            contexts.enter_context(smp.tensor_parallelism(MARKED))
            contexts.enter_context(smp.delay_param_initialization(smp.state.cfg.delayed_parameter_initialization))
        module = build()
    if not HALF:
        module = module.to(DTYPE)
    if not MARKED:  # a module that is replaced has other parameters
        freeze(module, 0)
    inner = make_optimizer(module.parameters()) if OPTIMIZER_FIRST else None
    model = smp.DistributedModel(module, backward_passes_per_step=ACCUMULATION)
    optimizer = smp.DistributedOptimizer(inner or make_optimizer(model.parameters()), static_loss_scale=SCALE)
    schedule = make_schedule(optimizer.optimizer if smp.state.cfg.fp16 else optimizer)
    if RECOMPUTE == "smp":
        for layer in layers_of(model.get_module()):
            smp.set_activation_checkpointing(layer)
    step = 0
    if args.resume:
        content = load(model, optimizer, args)
        step = content["step"]
        schedule.load_state_dict(content["schedule"])
    else:
        model.load_state_dict(torch.load(args.start))
    losses, validation, norms, average = [], [], [], None
    while step < STEPS:
        if EVALUATED:
            validation.append(evaluate(model))
        freeze(model.get_module(), step)
        thaw(model.get_module(), optimizer, step)
        for turn in passes_of(step) if step == LEFT_OUT else ():
            train_step(model, *share_of(step * ACCUMULATION + turn))
        optimizer.zero_grad(set_to_none=TO_NONE)
        losses.append([])
        for turn in passes_of(step):
            losses[-1] += everywhere(train_step(model, *share_of(step * ACCUMULATION + turn)))
        norms.append(float(smp.clip_grad_norm_(model, float("inf"))))
        if DECAYED:
            decay(model.parameters())
        clip(model, optimizer)
        optimizer.step()
        schedule.step()
        step += 1
        if AVERAGED and step > SAVED:
            weights = model.state_dict() if BY_NAME else dict(model.local_named_parameters())
            average = dict(zip(weights, averaged(average and average.values(), weights.values())))
        if step == SAVED + args.resume or (OFTEN and step < SAVED + args.resume):
            content = {"step": step, "schedule": schedule.state_dict(), "args": args}
            save(model, optimizer, content, args)
    if AVERAGED and BY_NAME:
        model.load_state_dict(average)
    elif AVERAGED:
        copy(model.local_parameters(), average.values())
    validation.append(evaluate(model))
    if smp.rank() == 0:
        with open(args.report, "w") as file:
            json.dump({"losses": losses, "validation": validation, "norms": norms}, file)
    smp.barrier()


if __name__ == "__main__":
    main()
"""

_REFERENCE: Final = """

def cast(model):
    if not HALF:
        return model.to(DTYPE)
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(DTYPE)
    return model


start = {name: value.clone() for name, value in build().state_dict().items()}
torch.save(start, "start.pt")
model = cast(build())
parameters = list(model.parameters())
masters = [each.detach().float() if each.dtype == DTYPE and HALF else each for each in parameters]
freeze(model, 0)
trained = {id(master) for master, weight in zip(masters, parameters) if weight.requires_grad}
optimizer = make_optimizer([each.requires_grad_(id(each) in trained) for each in masters] if LATER else masters)
schedule = make_schedule(optimizer)
losses, validation, norms, average = [], [], [], None


def evaluate():
    model.eval()
    with torch.no_grad():
        validation.append([loss_of(model, batch_of(0, FEWER)).item()])
    model.train()


for step in range(STEPS):
    if EVALUATED:
        evaluate()
    freeze(model, step)
    thaw(model, optimizer, step, dict(zip(parameters, masters)))
    gradients = [[] for _ in parameters]
    found = [[] for _ in passes_of(step)]
    for replica in range(REPLICAS):
        model.zero_grad()
        left_out = [(True, turn) for turn in passes_of(step) if step == LEFT_OUT]
        for is_left_out, turn in [*left_out, *((False, turn) for turn in passes_of(step))]:
            batch = {n: each.chunk(REPLICAS)[replica] for n, each in batch_of(step * ACCUMULATION + turn).items()}
            for part in range(MICROBATCHES):
                rows = {n: each.chunk(MICROBATCHES)[part] for n, each in batch.items()}
                loss = loss_of(model, rows)
                if is_left_out:  # it changes nothing but running statistics
                    continue
                ((loss / ACCUMULATION) * (SCALE / MICROBATCHES)).backward()
                found[turn].append(loss.item())
        for parameter, parts in zip(parameters, gradients):
            if parameter.grad is not None:
                parts.append(parameter.grad / REPLICAS)
    for master, parts in zip(masters, gradients):
        if parts:
            total = sum(parts[1:], start=parts[0])
            master.grad = total.float() / SCALE if HALF else total
    norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in masters if each.grad is not None])))
    if DECAYED:
        decay(masters)
    if CLIP is not None:
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
    optimizer.step()
    schedule.step()
    copy(parameters, masters)
    losses.append(sum(found, start=[]))
    if AVERAGED and step >= SAVED:
        average = averaged(average, parameters)
if AVERAGED:
    copy(parameters, average)
evaluate()
"""


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(seed: int, most_ranks: int = 4) -> Drawn:
    """Draw until the schema accepts the parameters, and the degrees fit the ranks."""
    chance = random.Random(seed)
    while True:
        drawn = _draw(seed, chance, most_ranks)
        if all(_accepted(job) for job in (drawn.first, drawn.second)):
            return drawn


def _accepted(job: Job) -> bool:
    try:
        config, _ = ModelParallelConfig.from_sources(job.parameters, None)
    except ConfigError:
        return False
    return not config.world_problems(job.ranks) and 2 * job.parts <= ROWS


def _draw(seed: int, chance: random.Random, most_ranks: int) -> Drawn:
    def some(share: float) -> bool:
        return chance.random() < share

    precision = chance.choice(list(PRECISIONS))
    recompute = chance.choice(["none", "smp", "torch"])
    shared: dict[str, Any] = {"ddp": True}
    if precision in ("fp16", "bf16"):
        shared[precision] = True
    manual = some(0.3)
    clip = some(0.3)
    first = _job(chance, most_ranks, shared, manual=manual, clip=clip, recompute=recompute)
    checkpoint = chance.choice(["local", "whole", "partial", "partial", "full"])
    if checkpoint == "whole" and (first["tensor_parallel_degree"] > 1 or "shard_optimizer_state" in first.parameters):
        checkpoint = "partial"  # SMP v1 has no whole optimizer state there
    elsewhere = checkpoint != "local" and some(0.5)
    second = first
    while elsewhere and (second is first or (checkpoint == "whole" and second["tensor_parallel_degree"] > 1)):
        second = _job(chance, most_ranks, shared, manual=manual, clip=clip, recompute=recompute)
    is_sharded = {job["sharded_data_parallel_degree"] > 1 for job in (first, second)}
    if checkpoint == "partial" and precision in ("fp16", "bf16") and len(is_sharded) > 1:
        checkpoint = "full"  # refused: with parts of weights there are no masters
    model = chance.choice(["blocks", "blocks", "gpt2"])
    if any(job["sharded_data_parallel_degree"] > 1 and job["optimize"] == "memory" for job in (first, second)):
        model = "blocks"  # a replaced GPT-2 divides sequences, and that is refused beside sharded data parallelism
    # Batch normalisation sees the rows of a part: as many in both jobs.
    norm = chance.choice(["layer", "batch" if first.parts == second.parts else "none", "none"])
    optimizers = ["adamw", "momentum", "adagrad", "nadam", "amsgrad", "lamb", "adafactor"]
    if any(job["tensor_parallel_degree"] * job["sharded_data_parallel_degree"] > 1 for job in (first, second)):
        optimizers.remove("adafactor")  # refused: it looks at whole matrices
    if precision == "fp64":
        optimizers.remove("nadam")  # torch loads a float32 number of its state as float64
    more = random.Random(f"more {seed}")  # what was drawn before this was there stays the same
    delayed = any("delayed_parameter_initialization" in job.parameters for job in (first, second))
    if model == "blocks" and more.random() < 0.25 and not delayed:  # nn.MultiheadAttention cannot be made later
        model, norm = "sequence", "none"
    settings = {
        "NORM": norm,
        "RECOMPUTE": recompute,
        "CLIP": 0.5 if clip else None,
        "GROUPED": some(0.3),  # biases and norms are a parameter group of their own
        "FROZEN": chance.choice([0, 0, 0, 1, 2, 3]),  # for so many steps the first block is not trained
        "AVERAGED": some(0.2),  # what is evaluated in the end is a moving average of weights
        "EVALUATED": some(0.3),  # before each step, too
        # Whether every other update comes before its accumulation is complete; sharding groups refuse it.
        "SHORT": some(0.4) and not any(is_sharded),
        "OFTEN": some(0.3),  # a job saves after each step
        "TAG": chance.choice(["half", "step{}"]),
        "HOW": chance.choice([{}, {"blocking": False}, {"num_kept_partial_checkpoints": 1}]),
        "DROPOUT": 0.1 if some(0.25) and checkpoint == "partial" and second is first else 0.0,
        "TO_NONE": some(0.5),
        "IN_DICT": some(0.5),  # a step returns more than the loss
        "SMOOTHED": more.choice([0.0, 0.1]),  # labels
        "DISTILLED": more.random() < 0.3,  # from a plain model beside the one that is trained
        "DECAYED": more.choice([0.0, 0.01]) if precision in ("fp64", "fp32") else 0.0,  # on gradients, by hand
        "LENGTHS": more.random() < 0.3,  # sequences get shorter and longer
        "FEWER": more.choice([ROWS, ROWS // 2]),  # rows in an evaluation
        "LEFT_OUT": more.choice([-1, 1, 2]),  # before this step there is one without an update, as after a loss of NaN
        "BY_NAME": norm != "batch" and more.random() < 0.5,  # averages are of the whole state dict
        # Another schedule, of whose rate a full checkpoint knows nothing.
        "WARMED": more.random() < 0.3 and checkpoint != "full",
    }
    # The optimizer gets the first block when it is unfrozen, after every checkpoint.
    settings["LATER"] = (
        settings["FROZEN"] == 3
        and first["tensor_parallel_degree"] * second["tensor_parallel_degree"] == 1
        and more.random() < 0.7
    )
    settings["WARMED"] = settings["WARMED"] and not settings["LATER"]  # which knows as many groups as it began with
    settings |= {
        "TIED": some(0.2),
        "REPEATED": some(0.2),  # a block is called twice
        "OPTIMIZER": "sgd" if checkpoint == "full" else chance.choice(optimizers),
        # A whole checkpoint has no optimizer, so the schedule would begin at another learning rate.
        "SCHEDULE": checkpoint != "full" and some(0.6),
        "ACCUMULATION": 2 if some(0.25) else 1,
        "DUMMY": chance.choice(["same", "none", "empty", "other"]),  # what later pipeline ranks pass
        "OPTIMIZER_FIRST": some(0.3) and first["tensor_parallel_degree"] * second["tensor_parallel_degree"] == 1,
        "IN_ONE": chance.choice([True, False]),  # a step takes a dict, not tensors
    }
    again = some(0.25) and not settings["AVERAGED"]  # an average begins after the first checkpoint
    return Drawn(seed, first, second, precision, model, checkpoint, again, settings)


def _job(
    chance: random.Random, most_ranks: int, shared: dict[str, Any], *, manual: bool, clip: bool, recompute: str
) -> Job:
    ranks = chance.choice([each for each in (1, 2, 4, 8) if each <= most_ranks])
    drawn: dict[str, Any] = {
        chance.choice(["partitions", "pipeline_parallel_degree"]): chance.choice([1, 2, 4]),
        "tensor_parallel_degree": chance.choice([1, 1, 2]),
        "sharded_data_parallel_degree": chance.choice([1, 1, 2, 4]),
        "microbatches": chance.choice([1, 2, 4]),
        "shard_optimizer_state": chance.random() < 0.3,
        "offload_activations": recompute == "smp" and chance.random() < 0.5,
        "prescaled_batch": chance.random() < 0.5,
        "optimize": chance.choice(["speed", "memory"]),
        "placement_strategy": chance.choice(["cluster", "spread", "DTP", "PTD"]),
        "pipeline": chance.choice(["simple", "interleaved", "zero_bubble"]),
        "virtual_pipeline_degree": chance.choice([1, 1, 1, 2]),
        "delayed_parameter_initialization": chance.random() < 0.2,
        "skip_tracing": chance.random() < 0.3,
    }
    given = {key: value for key, value in drawn.items() if value is not False and not (value == 1 and "degree" in key)}
    pipeline = given.get("partitions", given.get("pipeline_parallel_degree", 1))
    if drawn["tensor_parallel_degree"] == 1:
        given.pop("prescaled_batch", None)
    if pipeline == 1:
        for key in ("pipeline", "virtual_pipeline_degree"):
            given.pop(key, None)
    if pipeline == 4:  # the model has too few units
        given.pop("virtual_pipeline_degree", None)
    if pipeline > 1 and manual:
        given |= {"auto_partition": False, "default_partition": 0}
    if drawn["sharded_data_parallel_degree"] > 1:
        given["sdp_gradient_clipping"] = 0.5 if clip else 0.0
    return Job(ranks, {**shared, **given})


def main() -> None:
    """Print the script of a seed."""
    drawn = draw(int(sys.argv[1]))
    print(drawn.alone() + drawn.script())  # noqa: T201


if __name__ == "__main__":
    main()
