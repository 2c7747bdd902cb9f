import functools

import smpkit
from smpkit.testing import FakeSageMaker

smp_options = {"enabled": True, "parameters": {"pipeline_parallel_degree": 4, "microbatches": 8, "ddp": True}}
mpi_options = {"enabled": True, "processes_per_host": 8}
smpkit.Estimator = functools.partial(smpkit.Estimator, session=FakeSageMaker())
