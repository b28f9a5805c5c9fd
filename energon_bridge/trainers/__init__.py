"""Trainers: the data module and loaders of Lightning, Megatron-LM, Megatron-Bridge, transformers, torchtitan, torchft.

It imports core, cloud and models.

Begin with `datamodule.py`, or with the module of your trainer: `lightning` (progress bar and metrics), `megatron_lm`,
`bridge` (with `bridge_encoders`), `huggingface`, `torchtitan`, `torchft`. `rank_files` reads the states that Megatron's
loops write; `shared_stream` lets several virtual pipeline stages (model chunks) of one process read the same batches.
`feedback` lets weights follow losses, `prometheus` exports metrics, `context_parallel` cuts sequences and
`context_parallel_media` divides media, `task_encoders` makes encoders from settings. In `replica/`, one rank loads for
others, and ranks balance their work.
"""
