"""This package side by side with megatron-energon and webdataset: `python benchmarks/run.py` (or scripts/bench)."""
