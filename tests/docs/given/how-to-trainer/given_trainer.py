from given import *
from torch.utils.data import TensorDataset

dataset = TensorDataset(torch.randn(16, 32), torch.randint(10, (16,)))
