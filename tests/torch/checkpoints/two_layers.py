"""What most tests here save: a model of two layers, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smpkit.torch as smp
from tests.torch.steps import wrap


def plain(*widths: int) -> nn.Sequential:
    inputs, hidden, outputs = widths or (3, 4, 2)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Linear(hidden, outputs))


def make(*widths: int, seed: int = 0, **config: Any) -> tuple[Any, Any]:
    """Start smpkit, anew if it runs, and return both, wrapped."""
    torch.manual_seed(seed)
    model = wrap(plain(*widths), **config)
    return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, model.module[0].in_features)).sum().backward()
    optimizer.step()
