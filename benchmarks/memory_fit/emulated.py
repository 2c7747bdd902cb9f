"""`python -m benchmarks.memory_fit.emulated`: do steps take as long as `smpkit.fit` plans them?

Three models of Hugging Face, with random weights, train on the CPU with a link whose copies take real time on threads
of their own (`smpkit.testing.EmulatedLink`). Each trains within three memories, over a fast and a slow link. What was
planned from the layers of three steps stands beside the median of the steps that follow.

Both are times of one thread: what it computes, by its own clock, and what it waits for copies. Other programs on the
same cores make a step last longer, and no plan can know them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

import smpkit
from smpkit.testing import EmulatedLink
from smpkit.torch.offload.emulated import ThreadWait
from smpkit.torch.offload.link import Event

__all__ = ["rows"]

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 4, 8, 512
SAMPLES, TOKENS = 4, 128
LINKS: Final = {"fast": 0.3, "slow": 2.0}
"""How long the copy of a layer's input takes, in forwards of a layer."""
SHARES: Final = (0.3, 0.6, 0.9)
"""Of what keeping everything takes beyond the least: how much of it the device has."""
_SETTLING: Final = 8
_GIB: Final = 2**30

Model = tuple[nn.Module, dict[str, Any]]


def gpt2() -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    tokens = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % VOCABULARY
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def t5() -> Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]  # one field is of every model
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS // 2,
        num_decoder_layers=LAYERS // 2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    tokens = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % VOCABULARY
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def vit() -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=176,
        patch_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = torch.linspace(-1, 1, SAMPLES * 3 * 176 * 176).view(SAMPLES, 3, 176, 176)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.zeros(SAMPLES).long()}


MODELS: Final[Mapping[str, Callable[[], Model]]] = {"GPT-2": gpt2, "T5": t5, "ViT": vit}


class Clocked(EmulatedLink):
    """Its clock counts what this thread computes and what it waits for copies."""

    waited = 0.0

    def stamp(self) -> float:
        return time.thread_time() + self.waited

    def wait(self, event: Event, what: str) -> ThreadWait:
        found = super().wait(event, what)
        self.waited += found.seconds
        return found


def measure(build: Callable[[], Model], rate: float, device_bytes: int, steps: int) -> tuple[Any, float]:
    """Train with a link of `rate` bytes a second; return what was planned, and the median seconds of a step."""
    torch.manual_seed(0)
    model, batch = build()
    link = Clocked(rate)
    fitted = smpkit.fit(model, device_gib=device_bytes / _GIB, link=link)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    seconds = []
    for _ in range(_SETTLING + steps):
        began = link.stamp()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(link.stamp() - began)  # to the next forward, as steps are planned
    report = fitted.report()
    fitted.remove()
    gc.collect()
    return report, statistics.median(seconds[_SETTLING:])


def rows(names: Iterable[str], steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per model, link and memory."""
    for name in names:
        build = MODELS[name]
        # Much memory, and a link that is in nobody's way: what layers cost, and what they take.
        free, _ = measure(build, 1e12, 64 * _GIB, steps)
        layer = max(free.layers, key=lambda each: each.forward_seconds)
        least = free.other_bytes + sum(each.input_bytes for each in free.layers) // 2
        for link, ratio in LINKS.items():
            rate = layer.input_bytes / (ratio * layer.forward_seconds)
            for share in SHARES:
                limit = least + int(share * (free.device_bytes - least))
                report, seconds = measure(build, rate, limit, steps)
                counts = [sum(each.choice.value == word for each in report.layers) for word in _WORDS]
                row = {"model": name, "link": link, "share": share, "planned": report.step_seconds, "steps": seconds}
                yield {**row, "chosen": counts, "early": report.measured_seconds, "stall": report.offload.stall_seconds}


_WORDS: Final = ("keep", "offload", "recompute")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=15, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--model", choices=[*MODELS], action="append", help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other core copies
    if not options.json:
        print("| model | link | memory | kept, offloaded, recomputed | planned | measured | difference |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for row in rows(options.model or MODELS, options.steps):
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        chosen = ", ".join(map(str, row["chosen"]))
        planned, taken = row["planned"], row["steps"]
        times = f"{1e3 * planned:.0f} ms | {1e3 * taken:.0f} ms | {planned / taken - 1:+.1%}"
        print(f"| {row['model']} | {row['link']} | {row['share']:.0%} | {chosen} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
