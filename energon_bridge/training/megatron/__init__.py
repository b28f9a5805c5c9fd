"""Training with megatron-core, tensor-, pipeline-, context- and data-parallel: `trainer: megatron`."""
