"""A fake of Kubernetes: an API server on the loopback address, and a controller that runs pods as processes."""
