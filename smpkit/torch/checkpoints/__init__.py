"""Whole checkpoints of a job: saved in parts by its ranks, read by as many as there are later."""
