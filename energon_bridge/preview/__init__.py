"""The content of `energon preview`: samples of datasets and mixes, batches as a model gets them, the steps of a run.

`sources` loads samples, `batches` runs the loader up to a step, `records` turns both into plain values of bounded size,
and `terminal` and `pages` show them; `pages` shows the report of a run, too. Whatever the data holds, a record holds only text and small, re-encoded pictures.
"""
