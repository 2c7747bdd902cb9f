"""`python -m benchmarks.memory_fit.emulated`: do steps take as long as `smpkit.fit` plans them?

Three models of Hugging Face, with random weights, train on the CPU with a link whose copies take real time on threads
of their own (`smpkit.testing.EmulatedLink`). Each trains within three memories, over a fast and a slow link, in turns
with a copy of it that keeps everything. How many times longer its steps take stands beside what was planned. The
processor's speed, which other guests of a host change from second to second, is in both of a turn.

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
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import smpkit
from smpkit.testing import EmulatedLink
from smpkit.torch.offload.emulated import ThreadWait
from smpkit.torch.offload.link import Event

if TYPE_CHECKING:
    from smpkit.torch.memory import FitReport

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
    """Its clock counts what this thread computes and what it waits for copies, in the steps of one model."""

    waited = 0.0
    elsewhere = 0.0
    """What the steps of others have taken."""

    def stamp(self) -> float:
        return time.thread_time() + self.waited - self.elsewhere

    def wait(self, event: Event, what: str) -> ThreadWait:
        found = super().wait(event, what)
        self.waited += found.seconds
        return found


class Trained:
    """A model in training, with a memory and a link of its own.

    Args:
        build: makes the model and its batch.
        rate: of the link, in bytes a second.
        device_bytes: that the model may hold.
    """

    def __init__(self, build: Callable[[], Model], rate: float, device_bytes: int) -> None:
        torch.manual_seed(0)
        self._model, self._batch = build()
        self._link = Clocked(rate)
        self._fitted = smpkit.fit(self._model, device_gib=device_bytes / _GIB, link=self._link)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)
        self._ended = self._link.stamp()

    def step(self) -> float:
        """Train a step; return its seconds."""
        self._link.elsewhere += self._link.stamp() - self._ended
        began = self._link.stamp()
        self._model(**self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._ended = self._link.stamp()  # to the next forward, as steps are planned
        return self._ended - began

    def end(self) -> FitReport:
        """Return what was planned."""
        report = self._fitted.report()
        self._fitted.remove()
        return report


def measure(
    build: Callable[[], Model], rate: float, device_bytes: int, steps: int
) -> tuple[FitReport, list[float], list[float]]:
    """Train with a link of `rate` bytes a second, and in turns with much memory and a link that is in nobody's way.

    Returns:
        What was planned, and the seconds of each step of both.
    """
    fitted, free = Trained(build, rate, device_bytes), Trained(build, 1e12, 64 * _GIB)
    turns = [(fitted.step(), free.step()) for _ in range(_SETTLING + steps)]
    taken, kept = zip(*turns[_SETTLING:], strict=True)
    report = fitted.end()
    free.end()
    gc.collect()
    return report, list(taken), list(kept)


def rows(names: Iterable[str], steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per model, link and memory."""
    for name in names:
        build = MODELS[name]
        # What layers cost, and what they take.
        free = Trained(build, 1e12, 64 * _GIB)
        for _ in range(_SETTLING):
            free.step()
        report = free.end()
        layer = max(report.layers, key=lambda each: each.forward_seconds)
        least = report.other_bytes + sum(each.input_bytes for each in report.layers) // 2
        most = report.device_bytes
        for link, ratio in LINKS.items():
            rate = layer.input_bytes / (ratio * layer.forward_seconds)
            for share in SHARES:
                report, taken, kept = measure(build, rate, least + int(share * (most - least)), steps)
                counts = [sum(each.choice.value == word for each in report.layers) for word in _WORDS]
                ratios = [one / other for one, other in zip(taken, kept, strict=True)]
                planned = report.step_seconds / report.kept_seconds
                row = {"model": name, "link": link, "share": share, "planned": planned, "chosen": counts}
                yield {**row, "ratios": ratios, "taken": taken, "kept": kept, "planned_seconds": report.step_seconds}


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
        planned, taken = row["planned"], statistics.median(row["ratios"])
        times = f"{planned:.3f} | {taken:.3f} | {planned / taken - 1:+.1%}"
        print(f"| {row['model']} | {row['link']} | {row['share']:.0%} | {chosen} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
