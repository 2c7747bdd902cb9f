"""What did happen, and how to look at it: events of each rank, a step as it was executed, traces for Perfetto."""
