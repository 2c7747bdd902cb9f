"""Hugging Face models train under tensor parallelism as they do in one process: losses, gradients, weights, logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.torch.tensor_parallel.state_dict import with_original_names
from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same
from tests.transparency.tensor_parallel_models import whole_gradients

STEPS, SAMPLES, LENGTH, VOCABULARY = 3, 8, 6, 23  # a vocabulary that no number of ranks divides
TOLERANCE = 1e-10  # float64; sums in another order, magnified by AdamW

Configured = tuple[int, int, bool, str]  # pipeline degree, tensor degree, prescaled_batch, optimize
Run = tuple[str, Configured]

MODES: list[Configured] = [
    (1, 2, True, "speed"),
    (1, 2, False, "speed"),
    (1, 2, False, "memory"),
    (1, 2, True, "memory"),
]


def loss_in_full(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Hugging Face's loss of causal models, without its rounding to float32."""
    targets = functional.pad(labels[:, 1:], (0, 1), value=-100)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def norm_in_full(norm: Any, x: Tensor) -> Tensor:
    """Normalise as RMSNorm does, without its rounding to float32, which sums in another order pass to either side."""
    scaled: Tensor = norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled


def scores_in_full(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
    """Attend as GPT-J and GPT-Neo do, without their rounding to float32."""
    scores = query @ key.transpose(-1, -2) / getattr(attention, "scale_attn", 1.0)
    seen = getattr(attention, "bias", None)
    if isinstance(seen, Tensor):
        scores = scores.masked_fill(~seen[:, :, : query.shape[2], : key.shape[2]], -torch.inf)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights @ value, weights


def routed_in_full(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as Mixtral and Qwen3-MoE do, without their rounding to float32."""
    logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    chances, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
    return logits, chances / chances.sum(-1, keepdim=True), chosen


def randomized(model: Any) -> nn.Module:
    """Give a model random weights, biases and norms too, so that every gradient counts, and take its rounding away."""
    model = model.double()
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    if model.loss_function.__name__ == "ForCausalLMLoss":
        model.loss_function = loss_in_full
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            vars(module)["forward"] = functools.partial(norm_in_full, module)
        if hasattr(module, "_attn"):
            vars(module)["_attn"] = functools.partial(scores_in_full, module)
        if type(module).__name__.endswith("TopKRouter"):
            vars(module)["forward"] = functools.partial(routed_in_full, module)
    made: nn.Module = model
    return made


def gpt(name: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return randomized(getattr(transformers, name)(getattr(transformers, MODELS[name])(**{**sizes, **off, **more})))


def gpt_neo() -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    kinds: list[Any] = [[["global", "local"], 1]]
    config: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_size": 16}
    config |= {"num_layers": 2, "num_heads": 4, "attention_types": kinds, "window_size": 3}
    config |= {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return randomized(GPTNeoForCausalLM(GPTNeoConfig(**config)))


def masked(name: str) -> nn.Module:
    import transformers

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return encoder(getattr(transformers, f"{name}ForMaskedLM"), getattr(transformers, f"{name}Config"), off)


def encoder(model: Any, config: Any, more: dict[str, Any]) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    return randomized(model(config(**{**sizes, **more, "num_hidden_layers": 2, "num_attention_heads": 4})))


MODELS = {"GPT2LMHeadModel": "GPT2Config", "GPTJForCausalLM": "GPTJConfig"}


def causal(name: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    return randomized(getattr(transformers, f"{name}ForCausalLM")(config))


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # others know no float64

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: causal("Llama"),
    "tied Llama": lambda: causal("Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Mistral": lambda: causal("Mistral", sliding_window=4),
    "Qwen2": lambda: causal("Qwen2"),
    "Qwen3": lambda: causal("Qwen3", head_dim=8),
    "Phi": lambda: causal("Phi", resid_pdrop=0.0, embd_pdrop=0.0),
    "Phi3": lambda: causal("Phi3"),
    "Mixtral": lambda: causal("Mixtral", num_local_experts=4, **EXPERTS),
    "Qwen3Moe": lambda: causal("Qwen3Moe", num_experts=4, moe_intermediate_size=12, head_dim=8, **EXPERTS),
    "GPT2": lambda: gpt("GPT2LMHeadModel"),
    "checkpointed GPT2": lambda: gpt("GPT2LMHeadModel", tie_word_embeddings=False),
    "checkpointed Llama": lambda: causal("Llama"),
    "GPTJ": lambda: gpt("GPTJForCausalLM", rotary_dim=2),
    "GPTNeo": gpt_neo,
    "GPTNeoX": lambda: causal("GPTNeoX", rotary_pct=0.5, hidden_dropout=0.0, attention_dropout=0.0),
    "sequential GPTNeoX": lambda: causal("GPTNeoX", use_parallel_residual=False, attention_bias=False, rotary_pct=0.5),
    "Bert": lambda: masked("Bert"),
    "Roberta": lambda: masked("Roberta"),
}
FAMILIES = [name for name in BUILDERS if name.split()[-1] in ("GPT2", "GPTJ", "GPTNeo", "GPTNeoX", "Bert", "Roberta")]
PLANS = [name for name in BUILDERS if name not in FAMILIES]


def checkpoint_layers(module: Any) -> None:
    if hasattr(module, "transformer"):
        smp.set_activation_checkpointing(module.transformer.seq_layers, pack_args_as_tuple=True, strategy="each")
    else:
        for layer in module.model.layers:
            smp.set_activation_checkpointing(layer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW with an `eps` that rounding is small against: biases of keys have no other gradient."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and a mask: some samples end with padding, so ranks with own samples have other masks."""
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=numbers)
    mask = torch.ones_like(tokens)
    mask[-2:, -2:] = 0
    return tokens, mask


def labels_of(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(mask == 0, -100)


@smp.step
def train_step(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, attention_mask=mask, labels=labels_of(tokens, mask))["loss"]
    model.backward(loss)
    return loss


def groups_of_samples(ranks: int, microbatches: int) -> list[slice]:
    """Return the samples over each of which a loss is averaged, when so many ranks bring batches of their own."""
    size = SAMPLES // ranks // microbatches
    return [slice(start, start + size) for start in range(0, SAMPLES, size)]


def train_plainly(module: nn.Module, groups: list[slice]) -> tuple[Trace, Tensor]:
    """Train in one process; return what came of it, and the logits of the samples of a step."""
    module.train()
    optimizer = optimizer_of(module)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, mask = samples(step)
        parts = [
            module(input_ids=tokens[each], attention_mask=mask[each], labels=labels_of(tokens, mask)[each])["loss"]
            for each in groups
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    tokens, mask = samples(STEPS)
    with torch.no_grad():
        logits = module.eval()(input_ids=tokens, attention_mask=mask)["logits"]
    gradients = {name: None if each.grad is None else each.grad.clone() for name, each in module.named_parameters()}
    return Trace(losses, gradients, {name: each.clone() for name, each in module.state_dict().items()}), logits


def train(run: Run) -> tuple[Trace, Tensor | None]:
    name, (pp, tp, prescaled, optimize) = run
    degrees = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "microbatches": 2 if pp > 1 else 1}
    smp.init({"ddp": True, "prescaled_batch": prescaled, "optimize": optimize, **degrees})
    module = BUILDERS[name]().train()
    vars(module).pop("_loss_function", None)  # ours, of logits that stay divided, does not round
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if name.startswith("checkpointed"):
        checkpoint_layers(model.get_module())
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    ranks, rank = (smp.rdp_size(), smp.rdp_rank()) if prescaled else (smp.dp_size(), smp.dp_rank())
    mine = groups_of_samples(ranks, 1)[rank]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, mask = samples(step)
        loss = train_step(model, tokens[mine], mask[mine]).reduce_mean()
        losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    gradients = {key: each for key, each in whole_gradients(model).items() if each is not None}
    named = with_original_names(model.get_module(), gradients)
    trace = Trace(losses, named, dict(model.original_state_dict()))
    logits = None
    if pp == 1:
        tokens, mask = samples(STEPS)
        with torch.no_grad():
            part = model.eval()(input_ids=tokens[mine], attention_mask=mask[mine])["logits"]
        logits = torch.cat(smp.allgather(part, smp.RDP_GROUP if prescaled else smp.DP_GROUP))
    smp.shutdown()
    return trace, logits


def train_all(runs: list[Run]) -> list[tuple[Trace, Tensor | None]]:
    return [train(run) for run in runs]


def check(size: int, runs: list[Run]) -> None:
    results = run_ranks(train_all, size, runs, timeout=180)
    for (name, (pp, tp, prescaled, optimize)), *of_ranks in zip(runs, *results, strict=True):
        groups = groups_of_samples(size // pp // (tp if prescaled else 1), 2 if pp > 1 else 1)
        plain, logits = train_plainly(BUILDERS[name](), groups)
        what = f"{name} at pipeline {pp}, tensor {tp}, prescaled {prescaled}, {optimize}"
        for trace, made in of_ranks:
            gradients = {key: plain.gradients[key] for key in trace.gradients}
            try:
                assert trace.weights.keys() == plain.weights.keys()
                assert_same(trace, Trace(plain.losses, gradients, plain.weights), TOLERANCE)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
            if made is not None:
                torch.testing.assert_close(made, logits, rtol=TOLERANCE, atol=TOLERANCE, msg=what)


def test_plans_on_two_ranks() -> None:
    """Each family once, all modes over the list; Llama in the two that differ most."""
    others = [(name, MODES[index % 4]) for index, name in enumerate(PLANS) if name != "Llama"]
    check(2, [*(("Llama", mode) for mode in (MODES[0], MODES[2])), *others])


def test_families_on_two_ranks() -> None:
    """The models that SMP v1 knew: each once, all modes over the list; GPT-2 in the two that differ most."""
    others = [(name, MODES[index % 4]) for index, name in enumerate(FAMILIES) if name != "GPT2"]
    check(2, [*(("GPT2", mode) for mode in (MODES[0], MODES[2])), *others])


def test_four_ranks() -> None:
    """More ranks than key and value heads, replicas, and two pipeline ranks."""
    check(
        4,
        [
            ("Qwen3", (1, 4, False, "memory")),
            ("GPT2", (1, 4, True, "speed")),
            ("tied Llama", (1, 2, False, "speed")),
            ("Llama", (2, 2, True, "speed")),
            ("tied Llama", (2, 2, False, "memory")),
            ("GPT2", (2, 2, True, "speed")),
            ("GPT2", (2, 2, False, "memory")),
        ],
    )


def balanced(prescaled: bool) -> Trace:
    """Train with experts whose load is balanced, for one step."""
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": prescaled})
    module = balancing()
    vars(module).pop("_loss_function", None)
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    tokens, mask = samples(0)
    mine = slice(None) if prescaled else groups_of_samples(2, 1)[smp.tp_rank()]
    loss = train_step(model, tokens[mine], mask[mine]).reduce_mean()
    losses = [sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size()]
    trace = Trace(losses, whole_gradients(model), {})
    smp.shutdown()
    return trace


def balancing() -> Any:
    return causal("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=3.0, **EXPERTS)


def balanced_and_refused() -> list[Trace]:
    traces = [balanced(prescaled) for prescaled in (False, True)]
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "memory"})
    module = balancing()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    tokens, _ = samples(0)
    with pytest.raises(UnsupportedError, match=r"asked for `output_router_logits`, but .* \(boundary: sequence\)"):
        model(input_ids=tokens)
    with pytest.raises(UnsupportedError, match="asked for `output_hidden_states`"):
        model(input_ids=tokens, output_router_logits=False, output_hidden_states=True)
    with pytest.raises(UnsupportedError, match=r"asked for `output_attentions`, but .* some of the heads"):
        model(input_ids=tokens, output_router_logits=False, output_attentions=True)
    smp.shutdown()
    return traces


def test_experts_are_balanced_over_the_samples_of_each_rank() -> None:
    """Loads are summed up in float32."""
    for prescaled, *traces in zip((False, True), *run_ranks(balanced_and_refused, 2, timeout=120), strict=True):
        module, (tokens, mask) = balancing(), samples(0)
        groups = groups_of_samples(1 if prescaled else 2, 1)
        parts = [
            module(input_ids=tokens[each], attention_mask=mask[each], labels=labels_of(tokens, mask)[each])["loss"]
            for each in groups
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        plain = Trace([loss.item()], {name: each.grad for name, each in module.named_parameters()}, {})
        for trace in traces:
            assert_same(trace, plain, 1e-6)


@pytest.mark.slow
def test_every_model_in_every_mode() -> None:
    check(2, [(name, mode) for name in BUILDERS for mode in MODES])
