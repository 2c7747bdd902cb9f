from model import Net

import smpkit.torch as smp

smp.init()
model = smp.DistributedModel(Net())
