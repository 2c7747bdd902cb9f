"""A text classifier with Hugging Face's `Trainer`: alone with `python train.py --device-gib 4`, or over a pipeline.

Over a pipeline it is started by `smpkit run examples/trainer/job.yaml`; the script does not know.
"""

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

import smpkit

KINDS = ("sorted", "shuffled")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="samples per device")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--device-gib", type=float, help="memory that the model may take; only without a pipeline")
    parser.add_argument("--output", type=Path, default=os.environ.get("SM_MODEL_DIR", "runs/output"))
    return parser.parse_known_args()[0]


class Lists(Dataset[dict[str, torch.Tensor]]):
    """Lists of numbers, sorted or not; a class has half of them."""

    def __init__(self, count: int, seed: int, length: int = 12) -> None:
        draw = random.Random(seed)
        self.rows, self.labels = [], [number % 2 for number in range(count)]
        for label in self.labels:
            numbers = sorted(draw.sample(range(2, 64), length))
            if label == KINDS.index("shuffled"):
                draw.shuffle(numbers)
            self.rows.append([1, *numbers])  # 1 begins each row, and the classifier looks at it

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(self.rows[index]), "labels": torch.tensor(self.labels[index])}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {"accuracy": float(np.mean(right))}


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=16,
        id2label=dict(enumerate(KINDS)),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    training = TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=arguments.batch,
        dataloader_drop_last=True,  # a pipeline divides each batch into microbatches
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=max(1, arguments.steps // 4),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        training,
        train_dataset=Lists(arguments.samples, seed=1),
        eval_dataset=Lists(256, seed=2),
        compute_metrics=accuracy,
    )
    fitted = smpkit.fit(model, device_gib=arguments.device_gib) if arguments.device_gib else None
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{type(trainer.model_wrapped).__name__}: accuracy {metrics['eval_accuracy']:.3f}", flush=True)
    if fitted:
        print(fitted.report())


if __name__ == "__main__":
    main()
