"""Decide which pipeline rank owns which part of a model, and make it so."""
