"""Classify pictures with Hugging Face's ResNet, over a pipeline and replicas: `smpkit run examples/vision/job.yaml`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from shapes import NAMES, Shapes
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import ResNetConfig, ResNetForImageClassification

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=32, help="pictures per replica and step")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=os.environ.get("SM_MODEL_DIR", "runs/output"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


def make_model(norm: str, microbatches: int) -> ResNetForImageClassification:
    """Return a small ResNet with BatchNorm, or with GroupNorm, which looks at single pictures."""
    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128],
        depths=[1, 1, 1],
        layer_type="basic",
        id2label=dict(enumerate(NAMES)),
    )
    model = ResNetForImageClassification(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d) and norm == "group":
                setattr(module, name, nn.GroupNorm(8, child.num_features))
            elif isinstance(child, nn.BatchNorm2d):  # averages are updated once per microbatch; keep a step's pace
                child.momentum = 1 - (1 - 0.1) ** (1 / microbatches)
    return model


@smp.step
def train_step(model: smp.DistributedModel, pictures: Tensor, kinds: Tensor) -> Tensor:
    loss = model(pixel_values=pictures, labels=kinds).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model: smp.DistributedModel, pictures: Tensor, kinds: Tensor) -> Tensor:
    return (model(pixel_values=pictures).logits.argmax(-1) == kinds).float().mean()


def share(pictures: Shapes, *, shuffle: bool) -> DistributedSampler[tuple[Tensor, int]]:
    """Return which pictures are this replica's; the ranks of one pipeline load the same."""
    return DistributedSampler(pictures, smp.dp_size(), smp.dp_rank(), shuffle=shuffle, drop_last=True)


def evaluate(model: smp.DistributedModel, test: DataLoader[tuple[Tensor, int]]) -> float:
    model.eval()
    with torch.no_grad():
        right = [test_step(model, *batch).reduce_mean().item() for batch in test]
    model.train()
    return float(torch.tensor(smp.allgather(right, smp.DP_GROUP)).mean())


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    torch.manual_seed(0)

    pictures, test_pictures = Shapes(arguments.pictures, seed=1), Shapes(192, seed=2)
    sampler = share(pictures, shuffle=True)
    train = DataLoader(pictures, arguments.batch, sampler=sampler, drop_last=True)
    test = DataLoader(test_pictures, arguments.batch, sampler=share(test_pictures, shuffle=False), drop_last=True)
    model = smp.DistributedModel(make_model(arguments.norm, smp.state.cfg.microbatches))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for batch, kinds in train:
            optimizer.zero_grad()
            losses.append(train_step(model, batch, kinds).reduce_mean().item())
            optimizer.step()
        accuracy = evaluate(model, test)
        if smp.rank() == 0:
            first, last = losses[0], losses[-1]
            print(f"epoch {epoch + 1}  loss {first:.3f} -> {last:.3f}  accuracy {accuracy:.1%}", flush=True)

    smp.save_pretrained(arguments.output)  # BatchNorm's averages are those of the first replica


if __name__ == "__main__":
    main()
