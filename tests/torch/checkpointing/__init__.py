"""Activation checkpointing on one rank; over pipelines see tests/transparency/test_checkpointing.py."""
