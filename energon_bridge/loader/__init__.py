"""Delivering: workers, prefetch, the delivered state, save and restore."""

from energon_bridge.loader.savable import SavableDataLoader

__all__ = ["SavableDataLoader"]
