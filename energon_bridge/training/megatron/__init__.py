"""Training with megatron-core, tensor-, pipeline-, context- and data-parallel: `trainer: megatron`.

Begin with `loop`, which runs, logs, validates and saves. `ranks` makes the process groups, `model` the model of a
preset, `step` the forward and backward pass of a microbatch, `checkpoints` reads and writes its files.
"""

from energon_bridge.core.errors import optional_packages

with optional_packages():
    import megatron.core  # noqa: F401 - all of this folder does
