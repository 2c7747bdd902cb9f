"""Data parallelism: gradient reduction, sharded optimizer state and sharded parameters."""
