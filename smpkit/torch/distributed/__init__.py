"""Ranks: how they start and find each other, their groups and objects, and how they fail together."""
