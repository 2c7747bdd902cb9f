"""A model to plan whose layers are checkpointed."""

import torch
from model import Net
from torch import nn

import smpkit.torch as smp


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    net = Net()
    smp.set_activation_checkpointing(net.layers)
    return net, (torch.zeros(4, 32),)
