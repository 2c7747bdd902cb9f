"""Train the model of FairScale's own benchmark with one library: `worker.py LIBRARY WIDTH` prints JSON.

The model is a TransformerLM as a chain of layers, written anew. One file, because it runs under the Python that has the
library. Where there is no GPU, FairScale's CUDA calls are replaced by ones that do nothing, because its OffloadModel
refuses to run otherwise.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 10_000
TOKENS_PER_STEP = 248  # 8 sequences of 31 tokens, as FairScale counts words


class Embedding(nn.Module):
    """Token embedding, scaled, with fixed sine positions."""

    positions: Tensor

    def __init__(self, width: int, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.scale = math.sqrt(width)
        angles = torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]


class Decoder(nn.Module):
    """Causal attention and two linear layers, each with its norm behind it."""

    def __init__(self, width: int, heads: int = 32) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, value: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(value.shape[1], device=value.device)
        attended, _ = self.attention(value, value, value, attn_mask=mask, need_weights=False, is_causal=True)
        value = self.norms[0](value + attended)
        return self.norms[1](value + self.feed_forward(value))


def language_model(width: int, layers: int = 10) -> nn.Sequential:
    return nn.Sequential(Embedding(width), *[Decoder(width) for _ in range(layers)], nn.Linear(width, VOCABULARY))


LIBRARIES = ("fairscale", "smpkit", "smpkit fast", "plain")
CLIP_VALUE = 0.05
STEPS = 5
WARM_UP = 2
"""Steps before those that are timed: in the second, updates that wait for the next forward touch their states first."""


def main(library: str, width: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    plain = language_model(width)
    model, optimizer = contestant(library, plain, device)
    torch.manual_seed(1)
    seconds, busy, losses = [], [], []
    for _ in range(WARM_UP + STEPS):
        tokens = torch.randint(0, VOCABULARY, (8, 32))
        start, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        output = model(tokens[:, :-1].to(device))
        loss = functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten().to(device))
        loss.backward()
        if library != "smpkit fast":
            torch.nn.utils.clip_grad_value_(model.parameters(), CLIP_VALUE)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu)
    result: dict[str, Any] = {
        "words_per_second": TOKENS_PER_STEP * STEPS / sum(seconds[WARM_UP:]),
        "busy_seconds": min(busy[WARM_UP:]),
        "losses": losses,
        "host_bytes": resident_bytes(),
    }
    if device.type == "cuda":
        result["device_bytes"] = torch.cuda.max_memory_allocated()
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
    print(json.dumps(result))


def contestant(library: str, plain: Any, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Return model and optimizer as FairScale's benchmark sets them up."""
    if library == "plain":
        return plain.to(device), torch.optim.Adam(plain.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"num_slices": 3, "checkpoint_activation": True, "num_microbatches": 1}
    if library == "fairscale":
        if device.type == "cpu":
            pretend_cuda()
        from fairscale.experimental.nn import OffloadModel as Theirs  # type: ignore[import-not-found]

        model: Any = Theirs(plain, device, torch.device("cpu"), **settings)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)
    from smpkit import OffloadModel, OffloadOptimizer

    model = OffloadModel(plain, device, torch.device("cpu"), **settings)
    if library == "smpkit fast":
        return model, OffloadOptimizer(model, torch.optim.Adam, lr=1e-3, max_grad_norm=1.0)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def pretend_cuda() -> None:
    """Let code that insists on CUDA run on the CPU: streams are none, and moving a tensor leaves it."""
    cuda, tensor = torch.cuda, torch.Tensor
    replaced: list[tuple[Any, str, Any]] = [
        (cuda, "is_available", lambda: True),
        (cuda, "device", lambda _: contextlib.nullcontext()),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "Stream", lambda *_, **__: types.SimpleNamespace()),
        (tensor, "cuda", lambda self, *_, **__: self),
        (tensor, "pin_memory", lambda self, *_, **__: self),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def resident_bytes() -> int:
    """Return the most memory that this process has held; `ru_maxrss` begins with what its parent held."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
