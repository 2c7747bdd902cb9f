"""A classification script as Hugging Face's examples write them: `Trainer` alone, and not a word of SMP.

Under SMP's variables `Trainer` trains the pipeline by itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    """Token sequences whose class is whether the first token is a large number."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 60, (count, 12), generator=generator)
        self.labels = (self.tokens[:, 0] > 30).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones_like(self.tokens[index]),
            "labels": self.labels[index],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--save_steps", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tensor_parallel", type=int, default=0)
    parser.add_argument("--report", required=True)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config).double()
    if arguments.tensor_parallel:
        import smdistributed.modelparallel.torch as smp

        smp.set_tensor_parallelism(model)
    training = TrainingArguments(
        output_dir=arguments.output_dir,
        max_steps=arguments.max_steps,
        save_steps=arguments.save_steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        learning_rate=1e-2,
        max_grad_norm=0.1,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulate,
        dataloader_drop_last=True,
        report_to=[],
        seed=7,
        disable_tqdm=True,
    )

    def smoothed_loss(outputs, labels, num_items_in_batch) -> torch.Tensor:
        """Compute what `label_smoothing_factor` does, not in float32."""
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1, reduction="sum")
        return loss / num_items_in_batch

    def accuracy(prediction) -> dict[str, float]:
        return {
            "accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean()),
            "count": float(len(prediction.label_ids)),
        }

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Sentences(64, 1),
        eval_dataset=Sentences(32, 2),
        compute_metrics=accuracy,
        compute_loss_func=smoothed_loss,
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        wrapped = type(trainer.model_wrapped).__name__
        report = {"history": trainer.state.log_history, "wrapped": wrapped}
        Path(arguments.report).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
