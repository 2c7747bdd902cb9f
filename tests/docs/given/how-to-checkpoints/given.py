"""What pages take for granted: a script that has got as far as its first step."""

import torch
from model import Net
from torch.nn import functional

import smpkit.torch as smp

torch.manual_seed(0)
if not smp.is_initialized():
    smp.init()
module = Net()
model = smp.DistributedModel(module)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
inputs, targets = torch.randn(8, 32), torch.randint(10, (8,))
batches = first_batches = loader = [(inputs, targets)] * 2
step, steps = 0, 201


@smp.step
def train_step(model, inputs, targets):
    loss = functional.cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss


for inputs, targets in batches:
    train_step(model, inputs, targets)
    optimizer.step()
