"""Goldens: what must stay the same while code is moved, renamed and merged. `scripts/goldens --help` tells more.

Each part is a module here with a function `collect`, which returns its items by name. They use public API only, so
that they outlive the modules they look through; what has no public name is in `adapter.py`.
"""
