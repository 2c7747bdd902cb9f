"""Models as people write them, each with the step that trains it: none of them knows that it will be cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, LENGTH = 6, 11, 5


@dataclass(frozen=True)
class Case:
    """A model, the batch of a step, and the step.

    Args:
        build: makes the model.
        batch: makes the arguments of the step for a batch of `size` samples.
        step: what a user decorates with `@smp.step`: `step(model, *batch)`.
        dtype: of the parameters.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Any, ...]]
    step: Callable[..., Any]
    dtype: torch.dtype = torch.float64


# --- batches ------------------------------------------------------------------------------------------------------


def vectors(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return tuple(torch.randn(size, WIDTH, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2))


def singles(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Return vectors for parameters of float32."""
    return tuple(each.float() for each in vectors(size, generator))


def doubled(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Give each microbatch two samples at least, which BatchNorm needs."""
    return vectors(2 * size, generator)


def tokens(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    ids = torch.randint(TOKENS, (size, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# --- steps --------------------------------------------------------------------------------------------------------


def mse_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    loss = functional.mse_loss(out, y.to(out.dtype))
    model.backward(loss)
    return loss


def autocast_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Lead only the model's own part under autocast, as SMP v1's examples did."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = functional.mse_loss(out.float(), y)
    model.backward(loss)
    return loss, out


def token_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    model.backward(loss)
    return loss


def loss_in_model_step(model: Any, x: Tensor, y: Tensor) -> Any:
    loss, prediction = model(x, y)
    model.backward(loss)
    return loss, prediction


# --- how models call their layers ---------------------------------------------------------------------------------


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def by_torch(function: Callable[..., Any], *args: Any) -> Any:
    """Compute it again in backward."""
    return checkpoint(function, *args, use_reentrant=False)


class NoGradient(torch.autograd.Function):
    """Gives what it takes no gradient."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> None:
        return None


class Does(nn.Module):
    """Has the parts that it is given by name, and does with them and its arguments what a function says."""

    def __init__(self, act: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.act = act
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, *args, **kwargs)


# --- plain stacks -------------------------------------------------------------------------------------------------


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def sequential() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


class Square(nn.Linear):
    """A linear layer from a hidden state to the next; models of tests do something besides."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Stack(nn.Module):
    """A ModuleList of equal layers, which follow each other unless a model calls them in a way of its own."""

    layer: Callable[[], nn.Module] = staticmethod(block)

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer() for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def with_residuals(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Call layers in a row, each with a residual around it."""
    for layer in layers:
        x = x + layer(x)
    return x


class Loop(nn.Module):
    """A ModuleList and a Python loop, with a residual between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(with_residuals(self.layers, self.first(x)))


class DroppingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout, self.last = block(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.dropout(self.inner(x)))


class Dropping(Stack):
    """Drops at random: only trainings that draw alike can be compared."""

    layer = DroppingLayer


class UShape(nn.Module):
    """Skips from each level on the way down to the same level on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block() for _ in range(4)])
        self.middle = block()
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], dim=-1)))
        return x


class Inception(nn.Module):
    """Parallel branches that meet again, in chunks and views."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([branch(x) for branch in self.branches], dim=1)
        weights = outputs.mean(-1, keepdim=True).softmax(dim=1)
        left, right = (weights * outputs).sum(1).chunk(2, dim=-1)
        return self.head(torch.cat([right, left.sin()], -1))


class Twice(nn.Module):
    """A block that is called twice, once of another shape, and a block in two places of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = block()
        self.layers = nn.ModuleList([block(), self.shared, block()])

    def forward(self, x: Tensor) -> Tensor:
        x = with_residuals(self.layers, self.shared(x))
        return self.shared(torch.cat([x, x])).chunk(2)[0]


def sharing_inside() -> nn.Module:
    """Return layers that have in common an activation, and a module of weights and a table, which is no parameter."""
    linear, table = nn.Linear(WIDTH, WIDTH, bias=False), torch.linspace(0.5, 1.5, WIDTH)
    common = Does(lambda own, x: own.linear(x) * own.table, linear=linear, table=table)
    gelu, model = nn.GELU(), Stack(0)

    def act(own: Any, x: Tensor) -> Tensor:
        return x + own.gelu(own.alone(own.common(x)))

    model.layers.extend(Does(act, common=common, alone=Square(), gelu=gelu) for _ in range(4))
    return model


# --- returning and taking all kinds of things ---------------------------------------------------------------------


@dataclass
class Output:
    prediction: Tensor
    hidden: list[Tensor]
    name: str = "output"
    nothing: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class DictBlock(Square):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        x = super().forward(state["x"])
        return {"x": torch.tanh(x), "hidden": [*state["hidden"], x], "count": state["count"] + 1}


class ReturnsDict(Stack):
    """Blocks that pass a dictionary on, and a dictionary as the result."""

    layer = DictBlock

    def forward(self, x: Tensor) -> dict[str, Any]:
        return super().forward({"x": x, "hidden": [], "count": 0})


def dict_step(model: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    out = model(x)
    loss = functional.mse_loss(out["x"], y) + 0.1 * sum(hidden.square().mean() for hidden in out["hidden"])
    model.backward(loss)
    return {"loss": loss, "count": out["count"]}


class DataclassBlock(Square):
    def forward(self, x: Output) -> Output:  # type: ignore[override]
        prediction = super().forward(x.prediction)
        return Output(prediction.relu(), [*x.hidden, prediction], name=type(self).__name__)


class ReturnsDataclass(Stack):
    layer = DataclassBlock

    def forward(self, x: Tensor) -> Output:
        return super().forward(Output(x, []))


def dataclass_step(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    assert out.name == "DataclassBlock"
    assert out.nothing is None
    loss = functional.mse_loss(out.prediction, y) + out.hidden[1].mean()
    model.backward(loss)
    return loss, out.hidden[0]


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair, more: tuple[Any, ...] = ()) -> tuple[Pair, tuple[Any, ...]]:
        swapped = Pair(self.right(pair.right).tanh(), self.left(pair.left))
        return swapped, (swapped.left.detach(), (None, 3, "text", more[:1]))


class ReturnsTuple(Stack):
    """Named and nested tuples, one branch of which needs no gradient."""

    layer = TupleBlock

    def forward(self, x: Tensor) -> tuple[Pair, tuple[Any, ...]]:
        pair, more = Pair(x, x.flip(0)), ()
        for layer in self.layers:
            pair, more = layer(pair, more=more)
        return pair, more


def tuple_step(model: Any, x: Tensor, y: Tensor) -> Any:
    pair, (detached, (none, three, text, inner)) = model(x)
    assert (none, three, text, len(inner)) == (None, 3, "text", 1)
    loss = functional.mse_loss(pair.left, y) + pair.right.square().mean() + detached.mean()
    model.backward(loss)
    return loss


class ArgumentBlock(Square):
    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, *, scale: float, mode: str, extra: Any = None, flags: Any = ()
    ) -> Tensor:
        x = super().forward(x) * scale
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if extra is not None:
            x = x + extra["bias"][0]
        return x.tanh() if mode == "tanh" and all(flags) else x


class TakesAnything(Stack):
    """Keyword, None, string, nested and non-tensor arguments, different from block to block."""

    layer = ArgumentBlock

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        first = x = self.layers[0](x, scale=0.5, mode="tanh", flags=(True, True))
        x = self.layers[1](x, mask, scale=2.0, mode="none", extra=None)
        x = self.layers[2](x, mask=mask, scale=1.0, mode="tanh", extra={"bias": [first, None]}, flags=[True])
        return self.layers[3](x, None, scale=1, mode="tanh", flags=(True, False))


def mask_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x, mask=x > 1), y)
    model.backward(loss)
    return loss


# --- shared, loose and frozen weights -----------------------------------------------------------------------------


class TiedFunctional(nn.Module):
    """The head is a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(with_residuals(self.layers, self.embedding(ids)), self.embedding.weight)


class Tied(TiedFunctional):
    """Embedding and head are modules that share a Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(with_residuals(self.layers, self.embedding(ids)))


class TiedNeighbours(Stack):
    """Several pairs of layers share a weight, so that ranks in a row have weights in common with one or two others."""

    layer = Square

    def __init__(self) -> None:
        super().__init__(8)
        for first, second in ((1, 2), (3, 4), (5, 6)):
            self.layers[second].weight = self.layers[first].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class RootParameter(nn.Module):
    """Parameters and a buffer of the root itself, as a ViT's class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.layers = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.unsqueeze(1), x.unsqueeze(1)], dim=1)
        x = x + self.positions
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return self.head(x[:, 0]) * self.temperature


class Frozen(nn.Module):
    """A frozen stem, a frozen block in the middle, and a bias that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block()
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.stem.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(with_residuals(self.layers, self.stem(x)))


class Normed(nn.Module):
    """BatchNorm, inside units and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)])
        self.plain = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.plain(x)


# --- several streams ----------------------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x = x + self.own(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.norm(x + self.cross(x, memory, memory)[0])


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0, batch_first=True) for _ in range(2)]
        self.encoder = nn.ModuleList(layers)
        self.decoder = nn.ModuleList([DecoderLayer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embedding(ids)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embedding(ids.flip(1))
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.head(x)


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([block() for _ in range(3)])
        self.left, self.right, self.value = block(), block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = with_residuals(self.trunk, x)
        return self.left(x), self.right(x), self.value(x).squeeze(-1)


def several_losses_step(model: Any, x: Tensor, y: Tensor) -> Any:
    left, right, value = model(x)
    first, second = functional.mse_loss(left, y), functional.l1_loss(right, y)
    model.backward([first, second])
    return first, second, value


def several_backwards_step(model: Any, x: Tensor, y: Tensor) -> Any:
    left, right, value = model(x)
    model.backward(functional.mse_loss(left, y) + functional.l1_loss(right, y))
    other, _, again = model(2 * x)
    loss = (other * y).mean() + again.square().mean()
    model.backward(loss)
    return {"loss": loss, "value": value}


def gradient_step(model: Any, x: Tensor, y: Tensor) -> Any:
    left, right, _ = model(x)
    model.backward([left, right], [y, 0.5 * y])
    return left.mean(), right.mean().item()


def branching_step(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = functional.mse_loss(model(x), y)
    if loss > 1:
        loss = loss.sqrt()
    if (loss * 0.5).item() < 0.25:
        loss = loss + model(y).mean()
    model.backward(loss)
    return loss, float(loss.detach()), f"{loss.detach():.3f}"


class BranchingModel(nn.Module):
    """Skips its second half where the first says so: the path differs between microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([block() for _ in range(2)])
        self.second = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = with_residuals(self.first, x)
        if x.mean() > 0:
            x = with_residuals(self.second, x)
        return self.head(x)


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Loop()
        self.criterion = nn.MSELoss()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        prediction = self.body(x)
        return None if y is None else self.criterion(prediction, y), prediction


class InPlace(Stack):
    """Changes activations in place: in units, between them, by index and by augmented assignment."""

    layer = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x * 2
        x += 1
        x = self.layers[1](x).clone()
        x[:, 0] = 0.5
        y = self.layers[2](x)
        y = y + x
        y.mul_(0.5)
        return self.layers[3](y)


def mapping_step(model: Any, x: Tensor, y: Tensor) -> Any:
    """Write the loss by hand, with Python's operators and torch's functions mixed."""
    prediction = model(x)
    error = (prediction - y) ** 2 / 2 + abs(prediction) * 0.01
    best = torch.where(error > error.mean(), error, torch.zeros_like(error)).max(dim=-1)
    loss = best.values.mean() + (1 - prediction[:, 0]).square().mean() - prediction.new_ones(1).squeeze()
    model.backward(loss)
    return loss, best.indices, prediction.argmax(-1) == y.argmax(-1), prediction.shape[-1], copy.copy(y)


# --- Hugging Face models, from small configurations with random weights -----------------------------------------------

# transformers takes seconds to import: each builder imports what it needs, on the ranks that need it.


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    chances: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **chances, bos_token_id=0, eos_token_id=0))


def made_by_transformers(name: str, task: str, sizes: dict[str, Any]) -> nn.Module:
    """Make a model of a small configuration, with random weights and without dropout."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    for chance in [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]:
        setattr(config, chance, 0.0)
    return getattr(transformers, f"{name}{task}")(config)


def images(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (size,), generator=generator)


def loss_inside_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    model.backward(out.loss)
    return out.loss


def loss_outside_step(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))
    model.backward(loss)
    return loss, logits


def image_step(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    out = model(pixel_values=pixels, labels=labels)
    model.backward(out.loss)
    return out["loss"]


DROPOUT = Case(Dropping, vectors, mse_step)
CASES: dict[str, Case] = {
    "Sequential": Case(sequential, vectors, mse_step),
    "ModuleList and a loop": Case(Loop, vectors, mse_step),
    "skip connections": Case(UShape, vectors, mse_step),
    "parallel branches": Case(Inception, vectors, mse_step),
    "a module used twice": Case(Twice, vectors, mse_step),
    "a module in several layers": Case(sharing_inside, vectors, mse_step),
    "returns a dict": Case(ReturnsDict, vectors, dict_step),
    "returns a dataclass": Case(ReturnsDataclass, vectors, dataclass_step),
    "returns nested tuples": Case(ReturnsTuple, vectors, tuple_step),
    "keyword, None and other arguments": Case(TakesAnything, vectors, mask_step),
    "tied modules": Case(Tied, tokens, token_step),
    "tied by a function": Case(TiedFunctional, tokens, token_step),
    "tied neighbours": Case(TiedNeighbours, vectors, mse_step),
    "parameters of the root": Case(RootParameter, vectors, mse_step),
    "frozen and unused parameters": Case(Frozen, vectors, mse_step),
    "BatchNorm": Case(Normed, doubled, mse_step),
    "encoder and decoder": Case(EncoderDecoder, tokens, token_step),
    "several losses": Case(SeveralOutputs, vectors, several_losses_step),
    "several backwards": Case(SeveralOutputs, vectors, several_backwards_step),
    "backward from gradients": Case(SeveralOutputs, vectors, gradient_step),
    "a branch on a value in the step": Case(Loop, vectors, branching_step),
    "a branch on a value in the model": Case(BranchingModel, vectors, mse_step),
    "loss inside the model": Case(LossInside, vectors, loss_in_model_step),
    "changes in place": Case(InPlace, vectors, mse_step),
    "operators and functions": Case(Loop, vectors, mapping_step),
}
LAYERS = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": TOKENS, "max_position_embeddings": 16}
OF_LLAMA = {**TEXT, "num_hidden_layers": 4, "num_key_value_heads": 1}
LLAMA = partial(made_by_transformers, "Llama", "ForCausalLM", OF_LLAMA)
BERT = partial(made_by_transformers, "Bert", "ForMaskedLM", TEXT)
OF_T5 = {"vocab_size": TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
STARTING = {"decoder_start_token_id": 0, "pad_token_id": 0}
T5 = partial(made_by_transformers, "T5", "ForConditionalGeneration", {**OF_T5, **STARTING})
OF_VIT = {**LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 5}
VIT = partial(made_by_transformers, "ViT", "ForImageClassification", OF_VIT)
HUGGING_FACE: dict[str, Case] = {
    "GPT-2": Case(gpt2, tokens, loss_inside_step),
    "GPT-2, loss outside": Case(gpt2, tokens, loss_outside_step),
    "Llama": Case(LLAMA, tokens, loss_inside_step),
    "Llama, loss outside": Case(LLAMA, tokens, loss_outside_step),
    "BERT": Case(BERT, tokens, loss_inside_step),
    "T5": Case(T5, tokens, loss_inside_step),
    "ViT": Case(VIT, images, image_step),
}
MODELS: dict[str, Case] = {**CASES, **HUGGING_FACE}
