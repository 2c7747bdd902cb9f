"""`smp.nn.huggingface`: how Hugging Face's models and their state dicts become distributed ones.

Importing it imports no transformers.

Models whose own configuration says how they can be divided (Llama, Mistral, Qwen, ...) need nothing from here: see
smpkit.torch.tensor_parallel.plan.
"""

from __future__ import annotations

from smpkit.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]
