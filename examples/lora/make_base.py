"""Train the base model with plain PyTorch: a small Llama that sorts digits upwards. `python make_base.py runs/base`."""

from __future__ import annotations

import sys

import torch
from numbers_task import VOCABULARY, accuracy, draw
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/base"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens, labels = draw(64, generator, downwards=False)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tokens, labels = draw(256, generator, downwards=False)
    with torch.no_grad():
        right = accuracy(model(input_ids=tokens).logits, labels)
    model.save_pretrained(folder)
    print(f"upwards {right:.1%} of digits right after {steps} steps; saved to {folder}")


if __name__ == "__main__":
    main()
