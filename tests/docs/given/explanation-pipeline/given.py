from torch import nn

import smpkit.torch as smp

smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
self = nn.Module()
