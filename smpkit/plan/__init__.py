"""What would happen: pure arithmetic on frozen data, without torch and without a cloud."""
