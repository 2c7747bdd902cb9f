"""What the server of `tests.ranks` imports once, so that no rank it forks has to: seconds of every rank of every test.

Besides smpkit and what it loads on demand, that is what ranks import late: torch's compiler (by the first optimizer of
a process), pytest and hypothesis (by the tests' modules), Hugging Face's models. Not Hugging Face's `Trainer`, whose
module looks at the environment of the job when it is imported. Nothing of this starts a thread or touches a GPU.
"""

from __future__ import annotations

import gc
import importlib

from tests.models_of_others import MISSING, import_torchvision

_LATE = (
    "smpkit.torch.checkpoints.huggingface",
    "smpkit.torch.checkpoints.resume",
    "smpkit.torch.data_parallel.sharded",
)
MODULES = ("smpkit.torch", *_LATE, "torch._dynamo", "hypothesis", "pytest", "accelerate")
MODELS = ("bert", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "roberta", "t5", "vit")

if "torchvision" not in MISSING:
    import_torchvision()  # transformers would
for module in (*MODULES, *(f"transformers.models.{model}.modeling_{model}" for model in MODELS)):
    importlib.import_module(module)

# Half a million objects that live forever: every collection in every rank would go through them, and by that write to
# (so copy) the memory that the rank shares with the server.
gc.collect()
gc.freeze()
