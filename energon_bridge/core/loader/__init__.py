"""Delivery: workers, prefetch, the delivered state, save and restore.

`savable` is the loader; `dataset_spec` is what users give it (the leaves and settings of `run_data`, and the ranks),
`run_plan` cuts that into lanes, and `opening` opens the pipeline of one process. `position` is what has been delivered,
`saved_run` that as JSON, `state_files` reads it from checkpoints, and `fits` says whether a state fits a run. `pool`
watches and replaces workers (`processes` starts them, `workers` runs in them, `transport` hands batches over), `bans`
finds banned samples, `metrics` counts.

Nothing is imported here, so that the modules that only read states (`saved_run`, `state_files`) need no torch.
"""
