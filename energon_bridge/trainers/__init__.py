"""Trainers: the data module and loaders of Lightning, Megatron-LM, Megatron-Bridge, transformers, torchtitan, torchft.

It imports core, cloud and models.

Begin with `datamodule.py`, or with the module of your trainer: `lightning`, `megatron_lm`, `bridge` (with
`bridge_encoders`), `huggingface`, `torchtitan`, `torchft`. `rank_files` reads the states that Megatron's loops write,
`shared_stream` has an iterator for all model chunks of a process. `feedback` lets weights follow losses, `prometheus`
exports metrics. `replica/` has the ranks that share their batches (one loads, the others receive), and the balance
between data-parallel ranks; `context_parallel` cuts sequences, `task_encoders` configures encoders.
"""
