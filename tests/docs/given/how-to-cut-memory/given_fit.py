from typing import NamedTuple

import torch
from torch import nn


class Output(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return Output(x.square().mean())


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
loader = [{"x": torch.randn(8, 16)}] * 8
