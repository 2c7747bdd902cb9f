"""Activation checkpointing: keep the inputs of a module only, and compute the rest again in backward."""
