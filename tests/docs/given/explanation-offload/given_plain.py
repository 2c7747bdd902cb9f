import torch
from model import Net

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.randn(8, 32)] * 2
