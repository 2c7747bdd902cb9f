"""Which module of the model is on which pipeline rank."""
