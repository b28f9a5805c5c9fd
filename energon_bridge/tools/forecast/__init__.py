"""What a run will deliver, from metadata and arithmetic alone: no sample is read.

`planned_run` has the run itself, as options or a saved state describe it; `epochs` forecasts how far each leaf gets,
`samples` names the samples of a step.
"""
