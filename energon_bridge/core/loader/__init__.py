"""Delivery: workers, prefetch, the delivered state, save and restore.

Nothing is imported here, so that the modules that only read states (`document`, `summary`) need no torch.
"""
