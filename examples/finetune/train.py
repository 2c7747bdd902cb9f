"""Fine-tune a causal language model of Hugging Face from a local folder: `smpkit run examples/finetune/job.yaml`.

With `--lora RANK` its weights stay as they are, and adapters of peft learn: `smpkit run examples/finetune/lora.yaml`.
"""

import argparse
import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import Blocks, split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=os.environ.get("SM_CHANNEL_MODEL", "runs/model"))
    parser.add_argument("--text", type=Path, default=sysconfig.get_path("stdlib"), help="folder of Python files")
    parser.add_argument("--files", type=int, default=20, help="of the folder, at most")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters of this rank; 0: all weights")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="sequences per replica and step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=60)
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("SMPKIT_CHECKPOINT_DIR", "runs/checkpoints"))
    parser.add_argument("--output", type=Path, default=os.environ.get("SM_MODEL_DIR", "runs/output"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def share(blocks: Blocks, *, shuffle: bool) -> DistributedSampler[torch.Tensor]:
    """Return which samples are this replica's; the ranks of one pipeline load the same."""
    return DistributedSampler(blocks, smp.dp_size(), smp.dp_rank(), shuffle=shuffle, drop_last=True)


def evaluate(model: smp.DistributedModel, loader: DataLoader[torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [test_step(model, tokens).reduce_mean().item() for tokens in loader]
    model.train()
    return float(torch.tensor(smp.allgather(losses, smp.DP_GROUP)).mean())


def with_adapters(llama: nn.Module, rank: int) -> nn.Module:
    """Freeze the model, and give each of its linear layers an adapter of peft's."""
    import peft

    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(llama, adapters)


def save_adapters(model: smp.DistributedModel, trained: Sequence[nn.Parameter], folder: Path) -> None:
    """Save the adapters of all ranks, as peft alone would: it sees the weights of one rank only."""
    whole = model.state_dict(gather_to_rank0=True)  # all ranks call this
    share = sum(weight.numel() for weight in trained) / sum(weight.numel() for weight in model.parameters())
    say(f"{share:.1%} of the weights were trained")
    if smp.rank() == 0:
        adapted: Any = model.get_module()
        adapted.save_pretrained(folder, state_dict=whole)


def say(text: str) -> None:
    if smp.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    smp.stop_requested()  # from here on SIGTERM (a spot reclaim, say) ends the loop below, not the process

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    seen, held_out = split(arguments.text, arguments.files)
    blocks, test_blocks = (Blocks(files, tokenizer, arguments.context) for files in (seen, held_out))
    sampler = share(blocks, shuffle=True)
    train = DataLoader(blocks, arguments.batch, sampler=sampler, drop_last=True)
    test = DataLoader(test_blocks, arguments.batch, sampler=share(test_blocks, shuffle=False), drop_last=True)

    llama = AutoModelForCausalLM.from_pretrained(arguments.model, use_cache=False)
    model = smp.DistributedModel(with_adapters(llama, arguments.lora) if arguments.lora else llama)
    smp.set_activation_checkpointing(llama.model.layers, strategy="each")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=arguments.learning_rate))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, arguments.steps)

    step = 0
    if smp.latest_checkpoint(arguments.checkpoints):
        content = smp.resume_from_checkpoint(arguments.checkpoints)
        step = content["step"]
        scheduler.load_state_dict(content["scheduler"])

    say(f"step {step}  held-out loss {evaluate(model, test):.3f}")
    while step < arguments.steps and not smp.stop_requested():
        epoch, done = divmod(step, len(train))
        sampler.set_epoch(epoch)
        for tokens in itertools.islice(train, done, None):
            optimizer.zero_grad()
            loss = train_step(model, tokens).reduce_mean()
            norm = smp.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the gradients of all ranks
            optimizer.step()
            scheduler.step()
            step += 1
            values = {"loss": loss, "gradient norm": norm, "learning rate": scheduler.get_last_lr()[0]}
            ends = step == arguments.steps or smp.stop_requested()
            if ends or step % arguments.save_every == 0:
                values["held-out loss"] = evaluate(model, test)
                say(f"step {step}  loss {loss.item():.3f}  held-out loss {values['held-out loss']:.3f}")
                content = {"step": step, "scheduler": scheduler.state_dict()}
                smp.save_checkpoint(arguments.checkpoints, f"step_{step}", user_content=content)
            smp.log(values, step, mean_over=smp.DP_GROUP)  # to the run's folder, and to the job file's trackers
            if ends:
                break

    say(str(smp.offload_report()))
    if arguments.lora:
        save_adapters(model, trained, arguments.output)
    else:
        smp.save_pretrained(arguments.output)  # all ranks; the weights are bfloat16, as they were trained
    if smp.rank() == 0:
        tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
