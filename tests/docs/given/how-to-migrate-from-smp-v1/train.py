import argparse

import smdistributed.modelparallel.torch as smp
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.parse_args()
smp.init()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


train_step(model, torch.ones(8, 8).to(f"cuda:{smp.local_rank()}" if torch.cuda.is_available() else "cpu"))
optimizer.step()
