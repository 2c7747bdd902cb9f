"""What SMP v1 offers in place of functions of torch."""
