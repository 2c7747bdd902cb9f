"""The modules of `smp.nn` are the same from a TransformerConfig and from SMP v1's arguments, and are checked before."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import UsageError

SIZES: dict[str, Any] = {"num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 16}
KINDS = ["AttentionLayer", "Transformer", "TransformerLMHead", "TransformerLayer", "TransformerOutputLayer"]


@pytest.fixture(autouse=True)
def _initialized() -> None:
    smp.init()


def made(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return kind(*args, **kwargs)


@pytest.mark.parametrize("name", KINDS)
def test_a_config_and_arguments_make_the_same(name: str) -> None:
    kind = getattr(smp.nn, f"Distributed{name}")
    taken = {key: SIZES[key] for key in SIZES if key in inspect.signature(kind).parameters}
    config = smp.nn.TransformerConfig(num_layers=12, **SIZES, mlp_bias=False)
    one, other = made(kind, config), made(kind, **taken, mlp_bias=False)
    assert repr(one) == repr(other)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_layers_of_a_stack_have_their_own_windows_and_places() -> None:
    stack: Any = smp.nn.DistributedTransformer(2, 2, 4, 8, 16, window_sizes=[None, 3], scale_attn_by_layer_idx=True)
    configs = [layer.attention.config for layer in stack.seq_layers]
    assert [(each.layer_idx, each.window_size) for each in configs] == [(0, None), (1, 3)]


def test_other_states_have_no_positions() -> None:
    positional: dict[str, Any] = {"rotary_dim": 2, "use_alibi": True, "window_size": 3, "causal_mask_size": 8}
    layer: Any = smp.nn.DistributedTransformerLayer(**SIZES, add_cross_attention=True, **positional)
    plain: Any = smp.nn.TransformerConfig()
    for name, value in positional.items():
        assert getattr(layer.attention.config, name) == value
        assert getattr(layer.cross_attention.config, name) == getattr(plain, name)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_positions": -1}, "num_positions of a transformer must be an integer of at least 0, got -1"),
        ({"intermediate_size": "4"}, "intermediate_size of a transformer .* got '4'"),
        ({"embedding_dropout_prob": 3}, "embedding_dropout_prob of a transformer .* got 3"),
        ({"rotary_dim": 3}, "rotary_dim is 3, but features are rotated in pairs"),
        ({"window_sizes": [1]}, "window_sizes has 1 entries for 12 layers"),
        ({"parallel_residual": True}, "parallel_residual=True needs pre_layernorm=True"),
        ({"pre_layernom": True}, r"has no argument `pre_layernom`\s+hint: did you mean `pre_layernorm`"),
        ({"cross_attention": True}, "DistributedTransformerLMHead has no argument `cross_attention`"),
    ],
)
def test_rejects_wrong_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        smp.nn.DistributedTransformerLMHead(**given)


def test_rejects_wrong_calls() -> None:
    with pytest.raises(
        TypeError, match=r"DistributedAttentionLayer.__init__\(\) takes from 1 to 13 positional arguments"
    ):
        smp.nn.DistributedAttentionLayer(*range(1, 20))
    layer: Any = smp.nn.DistributedTransformerLayer(**SIZES)
    with pytest.raises(UsageError, match=r"a transformer layer takes one tuple \(hidden_states, attention_mask\)"):
        layer(torch.zeros(1, 2, 8))


def test_masks_of_other_shapes_are_refused() -> None:
    """With as many samples (or heads) as positions they were taken for masks of positions."""
    kept = torch.ones(4, 4, dtype=torch.bool)
    hidden = torch.zeros(4, 4, 8)
    layer: Any = smp.nn.DistributedTransformerLayer(**SIZES)
    stack: Any = smp.nn.DistributedTransformer(num_layers=1, **SIZES)
    for module, mask in itertools.product((layer, stack), (kept, kept.double(), kept[:, None].expand(4, 4, 4))):
        with pytest.raises(UsageError, match=r"an attention mask is \[4, .*, and should be \[samples, heads, length"):
            module((hidden, mask))
