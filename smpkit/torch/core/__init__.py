"""What every part of the runtime stands on: the process's state, trees of values, tensor specs, module calls."""
