"""The content of `energon preview`: samples of datasets and mixes, batches as a model gets them, the steps of a run.

It imports the core, models and the tools beside it. Begin with `records`, which turns samples and batches into plain
values of bounded size: only text and small, re-encoded pictures, whatever the data holds. `sample_source` loads
samples, `batches` runs the loader up to a step. `terminal` and `pages` (HTML) show these; `texts` and `notebook` are
what samples and batches look like when they are printed. `reads` draws which samples are read when, `mount` shows a
dataset as files.
"""
