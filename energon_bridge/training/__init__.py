"""What `python -m energon_bridge.training` runs: configuration, presets, the Lightning module, the run."""
