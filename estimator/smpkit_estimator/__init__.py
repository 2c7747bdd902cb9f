"""Runs of a job: what is sent to the launcher, and the back ends that start it."""
