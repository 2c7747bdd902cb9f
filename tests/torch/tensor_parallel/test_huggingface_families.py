"""Hugging Face models that modules of `smp.nn` have replaced, on two ranks: given positions, and generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from tests.models_of_others import DIVISIBLE
from tests.ranks import run_ranks
from tests.train import batch

FAMILIES = ["GPT2", "GPTJ", "GPTNeo", "GPTNeoX"]
MODES: list[dict[str, Any]] = [
    {"prescaled_batch": prescaled, "optimize": optimize}
    for prescaled in (False, True)
    for optimize in ("speed", "memory")
]


def built(name: str) -> Any:
    """Return a model that says different things to different prompts."""
    module = DIVISIBLE[name].build().eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
            if key.endswith("bias"):
                parameter.sub_(1)
    return module


def wrapped(name: str, **config: Any) -> Any:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, **config})
    module = built(name)
    smp.set_tensor_parallelism(module)
    return smp.DistributedModel(module)


def own(value: Tensor) -> Tensor:
    """Return this rank's samples, or with `prescaled_batch` all."""
    return value if smp.state.cfg.prescaled_batch else value.chunk(2)[smp.tp_rank()]


def prompts() -> tuple[Tensor, Tensor]:
    """Return four prompts and their mask, two of them with padding on the left."""
    tokens, mask = (each[-4:].flip(1) for each in batch(DIVISIBLE["GPT2"], 0, 8)[:2])
    return tokens.masked_fill(mask == 0, 0), mask


def end_of_some(made: Tensor) -> int:
    """Return a token at which some samples end before others."""
    for token in made.flatten().tolist():
        if 0 < (made[:, :-1] == token).any(1).sum() < len(made):
            return int(token)
    raise AssertionError(made)


def positions_rotate() -> None:
    """Positions are those that are given, and sequences that are packed into one sample stay apart."""
    tokens, mask = prompts()
    shifted = (mask.cumsum(-1) - 1).clamp(min=0) + torch.arange(4).unsqueeze(1)
    packed = torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, -1).contiguous()
    for name, mode in zip(FAMILIES, MODES, strict=True):
        plain = built(name)
        model = wrapped(name, **mode)
        alone = {"position_ids": packed, "use_cache": False}
        for given in ({"attention_mask": mask, "position_ids": shifted}, alone, {"position_ids": packed}):
            with torch.no_grad():
                expected = plain(input_ids=tokens, **given).logits
                made = model(
                    input_ids=own(tokens),
                    **{key: own(each) if isinstance(each, Tensor) else each for key, each in given.items()},
                ).logits
            # Padding sees nothing, and nobody reads what becomes of it.
            seen = (mask if "attention_mask" in given else torch.ones_like(mask)).bool()
            torch.testing.assert_close(made[own(seen)], own(expected)[own(seen)], rtol=1e-6, atol=1e-6)
        smp.shutdown()


def generation() -> None:
    """Greedy tokens, beams and samples are those of one process; some samples end before others."""
    tokens, mask = prompts()
    for name, mode in zip(FAMILIES, MODES, strict=True):
        plain = built(name)
        model = wrapped(name, **mode).get_module()
        free = plain.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
        end = end_of_some(free[:, tokens.shape[1] :])
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        for more in ({}, {"num_beams": 2}):
            expected = plain.generate(tokens, attention_mask=mask, **options, **more)
            made = model.generate(own(tokens), attention_mask=own(mask), **options, **more)
            assert torch.equal(made, own(expected)), (name, mode, more)
        smp.shutdown()


def sampling() -> None:
    """Ranks with other random numbers draw the same, and go on with their own."""
    tokens, mask = prompts()
    plain = built("GPT2")
    options = {"max_new_tokens": 4, "do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    for prescaled in (True, False):
        model = wrapped("GPT2", prescaled_batch=prescaled).get_module()
        torch.manual_seed(9)
        expected = [plain.generate(tokens, attention_mask=mask, **options) for _ in range(2)]
        torch.manual_seed(9 + smp.tp_rank())
        for each in expected:
            made = model.generate(own(tokens), attention_mask=own(mask), **options)
            assert torch.equal(made.sequences, own(each.sequences))
            torch.testing.assert_close(made.scores, tuple(map(own, each.scores)), rtol=1e-6, atol=1e-6)
        after = torch.initial_seed()
        assert after == 9 + smp.tp_rank()
        smp.shutdown()


def refusals() -> None:
    tokens, _ = prompts()
    model = wrapped("GPT2").get_module()
    with pytest.raises(UnsupportedError, match=r"keeps no cache, so it cannot `generate\(use_cache=True\)`"):
        model.generate(tokens, use_cache=True)
    with pytest.raises(UnsupportedError, match="`max_time` would let tensor-parallel ranks stop at different tokens"):
        model.generate(tokens, max_time=3.0)
    with pytest.raises(UsageError, match="called without a prompt"):
        model.generate(max_new_tokens=2)
    smp.shutdown()
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    headless = built("GPT2").transformer
    smp.set_tensor_parallelism(headless)
    bare: Any = smp.DistributedModel(headless).get_module()
    with pytest.raises(UnsupportedError, match="has no head, so it cannot generate"):
        bare.generate(tokens)
    with smp.tensor_parallelism():
        nowhere = smp.nn.DistributedTransformerLMHead(
            num_layers=1, num_attention_heads=2, attention_head_size=4, hidden_size=8, vocab_size=23, num_positions=0
        )
    with pytest.raises(UsageError, match="`position_ids` are given, but this model has no position embedding"):
        nowhere((tokens, None, None, torch.arange(6).unsqueeze(0), None))
    smp.shutdown()


def everything() -> None:
    for case in (positions_rotate, generation, sampling, refusals):
        case()


def test_on_two_ranks() -> None:
    run_ranks(everything, 2, timeout=180)
