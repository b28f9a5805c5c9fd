"""What `energon preview` shows: samples of datasets and mixes, batches as a model gets them, what a run saw at a step.

`sources` loads samples, `batches` lets a run deliver its steps, `records` makes plain values of bounded size of both;
`terminal` and `pages` show them. Whatever is in the data, records hold text and small pictures that were encoded anew.
"""
