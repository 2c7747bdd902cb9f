"""Do steps take as long as `smpkit.fit` plans them? Three models of Hugging Face, on the CPU and in real time.

Copies over the emulated link take real time on threads of their own. Each model trains within three memories, over a
fast and a slow link, in turns with a copy of it that keeps everything. How many times longer its steps take stands
beside what was planned: the processor's speed, which other guests of a host change, is in both of a turn. Times are
those of one thread, what it computes and what it waits for copies: no plan can know the other programs of a core.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

import smpkit
from smpkit.testing import EmulatedLink
from smpkit.torch.offload.link import Event

_LINKS: Final = {"fast": 0.3, "slow": 2.0}
"""How long the copy of a layer's input takes, in forwards of a layer."""
_SHARES: Final = (0.3, 0.6, 0.9)
"""Of what keeping everything takes beyond the least: how much of it the device has."""
_SETTLING, _STEPS = 8, 11
"""Steps that do not count, and that do."""
_TOKENS: Final = torch.arange(4 * 128).view(4, 128) % 512
_TEXT: Final = {"input_ids": _TOKENS, "labels": _TOKENS}
_IMAGES: Final = {"pixel_values": torch.randn(4, 3, 176, 176), "labels": torch.zeros(4).long()}
_GPT2: Final = {"n_embd": 256, "n_layer": 8, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5: Final = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
_VIT: Final = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 1024}
_MODELS: Final[dict[str, tuple[Any, str, dict[str, Any], dict[str, torch.Tensor]]]] = {
    "GPT-2": (AutoModelForCausalLM, "gpt2", _GPT2 | {"vocab_size": 512, "use_cache": False}, _TEXT),
    "T5": (AutoModelForSeq2SeqLM, "t5", _T5 | {"vocab_size": 512, "decoder_start_token_id": 0}, _TEXT),
    "ViT": (AutoModelForImageClassification, "vit", _VIT | {"image_size": 176}, _IMAGES),
}
"""Class, kind, sizes and batch; without dropout, of which ViT has none by itself."""


class Clocked(EmulatedLink):
    """Its clock counts what this thread computes and what it waits for copies, in the steps of one model."""

    waited_ns = elsewhere_ns = 0

    def stamp(self) -> int:
        return time.thread_time_ns() + self.waited_ns - self.elsewhere_ns

    def wait(self, event: Event, what: str) -> None:
        start = time.perf_counter_ns()
        super().wait(event, what)
        self.waited_ns += time.perf_counter_ns() - start


class Trained:
    """A model in training, with a memory and a link of its own."""

    def __init__(self, name: str, rate: float = 1e12, num_bytes: int = 1 << 36) -> None:
        torch.manual_seed(0)
        head, kind, sizes, self._batch = _MODELS[name]
        self._model = head.from_config(AutoConfig.for_model(kind, **sizes))
        self._link = Clocked(rate)
        self.fitted = smpkit.fit(self._model, device_gib=num_bytes / 2**30, link=self._link)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)
        self._end = self._link.stamp()

    def step(self) -> int:
        """Train a step; return its nanoseconds, up to the next forward, as steps are planned."""
        self._link.elsewhere_ns += self._link.stamp() - self._end
        start = self._link.stamp()
        self._model(**self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._end = self._link.stamp()
        return self._end - start


def main() -> None:
    torch.set_num_threads(1)  # the other core copies
    print("| model | link | memory | kept, offloaded, recomputed | planned | measured | difference |")
    print("|---" * 7 + "|", flush=True)
    for name in _MODELS:
        free = Trained(name)
        for _ in range(_SETTLING):
            free.step()
        costs = free.fitted.report()
        free.fitted.remove()
        layer = max(costs.layers, key=lambda each: each.forward_seconds)
        least = costs.other_bytes + sum(each.input_bytes for each in costs.layers) // 2
        for link, ratio in _LINKS.items():
            for share in _SHARES:
                num_bytes = least + int(share * (costs.device_bytes - least))
                model = Trained(name, layer.input_bytes / (ratio * layer.forward_seconds), num_bytes)
                free = Trained(name)
                ratios = [model.step() / free.step() for _ in range(_SETTLING + _STEPS)][_SETTLING:]
                report = model.fitted.report()
                model.fitted.remove()
                free.fitted.remove()
                gc.collect()
                counts = Counter(each.choice.value for each in report.layers)
                chosen = ", ".join(str(counts[choice]) for choice in ("keep", "offload", "recompute"))
                planned, measured = report.step_seconds / report.kept_seconds, statistics.median(ratios)
                times = f"{planned:.3f} | {measured:.3f} | {planned / measured - 1:+.1%}"
                print(f"| {name} | {link} | {share:.0%} | {chosen} | {times} |", flush=True)


if __name__ == "__main__":
    main()
