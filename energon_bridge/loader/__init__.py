"""Delivering: workers, prefetch, the delivered state, save and restore.

Nothing is imported here: the modules that only read states (`document`, `summary`, `state_files`) need no torch.
"""
