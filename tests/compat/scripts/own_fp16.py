"""A script as of 2021: half precision, loss scale, master weights and data of its own, and objects in its checkpoints.

Only pipeline rank 0 reads data, and the other ranks of its pipeline pass empty tensors; the script's own optimizer for
half precision, after Apex's, is what `smp.DistributedOptimizer` wraps; checkpoints hold the script's arguments, a
dataclass, its loss scaler and its DataLoader.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from pathlib import Path

import smdistributed.modelparallel.torch as smp
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8


@dataclasses.dataclass
class ModelSettings:
    width: int = WIDTH
    num_layers: int = 4


class LossScaler:
    def __init__(self, init_scale=2.0**8):
        self.loss_scale = init_scale
        self.history = collections.deque(maxlen=4)

    def update_scale(self, overflow):
        self.history.append(bool(overflow))
        if overflow or len(self.history) == self.history.maxlen:
            self.loss_scale *= 0.5 if overflow else 2.0
            self.history.clear()


class FP16Module(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module.half()

    def forward(self, x):
        return self.module(x.half()).float()


class FP16Optimizer:
    """Master weights in float32, made when this rank knows its part of the model."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.loss_scaler = LossScaler()
        self.overflow = False
        self.fp16_groups = []
        self.fp32_groups = []

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    @property
    def loss_scale(self):
        return self.loss_scaler.loss_scale

    def init_master_params(self, model):
        local = {id(parameter) for parameter in model.local_parameters()}
        for group in self.optimizer.param_groups:
            halves = [parameter for parameter in group["params"] if id(parameter) in local]
            masters = [nn.Parameter(parameter.detach().float()) for parameter in halves]
            group["params"] = masters
            self.fp16_groups.append(halves)
            self.fp32_groups.append(masters)

    def _pairs(self):
        for halves, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            yield from zip(halves, masters, strict=True)

    def zero_grad(self, set_grads_to_None=False):  # noqa: N803
        for half, _ in self._pairs():
            half.grad = None if set_grads_to_None else torch.zeros_like(half)

    def step(self):
        bad = torch.zeros(1)
        for half, master in self._pairs():
            master.grad = half.grad.float() / self.loss_scale
            bad += not torch.isfinite(master.grad).all()
        # The ranks of a model decide together.
        torch.distributed.all_reduce(bad, group=smp.get_mp_process_group())
        self.overflow = bool(bad.item())
        if not self.overflow:
            self.optimizer.step()
            for half, master in self._pairs():
                half.data.copy_(master.data)
        self.loss_scaler.update_scale(self.overflow)

    def state_dict(self):
        masters = [[master.data for master in group] for group in self.fp32_groups]
        return {"loss_scaler": self.loss_scaler, "optimizer": self.optimizer.state_dict(), "masters": masters}

    def load_state_dict(self, state):
        self.loss_scaler = state["loss_scaler"]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, saved in zip(self.fp32_groups, state["masters"], strict=True):
            for master, value in zip(group, saved, strict=True):
                master.data.copy_(value)


@smp.step
def train_step(model, optimizer, args, x, y):
    loss = functional.mse_loss(model(x), y)
    model.backward(loss * optimizer.loss_scale)
    return loss


def build_model(settings):
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(settings.width, settings.width), nn.Tanh()) for _ in range(settings.num_layers)]
    return FP16Module(nn.Sequential(*layers))


def data_of(step, args, device):
    if smp.pp_rank() != 0:  # the other ranks of a pipeline have no data
        return torch.empty(0, device=device), torch.empty(0, device=device)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(args.batch, WIDTH, generator=generator)
    y = x.roll(1, 1).tanh()
    share = args.batch // smp.dp_size()
    begin = smp.dp_rank() * share
    return x[begin : begin + share].to(device), y[begin : begin + share].to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--model-dir", default=".")
    parser.add_argument("--report", default="")
    args, _ = parser.parse_known_args()
    smp.init({"microbatches": 2, "ddp": True})
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    settings = ModelSettings()
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    path = str(Path(args.model_dir) / "checkpoint.pt")
    first = 0
    saved = None
    if args.resume:
        saved = smp.load(path, partial=True)
        assert saved["settings"] == settings
        assert saved["args"].batch == args.batch
        assert len(saved["loader"]) == len(loader)
        first = saved["step"]
    model = smp.DistributedModel(build_model(settings))
    optimizer = smp.DistributedOptimizer(FP16Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)))

    def make_masters(model, optimizer):
        optimizer.init_master_params(model)
        if saved is not None:
            optimizer.optimizer.load_state_dict(saved["optimizer"])

    if saved is not None:
        optimizer.loss_scaler = saved["optimizer"]["loss_scaler"]
        model.load_state_dict(saved["model"], same_partition_load=True)
    model.register_post_step_hook(make_masters)
    losses = []
    for step in range(first, 6):
        optimizer.zero_grad(set_grads_to_None=True)
        x, y = data_of(step, args, device)
        loss = train_step(model, optimizer, args, x, y).reduce_mean()
        optimizer.step()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss.item() / smp.dp_size())
        if step + 1 == args.save_at and smp.rdp_rank() == 0:
            content = {
                "model": model.local_state_dict(),
                "optimizer": optimizer.optimizer.state_dict(),
                "args": args,
                "settings": settings,
                "loader": loader,
                "step": step + 1,
            }
            smp.save(content, path, partial=True)
    smp.barrier()
    if smp.rank() == 0 and args.report:
        report = {"losses": losses, "scale": optimizer.loss_scale, "history": len(optimizer.loss_scaler.history)}
        Path(args.report).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
