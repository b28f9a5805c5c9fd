"""What `scripts/pretrain_vlm.py` runs: configuration, model presets, the Lightning module and the run itself."""
