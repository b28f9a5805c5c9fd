"""Training with megatron-core: tensor-, pipeline- and data-parallel, what `trainer: megatron` runs."""
