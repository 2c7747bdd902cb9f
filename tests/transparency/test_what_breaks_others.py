"""What breaks other pipelines, or what their users report most, works here: the tests that fit nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.models import (
    CASES,
    HUGGING_FACE,
    LENGTH,
    TOKENS,
    WIDTH,
    Case,
    block,
    mse_step,
    token_step,
    vectors,
)
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all

# --- shapes -----------------------------------------------------------------------------------------------------------


def tokens_of_any_length(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Make the length follow from the size, so that it is another one in every step."""
    length = {8: LENGTH, 4: 3, 16: 7}[size]
    ids = torch.randint(TOKENS, (size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train_on_lengths() -> int:
    cases = {
        "tied": Case(CASES["tied modules"].build, tokens_of_any_length, token_step),
        "Llama": Case(HUGGING_FACE["Llama"].build, tokens_of_any_length, HUGGING_FACE["Llama"].step),
    }
    return len(run_all(cases, [Setup(2, "interleaved", None, (8, 4, 16, 8, 4))], 2))


def test_the_sequence_length_may_change_between_steps() -> None:
    assert run_ranks(train_on_lengths, 2, timeout=120) == [2, 2]


class Windows(nn.Module):
    """Looks at windows of its input that are longer and longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        made = [layer(x.repeat(number + 1, 1)).mean(0) for number, layer in enumerate(self.layers)]
        return torch.stack(made)


def windows_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x).square().mean() + y.mean()
    model.backward(loss)
    return loss


def train_here(case: Case, degree: int, setup: Setup) -> int:
    return len(run_all({"it": case}, [setup], degree))


def test_a_step_may_make_shapes_of_its_own() -> None:
    case = Case(Windows, vectors, windows_step)
    assert run_ranks(train_here, 2, case, 2, Setup(4, "interleaved", -1)) == [1, 1]


def test_skips_on_three_ranks() -> None:
    for seed in (None, 13):
        setup = Setup(4, "interleaved", seed)
        assert run_ranks(train_here, 3, CASES["skip connections"], 3, setup, timeout=90) == [1, 1, 1]


def train_on_ten() -> str:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})
    model = smp.DistributedModel(nn.Sequential(block(), block()))
    with pytest.raises(UsageError) as caught:
        smp.step(mse_step)(model, torch.ones(10, WIDTH), torch.ones(10, WIDTH))
    smp.barrier()  # whoever is first would hang up on the other
    return str(caught.value)


def test_a_batch_that_does_not_divide_is_refused_on_every_rank() -> None:
    first, second = run_ranks(train_on_ten, 2)
    assert first == second
    assert "10" in first
    assert "4" in first


# --- gradients and calls ----------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = block(), block(), block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def either_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Use one output in this microbatch and the other in that."""
    left, right = model(x)
    loss = functional.mse_loss(left if y.sum() > 0 else right, y)
    model.backward(loss)
    return loss


def left_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    left, right = model(x)
    loss = functional.mse_loss(left, y)
    model.backward(loss)
    return loss, right


@pytest.mark.parametrize("step", [either_step, left_step])
def test_an_output_may_have_no_gradient_now_and_then(step: Any) -> None:
    assert run_ranks(train_here, 2, Case(TwoHeads, vectors, step), 2, Setup(4, "interleaved", -1)) == [1, 1]


class Counted(nn.Module):
    """Counts its calls, the backwards through it, and the hooks on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.calls.append("input"))
        out = self.linear(x)
        out.register_hook(lambda _: self.calls.append("output"))
        result: Tensor = out.tanh()
        return result


def count_calls() -> list[list[dict[str, int]]]:
    # Tracing calls units as well, on tensors without data.
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 4, "ddp": True, "skip_tracing": True})
    layers = [Counted() for _ in range(3)]
    model = smp.DistributedModel(nn.Sequential(*layers).double())
    counts = []
    for number in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        smp.step(mse_step)(model, x, x)
        calls = layers[smp.pp_rank()].calls
        counts.append({kind: calls.count(kind) for kind in ("forward", "output", "input")})
        calls.clear()
    return [counts, [{"forward": len(layer.calls)} for layer in layers]]


def test_units_run_once_per_microbatch_from_the_first_step_on() -> None:
    for counts, elsewhere in run_ranks(count_calls, 3):
        assert [step["forward"] for step in counts] == [4] * 4
        assert elsewhere == [{"forward": 0}] * 3


def test_hooks_run_once_for_each_microbatch() -> None:
    for rank, (counts, _) in enumerate(run_ranks(count_calls, 3)):
        assert [step["output"] for step in counts] == [4] * 4
        assert [step["input"] for step in counts] == [4 if rank else 0] * 4


# --- masks --------------------------------------------------------------------------------------------------------


def padded_step(model: Any, ids: Tensor, labels: Tensor) -> Any:
    mask = (torch.arange(ids.shape[1]) < 2 + ids[:, :1] % 3).long()
    out = model(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))
    model.backward(out.loss)
    return out.loss


def train_padded() -> int:
    cases = {
        name: Case(HUGGING_FACE[name].build, HUGGING_FACE[name].batch, padded_step) for name in ("GPT-2", "BERT", "T5")
    }
    return len(run_all(cases, [Setup(2, "interleaved", None)], 2))


def test_padding_masks_reach_every_layer() -> None:
    assert run_ranks(train_padded, 2, timeout=120) == [3, 3]
