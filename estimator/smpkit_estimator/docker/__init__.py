"""The job in the real training image, with one container for each host."""
