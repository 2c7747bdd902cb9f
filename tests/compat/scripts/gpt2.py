"""Causal language modelling with Hugging Face's GPT-2 in SMP v1's API: tensor and pipeline parallelism.

The shape of SMP v1's GPT scripts: a configuration in the script that the job's overrides, `smp.model_creation`, layers
checkpointed by hand, parameter groups with and without decay, and a plain state dict to begin from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from torch import optim
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

BATCH, LENGTH, VOCABULARY = 8, 12, 96
SMP_VERSION = int("".join(smdistributed.modelparallel.__version__.split(".")[:2]))


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    model.backward(output["loss"])
    return output


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=4)
    for degree in ("tensor_parallel_degree", "pipeline_parallel_degree", "microbatches"):
        parser.add_argument(f"--{degree}", type=int, default=1)
    parser.add_argument("--prescaled_batch", type=int, default=0)
    parser.add_argument("--start-from", help="a plain state dict of Hugging Face")
    parser.add_argument("--model-dir", default=".")
    parser.add_argument("--report", default="")
    return parser.parse_known_args()[0]


def param_groups(module, weight_decay):
    decayed, others = [], []
    for _, parameter in module.named_parameters():
        (decayed if parameter.dim() > 1 else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def batch_of(args, step, device):
    """Return this replica's part of the step's tokens, which count up from random beginnings."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    prescaled = args.prescaled_batch and smp.tp_size() > 1
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    share = BATCH // size
    tokens = tokens[rank * share : (rank + 1) * share]
    return tokens, torch.ones_like(tokens)


def main():
    args = parse_args()
    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "prescaled_batch": args.prescaled_batch > 0,
            "optimize": "speed",
        }
    )
    assert SMP_VERSION >= 110
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    set_seed(12345)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 4, "n_head": 4}
    without = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, **without, use_cache=False)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1,
        dtype=torch.float64,
        fused_softmax=True,
        fused_bias_gelu=True,
        attention_in_fp32=False,
        query_key_layer_scaling=False,
    ):
        model = GPT2LMHeadModel(config)
    model = smp.DistributedModel(model, trace_device="gpu")

    module = model.get_module()
    layers = getattr(module.transformer, "seq_layers", None) or module.transformer.h
    if isinstance(layers, torch.nn.Sequential):
        smp.set_activation_checkpointing(layers, strategy="each")
    else:
        for layer in layers.children():
            smp.set_activation_checkpointing(layer)

    optimizer = optim.AdamW(param_groups(model, 0.2), lr=1e-2, betas=(0.9, 0.95))
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))

    start = Path(args.start_from)
    smp.resume_from_checkpoint(str(start.parent), tag=start.name, partial=False, load_optimizer=False)
    losses = []
    model.train()
    for step in range(args.max_steps):
        input_ids, attention_mask = batch_of(args, step, device)
        optimizer.zero_grad(set_to_none=True)
        output = train_step(model, optimizer, input_ids, attention_mask, args)
        assert torch.cat(tuple(output["logits"].outputs)).shape[-1] == VOCABULARY
        optimizer.step()
        scheduler.step()
        losses.append(torch.stack(smp.allgather(output["loss"].reduce_mean().detach(), smp.DP_GROUP)).mean().item())
        if smp.rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    smp.save_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False, model=model, optimizer=optimizer)
    if args.report and smp.rank() == 0:
        Path(args.report).write_text(json.dumps({"losses": losses}))
    smp.barrier()


if __name__ == "__main__":
    main()
