import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

os.environ["SM_HP_MP_PARAMETERS"] = '{"pipeline_parallel_degree": 2, "microbatches": 4}'
train_set, test_set = (TensorDataset(torch.randn(size, 32), torch.randint(10, (size,))) for size in (32, 16))
epochs = 2


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
