"""A sequence model whose batch is not the first dimension, with what SMP v1's reference shows beside the basics.

Inputs split along axes of their own, FusedLAMB, hooks, checkpoints in shards (`v3`) and half precision with a loss
scale.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from torch import nn


class Translator(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        with smp.partition(0):
            self.embedding = nn.Embedding(vocabulary, width)
            self.encoder = nn.Linear(width, width)
        with smp.partition(1):
            self.decoder = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
            self.head = nn.Linear(width, vocabulary)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(self.embedding(source))) * mask
        return self.head(self.decoder(hidden.cumsum(0) * self.scale))


@smp.step(non_split_inputs=["weights"], input_split_axes={"source": 1, "mask": 1, "target": 1})
def train_step(model, source, mask, target, weights):
    logits = model(source, mask)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight=weights, reduction="sum") / target.numel()
    model.backward(loss)
    return loss, logits, target.shape[1]


@smp.step(input_split_axes={"source": 1, "mask": 1})
def predict(model, source, mask):
    return model(source, mask).argmax(-1)


def batch(step: int, count: int, length: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    source = torch.randint(0, 32, (length, count), generator=generator)
    mask = torch.ones(length, count, 1)
    return source, mask, (source + 1) % 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16, help="of all replicas together")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--report", required=True)
    args, _ = parser.parse_known_args()

    smp.init()
    torch.manual_seed(3)
    module = Translator()
    if not smp.state.cfg.fp16:
        module.double()
    model = smp.DistributedModel(module, backward_passes_per_step=1)
    called = []
    model.register_post_partition_hook(lambda model, optimizer: called.append(("partitioned", model.partitioned)))
    model.register_post_step_hook(lambda model, optimizer: called.append(("stepped", optimizer is not None)))
    dynamic = {"scale_window": 2, "init_scale": 2.0**10, "min_scale": 1, "delayed_shift": 1}
    optimizer = smp.DistributedOptimizer(
        smp.optimizers.FusedLAMB(model.parameters(), lr=0.05, max_grad_norm=0.1),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={**dynamic, "scale_factor": 2.0, "consecutive_hysteresis": False},
    )
    share = slice(smp.dp_rank(), None, smp.dp_size())
    weights, losses = torch.ones(32), []
    for step in range(6):
        source, mask, target = (each[:, share] for each in batch(step, args.batch_size))
        if not smp.state.cfg.fp16:
            weights, mask = weights.double(), mask.double()
        optimizer.zero_grad(set_to_none=True)
        loss, logits, _ = train_step(model, source, mask, target, weights)
        if smp.state.cfg.fp16:
            optimizer.clip_master_grads(args.clip)
        optimizer.step()
        assert torch.cat(tuple(logits.outputs), dim=1).shape[:2] == source.shape
        losses.append(sum(smp.allgather(loss.reduce_mean().item(), smp.DP_GROUP)) / smp.dp_size())
    assert called == [("partitioned", True), ("stepped", True)]

    file = f"{args.model_dir}/shard.pt"
    content = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(content, file, partial=True, v3=True)
    smp.barrier()
    assert Path(f"{file}_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}").exists()
    loaded = smp.load(file, partial=True, map_location="cpu")
    model.load_state_dict(loaded["model"], same_partition_load=True)
    optimizer.load_state_dict(loaded["optimizer"])

    model.eval()
    with torch.no_grad():
        source, mask, target = batch(99, args.batch_size)
        found = predict(model, source, mask if smp.state.cfg.fp16 else mask.double())
    right = (torch.cat(tuple(found.outputs), dim=1) == target).double().mean().item()
    whole = model.state_dict(gather_to_rank0=True) if smp.rdp_rank() == 0 else {}
    if smp.rank() == 0:
        assert whole.keys() >= dict(model.named_parameters()).keys()
        report = {"losses": losses, "right": right, "scale": getattr(optimizer, "loss_scale", None)}
        Path(args.report).write_text(json.dumps(report))
    smp.barrier()


if __name__ == "__main__":
    main()
