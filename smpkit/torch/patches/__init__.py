"""Import paths of SMP v1: `smdistributed.modelparallel.torch.patches`."""
