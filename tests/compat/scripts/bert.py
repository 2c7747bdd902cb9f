"""Pretraining of BERT (masked words, next sentence) in SMP v1's API: automatic partition, FusedLAMB, partial saves."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import smdistributed.modelparallel.torch as smp
import torch
from transformers import BertConfig, BertForPreTraining


class PretrainingCriterion(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-1)
        self.vocab_size = vocab_size

    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels):
        masked_lm_loss = self.loss_fn(prediction_scores.view(-1, self.vocab_size), masked_lm_labels.view(-1))
        next_sentence_loss = self.loss_fn(seq_relationship_score.view(-1, 2), next_sentence_labels.view(-1))
        return masked_lm_loss + next_sentence_loss


class BertWithLoss(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = BertForPreTraining(config)
        self.criterion = PretrainingCriterion(config.vocab_size)

    def forward(self, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels):
        output = self.model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
        return self.criterion(
            output.prediction_logits, output.seq_relationship_logits, masked_lm_labels, next_sentence_labels
        )


@smp.step
def smp_step(args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_labels, model, optimizer):
    loss = model(input_ids, segment_ids, input_mask, masked_lm_labels, next_labels)
    model.backward(loss)
    return loss


def batch_of(args, step):
    """Return this replica's part of a step's sentences: tokens repeat, so that what is masked can be guessed."""
    generator = torch.Generator().manual_seed(step)
    size, length = args.train_batch_size, args.max_seq_length
    token = torch.randint(2, args.vocab_size, (size, 1), generator=generator)
    input_ids = token.expand(size, length).clone()
    masked = torch.rand(size, length, generator=generator) < 0.25
    masked[:, 0] = True
    labels = torch.where(masked, input_ids, -1)
    input_ids[masked] = 1
    half = torch.arange(length) >= length // 2
    segments = half.long().expand(size, length).contiguous()
    share = slice(smp.dp_rank() * size // smp.dp_size(), (smp.dp_rank() + 1) * size // smp.dp_size())
    batch = (input_ids, segments, torch.ones_like(input_ids), labels, (token[:, 0] % 2).long())
    return tuple(part[share] for part in batch)


def prepare_model_and_optimizer(args, device):
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=args.max_seq_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = smp.DistributedModel(BertWithLoss(config).double())
    model.to(device)  # of no effect before the first step, and allowed
    no_decay = ("bias", "LayerNorm.bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    kind = smp.optimizers.FusedLAMB if args.optimizer == "lamb" else torch.optim.AdamW
    optimizer = smp.DistributedOptimizer(kind(groups, lr=args.learning_rate))
    return model, optimizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=24)
    parser.add_argument("--max_seq_length", type=int, default=8)
    parser.add_argument("--vocab_size", type=int, default=32)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=5e-2)
    parser.add_argument("--optimizer", choices=("lamb", "adamw"), default="lamb")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--partial_checkpoint", type=int, default=1)
    parser.add_argument("--model-dir", default=".")
    parser.add_argument("--report", default="")
    args, _ = parser.parse_known_args()

    if not smp.is_initialized():
        smp.init()
    torch.manual_seed(args.seed)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    model, optimizer = prepare_model_and_optimizer(args, device)
    model.train()
    losses = []
    for step in range(args.max_steps):
        optimizer.zero_grad()
        batch = [part.to(device) for part in batch_of(args, step % 2)]
        loss_mb = smp_step(args, device, *batch, model, optimizer)
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss_mb.reduce_mean(), smp.DP_GROUP)).mean().item())
        if smp.rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")

    folder = Path(args.model_dir)
    name = str(folder / "ckpt.pt")
    if smp.dp_rank() == 0:
        content = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "step": args.max_steps}
        smp.save(content, name, partial=True)
        smp.save(content, name + ".old", partial=True)
        os.remove(f"{name}.old_{smp.mp_rank()}")  # how the script of old kept its folder small  # noqa: PTH107
    smp.barrier()
    content = smp.load(name, partial=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    assert content["step"] == args.max_steps
    whole = model.state_dict()
    if smp.rank() == 0:
        smp.save({"model": whole}, str(folder / "bert_full.pt"), partial=False)
        if args.report:
            Path(args.report).write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
