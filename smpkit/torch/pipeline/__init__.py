"""Pipeline parallelism: every rank runs the user's step; values have an owner."""
