"""The calls of SMP v1 as its documentation and public scripts write them (reference: its specification).

Names are those of `smdistributed.modelparallel.torch`; methods are of what the class of that name makes. A value is the
documented default, `...` one that is not documented. What follows `*` is given by name only.
"""

from __future__ import annotations

_TENSOR_PARALLEL_OPTIONS = """
    fused_softmax=..., fused_bias_gelu=..., attention_in_fp32=..., query_key_layer_scaling=..., fused_dropout=...,
    fp32_residual_addition=..., flash_attention=..., use_alibi=..., distribute_embedding=..., zero_init=...
"""
_LAYER = """
    num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096,
    attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5,
    initializer_range=0.02, use_normal_initialization=False, causal_mask_size=None, add_cross_attention=False,
    pre_layernorm=False, post_layernorm=True, *, use_alibi=False, alibi_bias_max=8
"""

_WITHOUT_ARGUMENTS = {
    "": """
    is_initialized is_tracing rank size local_rank local_size mp_rank mp_size pp_rank pp_size tp_rank tp_size
    rdp_rank rdp_size dp_rank dp_size get_mp_group get_dp_group get_tp_group get_pp_group get_rdp_group
    get_world_process_group get_mp_process_group get_dp_process_group get_tp_process_group get_pp_process_group
    get_rdp_process_group dp_barrier mp_barrier
    """,
    "StepOutput.": """
    reduce_mean reduce_sum concat stack
    """,
    "DistributedModel.": """
    eval get_module cpu join local_parameters local_named_parameters local_buffers local_named_buffers local_modules
    local_named_modules local_state_dict distributed_modules default_reducer_named_parameters
    scaled_batch_reducer_named_parameters virtual_named_parameters
    """,
    "DistributedOptimizer.": """
    state_dict orig_state_dict init_master_params reload_model_params param_name_to_index _param_id_to_index
    _param_index_to_param_local
    """,
}
"""By what stands before them, the names of calls that take nothing."""

SIGNATURES = f"""\
init(config=None)

broadcast(obj, group)
send(obj, dest_rank, rank_type)
recv_from(src_rank, rank_type)
allgather(obj, group)
barrier(group=...)

step(*, non_split_inputs=..., input_split_axes=..., detach_outputs=True)

DistributedModel(module, trace_device="gpu", trace_execution_times=False, overlapping_allreduce=True, \
    backward_passes_per_step=1, average_grads_across_microbatches=True, bucket_cap_mb=25, trace_memory_usage=False, \
    broadcast_buffers=True, gradient_as_bucket_view=False, find_unused_parameters=...)
DistributedModel.backward(tensors, grad_tensors=None)
DistributedModel.train(mode=True)
DistributedModel.to(device)
DistributedModel.state_dict(*, gather_to_rank0=False)
DistributedModel.load_state_dict(state_dict, strict=True, same_partition_load=False)
DistributedModel.register_post_partition_hook(hook)
DistributedModel.register_post_step_hook(hook)
DistributedModel.register_comm_hook(state, callable)
DistributedModel._register_comm_hook(state, callable)
DistributedModel.is_distributed_parameter(parameter)
DistributedModel.is_distributed_buffer(buffer)
DistributedModel.is_scaled_batch_parameter(parameter)
DistributedModel.is_scaled_batch_buffer(buffer)

DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, *, dynamic_loss_args=...)
DistributedOptimizer.step(closure=None)
DistributedOptimizer.zero_grad(*, set_to_none=...)
DistributedOptimizer.add_param_group(param_group)
DistributedOptimizer.local_state_dict(gather_if_shard=True)
DistributedOptimizer.load_state_dict(state_dict)
DistributedOptimizer.clip_master_grads(max_norm, norm_type=2)
amp.GradScaler(*, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True)
optimizers.FusedAdam(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, \
    weight_decay=0.0, amsgrad=False, set_grad_none=True)
optimizers.FusedLAMB(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, \
    amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False)
optimizers.FusedLamb(params, lr=1e-3)
optimizers.FusedNovoGrad(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, \
    amsgrad=False, reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True)

partition(index)
set_partition(module, index)
tensor_parallelism(enabled=True, *, {_TENSOR_PARALLEL_OPTIONS})
set_tensor_parallelism(module, enabled=True, *, {_TENSOR_PARALLEL_OPTIONS})
model_creation(tensor_parallelism=False, dtype=None, *, delayed_parameter_initialization=..., \
    {_TENSOR_PARALLEL_OPTIONS})
delay_param_initialization(enabled=True)
register_parameter(module, param)
tp_register(dist_module, init_hook=None, forward_hook=None, return_hook=None)
tp_register_with_module(module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None)

set_activation_checkpointing(module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each")
checkpoint(module, *args, preserve_rng_state=True)
checkpoint_sequential(sequential_module, input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False)
patches.checkpoint.checkpoint(module, *args, preserve_rng_state=True)
patches.checkpoint.checkpoint_sequential(sequential_module, input, strategy="each", preserve_rng_state=True, \
    pack_args_as_tuple=False)

save(obj, f, partial=True, pickle_module=..., pickle_protocol=2, v3=False)
load(f, map_location=None, pickle_module=None, pickle_load_args=None, partial=True, back_compat=False)
save_checkpoint(path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True, \
    num_kept_partial_checkpoints=None)
resume_from_checkpoint(path, tag=None, partial=True, strict=True, load_optimizer=True, \
    load_sharded_optimizer_state=True, translate_function=None)
utils.get_distribution_axis(param)
utils.rmsg(message)

nn.DistributedLinear(in_features, out_features)
nn.DistributedEmbedding(num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, \
    scale_grad_by_freq=False, sparse=False, _weight=None, initializer_range=0.02, _skip_allgather=False, \
    _skip_scatter_and_merge=False)
nn.DistributedTransformerLMHead(num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, \
    intermediate_size=4096, vocab_size=30522, num_positions=1024, attention_dropout_prob=0.1, \
    hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5, num_token_types=0, causal_mask_size=None, \
    add_cross_attention=False, add_lm_head=True, initializer_range=0.02, use_normal_initialization=False, \
    pre_layernorm=False, post_layernorm=True, *, use_alibi=False, alibi_bias_max=8)
nn.DistributedTransformer(num_layers=12, {_LAYER})
nn.DistributedTransformerLayer({_LAYER})
nn.DistributedAttentionLayer(num_attention_heads=32, attention_head_size=32, hidden_size=1024, \
    attention_dropout_prob=0.1, hidden_dropout_prob=0.1, layernorm_epsilon=1e-5, initializer_range=0.02, \
    use_normal_initialization=False, cross_attention=False, causal_mask_size=None, pre_layernorm=False, \
    post_layernorm=True)
nn.DistributedTransformerOutputLayer(hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, \
    activation="gelu", layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, \
    pre_layernorm=False, post_layernorm=True, fp32_residual_addition=False)
nn.FlashAttentionLayer(attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, \
    scale_attn_by_layer_idx=False, layer_idx=None, scale=None, triton_flash_attention=False, use_alibi=False)
nn.FusedLayerNorm(normalized_shape, eps=1e-5, elementwise_affine=True)
nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed(sd, max_seq_len=None)
nn.huggingface.gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj(sd, max_seq_len=None)
nn.huggingface.gptj.translate_gptj_state_dict_to_smdistributed(sd, max_seq_len=None)
nn.huggingface.roberta.translate_state_dict_to_smdistributed(sd, max_seq_len=None)
"""
SIGNATURES += "".join(f"{owner}{name}()\n" for owner, names in _WITHOUT_ARGUMENTS.items() for name in names.split())
SIGNATURES += "".join(
    f"nn.huggingface.{family}.translate_state_dict_to_hf_{family}(sd, max_seq_len=None)\n"
    f"nn.huggingface.{family}.translate_hf_state_dict_to_smdistributed_{family}(sd, max_seq_len=None)\n"
    for family in ("bert", "gpt2", "gptj", "gptneo", "roberta")
)
