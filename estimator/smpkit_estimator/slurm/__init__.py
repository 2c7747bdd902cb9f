"""Slurm as a back end: a run is a folder that all nodes see and a batch script; `sbatch` starts it."""
