"""What `python -m energon_bridge.training` runs.

`config` has its settings and `config_file` reads them, `presets` makes tiny models, `encoder` chooses the task encoder
of a model, `module` is the Lightning module, `callbacks` are its callbacks, and `run` the run, of `run_data`,
`run_model` and `run_folder`. `megatron/` is the trainer with megatron-core. `assemble`, `digits` and `llava_data` are
commands that make models and data.
"""
