"""What a run will deliver, from metadata and arithmetic alone: no sample is read.

It imports the core and `columns/`. Begin with `planned_run`, the run that options or a saved state describe; `epochs`
forecasts how far each leaf gets (`energon plan`), `samples` names the samples of a step (`energon which`),
`requests` counts what a store is asked for, `needs` says which cores, memory and network a run takes, and `grids` what
language and encoder ranks read.
"""
