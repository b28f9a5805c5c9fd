"""The content of `energon preview`: samples of datasets and mixes, batches as a model gets them, the steps of a run.

`sample_source` loads samples, `batches` runs the loader up to a step, `records` turns both into plain values of bounded
size, and `terminal` and `pages` show them. Whatever the data holds, a record holds only text and small, re-encoded
pictures. The report of a run (`tools/report/`) is one of the pages.
"""
