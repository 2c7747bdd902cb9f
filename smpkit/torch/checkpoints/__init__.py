"""Whole checkpoints of a job: saved in parts by its ranks, read by as many as there are later."""

from __future__ import annotations

from smpkit.torch.checkpoints.huggingface import load_pretrained, save_pretrained
from smpkit.torch.checkpoints.reader import CheckpointReader
from smpkit.torch.checkpoints.resume import latest_checkpoint, resume_from_checkpoint
from smpkit.torch.checkpoints.save import save_checkpoint

__all__ = [
    "CheckpointReader",
    "latest_checkpoint",
    "load_pretrained",
    "resume_from_checkpoint",
    "save_checkpoint",
    "save_pretrained",
]
