import warnings

from given import *

warnings.filterwarnings("ignore", "User provided device_type of 'cuda', but CUDA is not available")
