"""Tensor parallelism for Hugging Face models by the plan that comes with them (`_tp_plan`)."""
