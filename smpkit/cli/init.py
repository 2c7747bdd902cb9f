"""`smpkit init`: a job file with comments and a script that trains, to begin with."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Final

import click

from smpkit.cli import _console
from smpkit.config.words import suggestion
from smpkit.errors import UsageError

JOB = """\
# A training job for smpkit. `smpkit validate job.yaml` checks it, `smpkit run job.yaml` runs it on this machine,
# `smpkit submit job.yaml` on SageMaker. `smpkit schema > job.schema.json` lets editors complete and check it:
# yaml-language-server: $schema=job.schema.json

entry_point: train.py
hyperparameters: {steps: 20}          # become arguments of the script: --steps 20

distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        pipeline_parallel_degree: 2   # parts that the model is cut into
        microbatches: 4               # parts that a batch is cut into, to keep them all busy
        ddp: true                     # more ranks train copies: give each its data by smp.dp_rank()
  torch_distributed:
    enabled: true
    processes_per_host: 2             # ranks on a host: on SageMaker, its GPUs

# ---- for SageMaker ----
# image: <account>.dkr.ecr.<region>.amazonaws.com/<repository>:<tag>   # an image with smpkit in it
# role: <name or ARN of the IAM role that SageMaker takes>
# compute:
#   instance_type: ml.g5.12xlarge
#   instance_count: 1
#   max_run_seconds: 3600
#   spot: true                        # cheaper; may be interrupted, and then goes on from `checkpoints`
# checkpoints: s3://<bucket>/<folder>
# inputs: {train: s3://<bucket>/<folder>}
"""

_HEAD: Final = JOB[JOB.index("entry_point") : JOB.index("\ndistribution")]
_HEAD_OF_OTHERS: Final = """\
entry_point: {}
# hyperparameters: {{lr: 0.001}}        # become arguments of the script: --lr 0.001
"""
_NO_SCRIPTS: Final = ("test_", "conftest.", "setup.", "_")
"""How Python files begin that are not meant to be run."""

SCRIPT = '''\
"""Train a small model with smpkit; run it with `smpkit run job.yaml`."""

import argparse

import torch
import smpkit.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
steps = parser.parse_args().steps

smp.init()
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
model = smp.DistributedModel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


@smp.step
def train_step(model, inputs, targets):  # runs once for each microbatch
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss


torch.manual_seed(1 + smp.dp_rank())
inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
for step in range(1, steps + 1):
    optimizer.zero_grad()
    loss = train_step(model, inputs, targets).reduce_mean()
    optimizer.step()
    if smp.rank() == 0 and step % 5 == 0:
        print(f"step {step}/{steps}  loss {loss.item():.3f}")
'''


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--entry-point", metavar="SCRIPT", help="Write a job file for this script of FOLDER.")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
def init(folder: Path, entry_point: str | None, force: bool) -> None:
    """Write a job file, and a script that trains where there is none.

    Both go to FOLDER (default: here) and are ready to run. Beside scripts of your own only `job.yaml` is written, for
    the one that looks most like the one that trains.
    """
    scripts = _scripts(folder)
    if entry_point is not None:
        script = folder / entry_point
        if not script.is_file() or script.suffix not in (".py", ".sh"):
            raise UsageError(f"`{script}` is not a script", hint=suggestion(entry_point, scripts))
        entry_point = os.path.relpath(script, folder)
        if entry_point.startswith(".."):
            hint = f"`smpkit init {shlex.quote(str(script.parent))} --entry-point {shlex.quote(script.name)}`"
            raise UsageError(f"`{script}` is not in `{folder.absolute()}`, where the job file would be", hint=hint)
    named = entry_point or next(iter(scripts), None)
    ours = {"job.yaml": JOB, "train.py": SCRIPT} if named is None else {"job.yaml": _job_of(named)}
    files = {folder / name: text for name, text in ours.items()}
    existing = [path for path in files if path.exists() or path.is_symlink()]
    if existing and not force:
        raise UsageError(f"{existing[0]} is there already", hint="`--force` overwrites it; or give another FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        _console.note(f"wrote {path}")
    if entry_point is None and len(scripts) > 1:
        _console.note(f"it runs `{named}`; `--entry-point {shlex.quote(scripts[1])} --force` takes another script")
    _console.hint(f"`smpkit run {shlex.quote(str(folder / 'job.yaml'))}` runs it on this machine")


def _scripts(folder: Path) -> list[str]:
    """Return the scripts in a folder, the one first that is likely to train."""

    def rank(name: str) -> tuple[bool, bool, str]:
        return name not in ("train.py", "main.py"), "train" not in name, name

    names = [path.name for path in folder.glob("*.py") if path.is_file()]
    return sorted((name for name in names if not name.startswith(_NO_SCRIPTS)), key=rank)


def _job_of(script: str) -> str:
    name = script if script.replace(".", "_").isidentifier() else json.dumps(script)
    return JOB.replace(_HEAD, _HEAD_OF_OTHERS.format(name))
