"""Half precision: casting a model, and the loss scale."""
