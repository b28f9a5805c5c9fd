"""Training with megatron-core, tensor-, pipeline-, context- and data-parallel: `trainer: megatron`."""

from energon_bridge.core.errors import optional_packages

with optional_packages():
    import megatron.core  # noqa: F401 - all of this folder does
