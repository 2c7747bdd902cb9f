"""Every model of transformers that has a plan trains on two ranks as in one process, or is refused by name."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from tests.models import Case
from tests.models_of_others import DIVIDED, HYBRID, loss_and_logits_step, padded_tokens
from tests.ranks import run_ranks
from tests.train import Way, check_same, train, train_plainly
from tests.transparency.test_tensor_parallel_huggingface import OWN, OWN_FOR_MEMORY, SHARED, SHARED_FOR_MEMORY

TOLERANCE = 1e-4  # many compute norms, scores or routes in float32; a part that is left out is wrong by more
_SIZES = {
    0: "num_kv_shared_layers",
    1: """
    n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts mamba_n_groups n_groups
    zero_expert_num num_dense_layers moe_num_shared_experts
    """,
    2: """
    num_experts_per_tok top_k_experts moe_topk moe_k decoder_sparse_step num_layers altup_num_inputs mamba_expand
    mamba_d_conv index_n_heads num_global_key_value_heads moe_top_k
    """,
    4: """
    num_local_experts n_routed_experts moe_num_experts rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim
    mamba_d_state ssm_state_size mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size sliding_window
    hidden_size_per_layer_input laurel_rank index_topk num_heads
    """,
    8: "kv_lora_rank q_lora_rank global_head_dim mamba_d_head index_head_dim mamba_head_dim",
    12: "expert_ffn_hidden_size shared_intermediate_size moe_shared_expert_intermediate_size",
    16: "conv_dim block_dim",
    23: "vocab_size_per_layer_input",
    24: "ffn_hidden_size intermediate_size_mlp",
}
"""By size, the fields of configurations that have it."""
SMALL: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    **{name: value for name, value in HYBRID.items() if name != "layer_types"},
    "use_cache": False,
}
SWITCHES = ("use_qk_norm", "qk_layernorm")
"""Of layers that a configuration leaves out unless it is told."""
NOT_SMALL = {
    "kimi_linear": "its linear attention needs more memory than tests have",
    **dict.fromkeys(("phi4_multimodal", "muse_glimmer", "muse_spark"), "it has a large vision tower"),
}
NOT_BUILT = {
    "it takes pictures, sound or hidden states": """
    deepseek_ocr2_encoder dots3_note_vision_encoder ernie4_5_vl_moe_vision gemma4_vision higgs_audio_v2
    llama4_vision_model muse_glimmer_assistant muse_glimmer_vision qwen3_omni_moe_talker_code_predictor t5_gemma_module
    t5gemma2_decoder voxtral_realtime_text
    """,
    "it needs sections of rotary positions": """
    cosmos3_edge_text glm4v_moe_text glm4v_text glm_image_text glm_ocr_text neomme paddleocr_vl_text qwen2_5_omni_text
    qwen2_5_vl_text qwen2_vl_text
    """,
    "it needs other sizes, or parts of a larger configuration": """
    cohere_compass_text deepseek_ocr2_text ernie4_5_vl_moe_text esmc glm5_next_text helium lfm2_moe llama4
    qwen3_omni_moe_talker_text
    """,
    "it computes in float32, whatever the model does": "inkling2_text",
}
"""What generic sizes, or a batch of tokens, cannot train in one process."""


def families() -> dict[str, tuple[Any, str]]:
    """Return configuration and the switch that is set, by model type."""
    from transformers import CONFIG_MAPPING

    configs: Any = CONFIG_MAPPING
    planned = {kind: configs[kind] for kind in sorted(configs) if getattr(configs[kind], "base_model_tp_plan", None)}
    switched = {
        f"{kind} {switch}": (config, switch)
        for kind, config in planned.items()
        for switch in SWITCHES
        if getattr(config, switch, None) is False
    }
    return {**{kind: (config, "") for kind, config in planned.items()}, **switched}


def class_of(config_class: Any) -> Any:
    """Return the causal model of a configuration, else the smallest model that has it and takes tokens."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel

    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    for mapping in mappings:
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    models = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    return next(
        each
        for each in vars(models).values()
        if isinstance(each, type)
        and issubclass(each, PreTrainedModel)
        and each.config_class is config_class
        and "input_ids" in inspect.signature(each.forward).parameters
    )


def built(kind: str) -> nn.Module:
    config_class, switch = families()[kind]
    fields = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "attribute_map", {})}
    sizes = {**DIVIDED, **{key: value for key, value in SMALL.items() if key in fields}}
    if "qk_rope_head_dim" in fields:  # latent attention has as many keys as queries
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    config = config_class(**sizes, **{switch: True} if switch else {}, experts_implementation="eager", dropout_rate=0.0)
    # What is drawn must not depend on how ranks draw: PhiMoE's router draws among experts whose scores are close.
    for chance, value in list(vars(config).items()):
        if re.search("drop|jitter", chance) and isinstance(value, float):
            setattr(config, chance, 0.0)
    torch.manual_seed(3)
    model: nn.Module = class_of(config_class)(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def hidden_states_step(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Train a model without a head: the loss has another factor for each of its values."""
    hidden = model(input_ids=ids, attention_mask=mask)["last_hidden_state"].double()
    factors = torch.arange(hidden[0].numel(), dtype=torch.float64).sin().view(hidden[0].shape)
    loss = (hidden * factors * labels.ne(-100).unsqueeze(-1)).mean()
    model.backward(loss)
    return loss, hidden


def outcome(kind: str, way: Way) -> str:
    """Return `equal`, `refused: ...`, `different: ...`, or why the family cannot be trained here in one process."""
    if kind in NOT_SMALL:
        return f"not tried: {NOT_SMALL[kind]}"
    try:
        has_head = class_of(families()[kind][0]).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        case = Case(partial(built, kind), padded_tokens, loss_and_logits_step if has_head else hidden_states_step)
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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", [SHARED, OWN, SHARED_FOR_MEMORY, OWN_FOR_MEMORY], ids=str)
def test_every_family_trains_as_in_one_process_or_is_refused_by_name(way: Way) -> None:
    kinds = [*families()]
    results: list[dict[str, str]] = [{}, {}]
    for start in range(0, len(kinds), 8):  # a process keeps what it has imported
        part = kinds[start : start + 8]
        for result, found in zip(
            results, run_ranks(outcomes, 2, part, replace(way, batches=(8,)), timeout=600), strict=True
        ):
            result.update(found)
    assert not {kind: text for result in results for kind, text in result.items() if text.startswith("different")}
    assert sorted(kind for kind, text in results[0].items() if text.startswith("not built")) == sorted(
        " ".join(NOT_BUILT.values()).split()
    )
