import torch
from torch import nn


class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 16))


batches = [(torch.randint(16, (8,)), torch.randint(16, (8,)))] * 2
