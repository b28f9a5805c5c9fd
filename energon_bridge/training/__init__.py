"""What `python -m energon_bridge.training` runs.

It imports every product but the drop-in. Begin with `run`, which builds all parts of a run and starts it. `config` has
its settings and the curve of the learning rate, `config_file` reads them; `run_data`, `run_model` and `run_folder` make
the data, the model and the folder; `encoder` chooses the task encoder, `presets` makes tiny models, `module` computes
losses. `callbacks` writes the training line and metrics.jsonl (`ProgressReporter`) and the checkpoints
(`Checkpointer`), `generation` the answers of a validation. `megatron/` is the trainer with megatron-core. `assemble`,
`digits` and `llava_data` are commands that make models and data.
"""
