"""Trainers: the data module and loaders of Lightning, Megatron-LM, Megatron-Bridge, transformers, torchtitan, torchft.

It imports core, cloud and models.

Begin with `datamodule.py`, or with the module of your trainer. `replica/` has the ranks that share their batches (one
loads, the others receive), and the balance between data-parallel ranks; `context_parallel.py` cuts sequences.
"""
