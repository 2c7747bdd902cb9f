import torch
from torch import nn

layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(16)))
criterion = nn.MSELoss()
batches = [(torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16))] * 2
