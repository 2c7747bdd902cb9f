"""AWS Batch as a back end: a multi-node parallel job, one node for each host."""
