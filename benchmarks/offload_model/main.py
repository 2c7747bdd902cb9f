"""OffloadModel in virtual time and on a GPU beside its plan, its optimizer beside torch's and DeepSpeed's."""

from __future__ import annotations

import torch

from benchmarks.common import parser, run
from benchmarks.offload_model import optimizers, simulated, sizes

if __name__ == "__main__":
    parts = {"optimizer": optimizers.steps, "simulated": simulated.steps, "sizes": sizes.steps}
    # A simulated accelerator would take the place of a GPU.
    run(__file__, parser(__doc__), parts, ["optimizer", "sizes" if torch.cuda.is_available() else "simulated"])
