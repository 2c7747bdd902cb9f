"""Replaced Hugging Face models take arguments of the classes that they replace, by name, or refuse them.

Each call is compared with the same call of the model that is not replaced: outputs, and gradients of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.errors import SmpkitError, UnsupportedError, UsageError
from smpkit.torch.tensor_parallel.state_dict import join_state, with_original_names
from tests.models_of_others import DIVISIBLE
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 6, 23, 16, 4
TOLERANCE = 1e-6  # Hugging Face computes losses and some scores in float32
LEAST = torch.finfo(torch.float64).min

Arguments = dict[str, Any]
Case = Callable[[slice], Arguments]
"""Makes the arguments for some of the samples."""

# --- what is given ----------------------------------------------------------------------------------------------------


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = drawn(0, SAMPLES, LENGTH)
PADDING = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
PADDING[1, -2:] = PADDING[3, -1:] = 0
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
SEEN = CAUSAL & PADDING[:, None, None, :].bool()  # [samples, 1, length, length]
PREFIX = SEEN | (torch.arange(LENGTH) < 3)  # the first positions see each other in both directions
ROWS = SEEN | torch.eye(LENGTH, dtype=torch.bool)  # rows that differ, for encoders too
OF_HEADS = ROWS & (drawn(5, SAMPLES, HEADS, LENGTH, LENGTH) % 3 > 0) | torch.eye(LENGTH, dtype=torch.bool)
POSITIONS = (torch.arange(LENGTH) + torch.arange(SAMPLES).unsqueeze(1)).contiguous()
STATES = normal(1, SAMPLES, LENGTH, WIDTH)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, LEAST)


def divided(**arguments: Any) -> Case:
    """Give each group of samples its part of every tensor that has one for each."""

    def of(part: slice) -> Arguments:
        return {
            name: value[part] if isinstance(value, Tensor) and value.shape[:1] == (SAMPLES,) else value
            for name, value in arguments.items()
        }

    return of


def shared_by_group(part: slice) -> Arguments:
    """A mask for all samples of a rank, which is another one on each."""
    return {"input_ids": TOKENS[part], "attention_mask": additive(OF_HEADS[part][:1, :1])}


IDS: Arguments = {"input_ids": TOKENS}
ASKS_NOTHING: Arguments = {"past_key_values": None, "use_cache": False, "output_attentions": False, "head_mask": [None]}
DECODER: dict[str, Case] = {
    "padding": divided(**IDS, attention_mask=PADDING, labels=TOKENS.masked_fill(PADDING == 0, -100)),
    "boolean padding": divided(**IDS, attention_mask=PADDING.bool()),
    "mask with rows": divided(**IDS, attention_mask=additive(SEEN), labels=TOKENS),
    "mask of heads": divided(**IDS, attention_mask=additive(OF_HEADS & CAUSAL)),
    "mask for all": divided(**IDS, attention_mask=additive(CAUSAL[None, None])),
    "positions": divided(**IDS, attention_mask=torch.ones_like(PADDING), position_ids=POSITIONS, labels=TOKENS),
    "embeddings": divided(inputs_embeds=STATES, labels=TOKENS),
    "num_items_in_batch": divided(**IDS, labels=TOKENS, num_items_in_batch=torch.tensor(7)),
    "chosen logits": divided(**IDS, logits_to_keep=torch.tensor([0, 3])),
    "tuple": divided(**IDS, labels=TOKENS, return_dict=False),
    "nothing asked": divided(**IDS, **ASKS_NOTHING, return_dict=True, logits_to_keep=0),
    "token types": divided(**IDS, token_type_ids=drawn(3, SAMPLES, LENGTH), labels=TOKENS),
}
WHOLE: dict[str, Case] = {
    "both directions": divided(**IDS, attention_mask=additive(PREFIX), labels=TOKENS),
    "mask of a row": divided(**IDS, attention_mask=additive(PADDING[:, None, None, :].bool())),
    "shared by group": shared_by_group,
}
LEFT = PADDING.flip(1)
"""The first positions of some samples see nothing, and predict their first token."""
ON_THE_LEFT: dict[str, Case] = {
    "padding on the left": divided(**IDS, attention_mask=LEFT, labels=TOKENS.masked_fill(LEFT == 0, -100)),
}
BOOLEAN: dict[str, Case] = {"boolean heads": divided(**IDS, attention_mask=OF_HEADS)}
ENCODER: dict[str, Case] = {
    "padding": divided(**IDS, attention_mask=PADDING, labels=TOKENS),
    "no padding": divided(**IDS, attention_mask=torch.ones_like(PADDING)),
    "rank without padding": divided(**IDS, attention_mask=PADDING.clone().index_fill_(0, torch.tensor([0, 1]), 1)),
    "mask with rows": divided(**IDS, attention_mask=additive(ROWS), labels=TOKENS),
    "mask of a row": divided(**IDS, attention_mask=additive(PADDING[:, None, None, :].bool())),
    "mask of heads": divided(**IDS, attention_mask=additive(OF_HEADS)),
    "shared by group": shared_by_group,
    "embeddings": divided(inputs_embeds=STATES, labels=TOKENS),
    "tuple": divided(**IDS, labels=TOKENS, return_dict=False),
    "num_items_in_batch": divided(**IDS, num_items_in_batch=torch.tensor(7)),
    "states of a decoder": divided(**IDS, encoder_attention_mask=PADDING),
    "nothing asked": divided(**IDS, output_attentions=False, head_mask=[None, None]),
}


def eager(build: Callable[[], Any]) -> Any:
    model = build()
    model.set_attn_implementation("eager")
    return model


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Case]]] = {
    "GPT2": (DIVISIBLE["GPT2"].build, {**DECODER, **WHOLE, **ON_THE_LEFT, **BOOLEAN}),
    "GPTJ": (DIVISIBLE["GPTJ"].build, {**DECODER, **WHOLE}),
    "GPTNeo": (DIVISIBLE["GPTNeo"].build, DECODER),
    "Bert": (DIVISIBLE["Bert"].build, {**ENCODER, **BOOLEAN}),
    "eager Bert": (lambda: eager(DIVISIBLE["Bert"].build), ENCODER),
    "Roberta": (DIVISIBLE["Roberta"].build, {**ENCODER, **BOOLEAN}),
}

# --- compared with the model that is not replaced ---------------------------------------------------------------------

Run = tuple[str, int, bool, str, bool]  # model, tensor degree, prescaled_batch, optimize, train


def called(model: Any, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return a number to go backward from, and the logits."""
    arguments = {key: each.detach().clone() if isinstance(each, Tensor) else each for key, each in arguments.items()}
    output = model(**arguments)
    if isinstance(output, tuple):
        *losses, logits = output[: 1 + ("labels" in arguments)]
    else:
        losses, logits = [output[key] for key in ("loss",) if key in output], output["logits"]
    return losses[0].double() if losses else logits.pow(2).mean(), logits


def compare(run: Run, only: set[str] | None) -> Iterator[str]:
    """Yield what differs between a model and its replacement."""
    name, degree, prescaled, optimize, trains = run
    smp.init({"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": prescaled, "optimize": optimize})
    plain, module = (MODELS[name][0]().train(trains) for _ in range(2))
    smp.set_tensor_parallelism(module)
    model: Any = smp.DistributedModel(module, replace_at_degree_1=True)
    groups = 1 if prescaled else degree
    size = SAMPLES // groups
    parts = [slice(start, start + size) for start in range(0, SAMPLES, size)]
    own = 0 if prescaled else smp.tp_rank()
    for case, arguments in MODELS[name][1].items():
        if only is not None and case not in only:
            continue
        plain.zero_grad()
        model.zero_grad()
        expected = [called(plain, arguments(part)) for part in parts]
        torch.stack([objective for objective, _ in expected]).mean().backward()
        try:
            objective, logits = called(model, arguments(parts[own]))
            objective.backward()
            torch.testing.assert_close(logits, expected[own][1], rtol=TOLERANCE, atol=TOLERANCE)
            torch.testing.assert_close(objective, expected[own][0], rtol=TOLERANCE, atol=TOLERANCE)
            held = {key: each.grad for key, each in model.local_named_parameters() if each.grad is not None}
            gradients = join_state(model.get_module(), held)
            theirs = dict(plain.named_parameters())
            for key, each in with_original_names(model.get_module(), gradients).items():
                wanted = theirs[key].grad if key in theirs else None
                if wanted is not None:
                    assert torch.allclose(each, wanted, rtol=TOLERANCE, atol=TOLERANCE), f"the gradient of {key}"
        except (AssertionError, SmpkitError, TypeError) as error:
            yield f"{run}, {case}: {type(error).__name__}: {str(error)[:300]}"
    smp.shutdown()


def compare_all(runs: list[Run], only: set[str] | None) -> list[str]:
    return [problem for run in runs for problem in compare(run, only)]


def check(degree: int, runs: list[Run], only: set[str] | None = None) -> None:
    for problems in run_ranks(compare_all, degree, runs, only, timeout=600):
        assert not problems, "\n".join(problems)


SELECTED = {"padding", "token types", "positions", "boolean heads", "both directions", "embeddings", "nothing asked"}
SELECTED |= {"rank without padding", "shared by group", "num_items_in_batch", "padding on the left"}


def test_some_arguments_on_one_rank() -> None:
    check(1, [(name, 1, True, "speed", True) for name in ("GPT2", "Bert")], SELECTED)


def test_some_arguments_on_two_ranks() -> None:
    modes = [(False, "speed"), (True, "memory"), (False, "memory"), (True, "speed")]
    names = ("GPT2", "GPTJ", "GPTNeo", "Bert", "eager Bert")
    check(2, [(name, 2, *modes[index % 4], index % 2 == 0) for index, name in enumerate(names)], SELECTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_argument(name: str) -> None:
    check(1, [(name, 1, True, "speed", trains) for trains in (False, True)])
    modes = [(prescaled, optimize) for prescaled in (False, True) for optimize in ("speed", "memory")]
    check(2, [(name, 2, *mode, trains) for mode in modes for trains in (False, True)])


# --- refused by name --------------------------------------------------------------------------------------------------


REFUSED: Arguments = {
    "past_key_values": object(),
    "use_cache": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "head_mask": torch.zeros(2, HEADS),
    "encoder_hidden_states": STATES,
}
WRONG: list[tuple[Arguments, str]] = [
    ({"labels": TOKENS}, "called with neither of `input_ids`, `inputs_embeds`"),
    ({**IDS, "inputs_embeds": STATES}, "called with both of"),
    ({**IDS, "attention_mask": PADDING[:, 1:]}, r"`attention_mask` is \[4, 5\], for 4 samples of 6 positions"),
    ({**IDS, "position_ids": POSITIONS}, "`position_ids` are given without `attention_mask`"),
    ({**IDS, "labels": TOKENS, "logits_to_keep": 1}, "`logits_to_keep` is given with `labels`"),
]


def replaced(module: Any) -> Any:
    smp.shutdown()
    smp.init()
    smp.set_tensor_parallelism(module)
    return smp.DistributedModel(module, replace_at_degree_1=True)


@on_ranks(1)
def test_rejects_other_arguments() -> None:
    module: Any = DIVISIBLE["GPT2"].build()
    model = replaced(module)
    for name, value in REFUSED.items():
        with pytest.raises(UnsupportedError, match=f"cannot be called with `{name}`"):
            model(**IDS, **{name: value})
    for arguments, message in WRONG:
        with pytest.raises(UsageError, match=message):
            model(**arguments)
    with pytest.raises(UnsupportedError, match="keeps no cache to generate with"):
        model.get_module().generate(TOKENS)
    module.config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match="the configuration has `output_hidden_states`"):
        model(input_ids=TOKENS)
    module = DIVISIBLE["GPT2"].build()
    module.config.add_cross_attention = True
    assert type(replaced(module).get_module()).__name__ == "GPT2LMHeadModel"
    with pytest.raises(UnsupportedError, match="cannot be called with `output_hidden_states`"):
        replaced(DIVISIBLE["Bert"].build())(input_ids=TOKENS, output_hidden_states=True)
