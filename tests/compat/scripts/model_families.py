"""One script for many models, as of 2022 and 2023: GPT-NeoX, GPT-J, GPT-2, FLAN-T5 and ViT, with every parallelism.

The job's arguments fill `smp.init`'s dict, sharded data parallelism and delayed initialisation included; a plain state
dict is where training starts; a learning-rate schedule stays with the optimizer inside; attributes of shards are
logged; partial checkpoints hold the model's configuration, the script's arguments and the DataLoader.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import smdistributed.modelparallel.torch as smp
import torch
from torch import optim
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

import smdistributed.modelparallel  # isort: skip

SMP_VERSION = tuple(int(part) for part in smdistributed.modelparallel.__version__.split(".")[:2])


@smp.step
def train_step(model, optimizer, inputs, args):
    loss = model(**inputs)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, inputs):
    return model(**inputs)["loss"]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_type", default="gpt_neox")
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=8, help="of the whole job")
    parser.add_argument("--max_context_width", type=int, default=12)
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--hidden_width", type=int, default=32)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--min_lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=float, default=0.25)
    parser.add_argument("--weight_decay", type=float, default=0.2)
    parser.add_argument("--grad_clip", type=float, default=0.5)
    parser.add_argument("--double", type=int, default=0)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--prescaled_batch", type=int, default=0)
    parser.add_argument("--shard_optimizer_state", type=int, default=0)
    parser.add_argument("--offload_activations", type=int, default=0)
    parser.add_argument("--activation_loading_horizon", type=int, default=4)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--activation_strategy", default="each")
    parser.add_argument("--use_distributed_transformer", type=int, default=0)
    parser.add_argument("--delayed_param", type=int, default=0)
    parser.add_argument("--skip_tracing", type=int, default=0)
    parser.add_argument("--data_on_first_rank", type=int, default=0)
    parser.add_argument("--log_param_norms", type=int, default=0)
    parser.add_argument("--start-from", required=True, help="folder of a plain state dict, `fullmodel.pt`, and config")
    parser.add_argument("--checkpoint-dir", default="")
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--load_partial", type=int, default=0)
    parser.add_argument("--model-dir", default=".")
    parser.add_argument("--report", default="")
    return parser.parse_known_args()[0]


def smp_config(args):
    config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "prescaled_batch": args.prescaled_batch > 0,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "offload_activations": args.offload_activations > 0,
        "activation_loading_horizon": args.activation_loading_horizon,
        "optimize": "speed",
        "auto_partition": True,
        "default_partition": 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "skip_tracing": args.skip_tracing > 0,
    }
    if args.sharded_data_parallel_degree > 1:
        config["sharded_data_parallel_degree"] = args.sharded_data_parallel_degree
        config["sdp_gradient_clipping"] = args.grad_clip
    return config


def build_model(args, config):
    kinds = {"t5": AutoModelForSeq2SeqLM, "vit": AutoModelForImageClassification}
    return kinds.get(args.model_type, AutoModelForCausalLM).from_config(config)


def layers_of(module):
    """Find the lists of layers in whatever a model calls them."""
    if getattr(module, "transformer", None) is not None:
        return [getattr(module.transformer, "seq_layers", None) or module.transformer.h]
    if getattr(module, "gpt_neox", None) is not None:
        return [getattr(module.gpt_neox, "seq_layers", None) or module.gpt_neox.layers]
    if getattr(module, "encoder", None) is not None:
        return [module.encoder.block, module.decoder.block]
    return [module.vit.layers if hasattr(module.vit, "layers") else module.vit.encoder.layer]


class Made(Dataset):
    """Tokens that count up from random beginnings, or pictures of one brightness."""

    def __init__(self, args, size):
        generator = torch.Generator().manual_seed(17)
        self.model_type = args.model_type
        self.begin = torch.randint(0, args.vocab_size, (size, 1), generator=generator)
        self.tokens = (self.begin + torch.arange(args.max_context_width)) % args.vocab_size
        self.pictures = (self.begin / args.vocab_size)[..., None, None] * torch.ones(1, 3, 8, 8)
        self.pictures = self.pictures.double() if args.double else self.pictures

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        if self.model_type == "vit":
            return {"pixel_values": self.pictures[index], "labels": self.begin[index, 0] % 4}
        tokens = self.tokens[index]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return {**inputs, "labels": tokens[:5] if self.model_type == "t5" else tokens}


def share_of(batch, args):
    """Return this replica's part; other pipeline ranks than the first have no data, as they read none."""
    if args.data_on_first_rank and smp.pp_rank() > 0:
        dummy = {"pixel_values": None, "input_ids": torch.empty(0), "attention_mask": None, "labels": torch.zeros(1, 1)}
        return {name: dummy[name] for name in batch}
    prescaled = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    return {name: part.chunk(size)[rank] for name, part in batch.items()}


def param_groups(model, weight_decay):
    decayed, others, seen = [], [], set()
    for parameter in model.parameters():
        if parameter not in seen:
            seen.add(parameter)
            (decayed if parameter.dim() > 1 else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def schedule(args):
    def factor(step):
        warmup = max(1, int(args.warmup * args.max_steps))
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, args.max_steps - warmup))
        return max(args.min_lr / args.lr, 0.5 * (1.0 + math.cos(math.pi * done)))

    return factor


def offsets_of_shards(model):
    """Return how many elements of the parameters this rank holds, as scripts look up where a shard begins."""
    offset, offsets = 0, {}
    for parameter in model.parameters():
        offsets[id(parameter)] = offset
        held = parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else parameter.numel()
        assert not hasattr(parameter, "ds_shape") or math.prod(parameter.ds_shape) == parameter.ds_numel
        offset += held
    return offset


def clip(model, optimizer, args):
    """Return the norm of the gradients, whoever clips them."""
    if smp.state.cfg.sharded_data_parallel_degree > 1:
        return None  # optimizer.step() clips
    if smp.state.cfg.fp16 or smp.state.cfg.bf16:
        return float(optimizer.clip_master_grads(args.grad_clip))
    return float(smp.clip_grad_norm_(model.parameters(), args.grad_clip))


def norm_of_parameters(optimizer):
    square = sum(flat.double().norm() ** 2 for flat in optimizer.fp32_partitioned_groups_flat)
    torch.distributed.all_reduce(square, group=optimizer.ds_param_shard_group)
    return square.sqrt().item()


def mean_over_replicas(step_output):
    return torch.stack(smp.allgather(step_output.reduce_mean().detach(), smp.DP_GROUP)).mean().item()


def main():
    args = parse_args()
    smp.init(smp_config(args))
    assert SMP_VERSION >= (1, 10)
    torch.cuda.set_device(smp.local_rank())
    torch.manual_seed(smp.tp_rank())
    config = torch.load(Path(args.start_from) / "config.pt", weights_only=False)
    half = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
    with smp.model_creation(
        tensor_parallelism=args.use_distributed_transformer > 0,
        zero_init=args.sharded_data_parallel_degree == 1 or not args.use_distributed_transformer,
        dtype=half or (torch.float64 if args.double else torch.float32),
        distribute_embedding=args.sharded_data_parallel_degree > 1 and args.tensor_parallel_degree > 1,
        flash_attention=True,
        attention_in_fp32=False,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_bias_gelu=True,
    ):
        model = build_model(args, config)
    model = smp.DistributedModel(model, trace_device="gpu")
    module = model.get_module()
    for layers in layers_of(module) if args.activation_checkpointing else ():
        if isinstance(layers, torch.nn.Sequential):
            smp.set_activation_checkpointing(layers, strategy=args.activation_strategy)
        else:
            for layer in layers.children():
                smp.set_activation_checkpointing(layer)
    optimizer = optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**8, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    inner = optimizer.optimizer if smp.state.cfg.fp16 else optimizer
    scheduler = optim.lr_scheduler.LambdaLR(inner, schedule(args))
    loader = DataLoader(Made(args, args.max_steps * args.train_batch_size), batch_size=args.train_batch_size)

    first = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        first = content["total_steps"]
        scheduler.load_state_dict(content["lr_scheduler"])
        assert content["model_config"].num_attention_heads == config.num_attention_heads
        assert content["cli_args"].lr == args.lr
        assert len(content["loader"].dataset) == len(loader.dataset)
        loader = content["loader"]
    else:
        smp.resume_from_checkpoint(args.start_from, tag="fullmodel.pt", partial=False, load_optimizer=False)

    model.train()
    losses, norms = [], []
    for step, batch in enumerate(loader):
        if step < first:
            continue
        optimizer.zero_grad(set_to_none=True)
        output = train_step(model, optimizer, share_of(batch, args), args)
        norm = clip(model, optimizer, args)
        optimizer.step()
        if not (smp.state.cfg.fp16 and optimizer.overflow):
            scheduler.step()
        losses.append(mean_over_replicas(output))
        norms.append(optimizer._global_grad_norm if norm is None else norm)
        if smp.rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {norms[-1]:.4f}, lr {scheduler.get_last_lr()[0]:.1e}")
        if step + 1 == args.save_at:
            content = {"total_steps": step + 1, "lr_scheduler": scheduler.state_dict(), "loader": loader}
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{step + 1}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={**content, "model_config": config, "cli_args": args},
                num_kept_partial_checkpoints=2,
            )
    report = {"losses": losses, "norms": norms, "held": offsets_of_shards(model)}
    if args.log_param_norms and smp.state.cfg.sharded_data_parallel_degree > 1:
        report["parameters"] = norm_of_parameters(optimizer)
    model.eval()
    with torch.no_grad():
        report["validation"] = mean_over_replicas(test_step(model, share_of(batch, args)))
    smp.save_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False, model=model, optimizer=optimizer)
    if args.report and smp.rank() == 0:
        Path(args.report).write_text(json.dumps(report))
    smp.barrier()


if __name__ == "__main__":
    main()
