"""What offloading costs and saves: activations (checkpointed layers' inputs) and whole models."""
