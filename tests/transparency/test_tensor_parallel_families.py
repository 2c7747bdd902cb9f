"""Every causal model of transformers that has a plan trains on two ranks as in one process, or is refused by name."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from tests.models import Case
from tests.models_of_others import DIVIDED, HYBRID, loss_and_logits_step, padded_tokens
from tests.ranks import run_ranks
from tests.train import Way, check_same, train, train_plainly
from tests.transparency.test_tensor_parallel_huggingface import OWN, OWN_FOR_MEMORY, SHARED, SHARED_FOR_MEMORY

TOLERANCE = 1e-4  # many compute norms, scores or routes in float32; a part that is left out is wrong by more
SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "rotary_dim"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "decoder_sparse_step"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 12),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "head_dim", "global_head_dim", "mamba_d_head", "index_head_dim"), 8
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "zero_expert_num", "num_dense_layers", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_chunk_size", "chunk_size", "sliding_window"), 4),
    **dict.fromkeys(("vocab_size_per_layer_input", "num_layers"), 2),
    "hidden_size_per_layer_input": 4,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 2,
    "conv_dim": 16,
    "block_dim": 16,
    "index_n_heads": 2,
    "num_global_key_value_heads": 2,
    "index_topk": 4,
    "ffn_hidden_size": 24,
    "intermediate_size_mlp": 24,
    "vocab_size_per_layer_input": 23,
    "moe_top_k": 2,
    "num_heads": 4,
    "moe_shared_expert_intermediate_size": 12,
    **{name: value for name, value in HYBRID.items() if name != "layer_types"},
    "use_cache": False,
}
NOT_SMALL = {
    "kimi_linear": "its linear attention needs more memory than tests have",
    "phi4_multimodal": "it has a vision tower of 870 million parameters",
}


def families() -> dict[str, tuple[Any, str]]:
    """Return configuration and class by model type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    configs: Any = CONFIG_MAPPING
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {kind: name if isinstance(name, str) else name[0] for kind, name in classes.items()}
    known = {kind: (configs[kind], name) for kind, name in sorted(names.items()) if kind in configs}
    return {kind: both for kind, both in known.items() if getattr(both[0], "base_model_tp_plan", None)}


def built(kind: str) -> nn.Module:
    import transformers

    config_class, name = families()[kind]
    fields = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "attribute_map", {})}
    sizes = {**DIVIDED, **{key: value for key, value in SMALL.items() if key in fields}}
    if "qk_rope_head_dim" in fields:  # latent attention has as many keys as queries
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    config = config_class(**sizes, experts_implementation="eager")
    for chance in [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]:
        setattr(config, chance, 0.0)
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, name)(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def outcome(kind: str, way: Way) -> str:
    """Return `equal`, `refused: ...`, `different: ...`, or why the family cannot be trained here in one process."""
    if kind in NOT_SMALL:
        return f"not built: {NOT_SMALL[kind]}"
    case = Case(partial(built, kind), padded_tokens, loss_and_logits_step)
    try:
        expected = train_plainly(case, way.plain)
    except Exception as error:  # a family that needs other sizes
        return f"not built: {type(error).__name__}: {str(error)[:100]}"
    try:
        trace = train(case, way)
        check_same(trace, expected[trace.replica], TOLERANCE)
    except UnsupportedError as error:
        return f"refused: {error.message}"
    except Exception as error:
        return f"different: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        smp.shutdown()
    return "equal"


def outcomes(kinds: list[str], way: Way) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {kind: outcome(kind, way) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("way", [SHARED, OWN, SHARED_FOR_MEMORY, OWN_FOR_MEMORY], ids=str)
def test_every_family_trains_as_in_one_process_or_is_refused_by_name(way: Way) -> None:
    kinds = [*families()]
    wrong: dict[str, str] = {}
    for start in range(0, len(kinds), 8):  # a process keeps what it has imported
        part = kinds[start : start + 8]
        for found in run_ranks(outcomes, 2, part, replace(way, batches=(8,)), timeout=600):
            wrong |= {kind: text for kind, text in found.items() if text.startswith("different")}
    assert not wrong
