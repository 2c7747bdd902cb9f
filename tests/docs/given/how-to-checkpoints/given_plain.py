from model import Net

import smpkit.torch as smp

plain_model = Net()
