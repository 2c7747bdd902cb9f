"""What an optimizer step needs over all ranks: gradient norms and master weights."""
