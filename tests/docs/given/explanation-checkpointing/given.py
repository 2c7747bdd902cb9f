import torch
from torch import nn

import smpkit.torch as smp


class Attention(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


smp.init()
model = smp.DistributedModel(Model())
self = nn.Module()
self.attention = Attention(8, 8)
self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
x, mask = torch.ones(2, 8, requires_grad=True), torch.ones(2, 8)
