from types import SimpleNamespace

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return SimpleNamespace(loss=x.square().mean())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [{"x": torch.randn(8, 16)}] * 8
