"""Digits with a small convolutional network, in SMP v1's API: train and test steps, partial and full saves.

The digits are made here: noisy copies of ten random pictures. Everything else is how scripts of SMP v1 are written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
from torch import nn, optim
from torch.cuda.amp import autocast
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 2)
        self.conv2 = nn.Conv2d(4, 8, 3, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return torch.flatten(F.relu(self.conv2(x)), 1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = Features()
        self.net2 = Classifier()

    def forward(self, x):
        return self.net2(self.net1(x))


@smp.step
def train_step(args, model, scaler, data, target):
    with autocast(enabled=args.amp > 0):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(scaler.scale(loss) if args.amp else loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    predicted = output.argmax(dim=1, keepdim=True)
    correct = predicted.eq(target.view_as(predicted)).sum().item()
    return loss, correct


def digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return pictures[labels] + 0.5 * torch.randn(count, 1, 28, 28, generator=generator), labels


def batches(count: int, size: int, seed: int):
    """Yield this replica's part of each global batch."""
    data, target = digits(count, seed)
    share = size // smp.dp_size()
    for start in range(0, count, size):
        mine = slice(start + smp.dp_rank() * share, start + (smp.dp_rank() + 1) * share)
        yield data[mine], target[mine]


def train(args, model, scaler, device, optimizer, epoch):
    model.train()
    losses = []
    for data, target in batches(args.train_size, args.batch_size, epoch):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(args, model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        # Some optimizers of some versions of torch fail on no parameters at all.
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
        losses.append(torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item())
    return losses


def test(args, model, device):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in batches(args.test_size, args.batch_size, 99):
            # The step returns numbers, not tensors: each is a list over microbatches.
            loss_mb, correct_mb = test_step(model, data.to(device), target.to(device))
            loss += sum(loss_mb)
            correct += sum(correct_mb)
    everywhere = smp.allgather((loss, correct), smp.DP_GROUP)
    loss = sum(part[0] for part in everywhere) / args.test_size
    accuracy = sum(part[1] for part in everywhere) / args.test_size
    if smp.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {accuracy:.2%}")
    return loss, accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--test-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--double", type=int, default=0)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "."))
    parser.add_argument("--report", default="")
    parser.add_argument("--mp_parameters", type=str, default="")
    args = parser.parse_args()

    random.seed(12345)
    np.random.seed(12345)
    torch.manual_seed(12345)
    if args.double:
        torch.set_default_dtype(torch.float64)

    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")

    # The optimizer first, then the model, then the optimizer again: as the documentation of SMP v1 has it.
    model = Network()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler(device.type) if args.amp else None
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    losses = []
    for epoch in range(1, args.epochs + 1):
        losses += train(args, model, scaler, device, optimizer, epoch)
        loss, accuracy = test(args, model, device)
        scheduler.step()

    folder = Path(args.model_dir)
    if smp.dp_rank() == 0:
        partial = {"model_state_dict": model.local_state_dict(), "optimizer_state_dict": optimizer.local_state_dict()}
        assert partial["model_state_dict"]["_smp_is_partial"]
        smp.save(partial, str(folder / "pt_mnist_checkpoint.pt"), partial=True)
        whole = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        if smp.mp_rank() == 0:
            smp.save(whole, str(folder / "pt_mnist.pt"), partial=False)
    smp.barrier()

    # Loaded again, the model says what it said.
    checkpoint = smp.load(str(folder / "pt_mnist_checkpoint.pt"), partial=True)
    for parameter in model.local_parameters():
        parameter.data.zero_()
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    assert test(args, model, device) == (loss, accuracy)
    model.load_state_dict(smp.load(str(folder / "pt_mnist.pt"), partial=False)["model_state_dict"])
    assert test(args, model, device) == (loss, accuracy)

    if args.report and smp.rank() == 0:
        Path(args.report).write_text(json.dumps({"losses": losses, "test": loss, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
