"""Kubernetes as a back end: an Indexed Job, one pod for each host."""
