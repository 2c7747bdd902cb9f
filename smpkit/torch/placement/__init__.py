"""Where each parameter lives: which pipeline rank owns it, its tensor-parallel shard, when it is made."""
