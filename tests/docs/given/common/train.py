import argparse

import torch
from model import Net

import smpkit.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
steps = parser.parse_args().steps
smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(Net())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


for step in range(steps):
    optimizer.zero_grad()
    loss = train_step(model, torch.ones(8, 32)).reduce_mean()
    optimizer.step()
    if smp.rank() == 0:
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
