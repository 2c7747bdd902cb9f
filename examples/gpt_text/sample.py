"""Let the model write: every rank takes part, and all write the same."""

import torch
from torch import Tensor

import smpkit.torch as smp


@smp.step
def score_step(model: smp.DistributedModel, tokens: Tensor) -> Tensor:
    return model(tokens)[:, -1]


def write(model: smp.DistributedModel, prompt: str, length: int, context: int, temperature: float = 0.7) -> str:
    """Continue `prompt` by `length` bytes, once per microbatch."""
    generator = torch.Generator(smp.state.device).manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())] * smp.state.cfg.microbatches, device=smp.state.device)
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            scores = score_step(model, tokens[:, -context:]).concat() / temperature
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")
