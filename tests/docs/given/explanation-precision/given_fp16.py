import torch
from model import Net

import smpkit.torch as smp

smp.init({"fp16": True})
model = smp.DistributedModel(Net())
batch = torch.randn(8, 32)


@smp.step
def train_step(model, batch):
    loss = model(batch).float().square().mean()
    model.backward(loss)
    return loss
