"""In which order every pipeline rank runs the microbatches: made, checked, simulated and drawn."""
