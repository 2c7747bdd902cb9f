"""Kubernetes as a back end: an Indexed Job or a JobSet, one pod for each host."""
