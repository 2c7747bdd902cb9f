import torch
from model import Net

import smpkit.torch as smp

smp.init({"offload_activations": True})
model = Net()
