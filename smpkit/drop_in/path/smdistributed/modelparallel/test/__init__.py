"""Helpers of SMP v1's tests that public scripts import."""
