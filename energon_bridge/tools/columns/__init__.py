"""Columns: a number or short text of each sample, and what mixes make of them.

It imports the core, models and `check/`. Begin with `stored`, their format on disk; `making` computes them,
and finds samples of equal content (`energon lint --duplicates`).
`expression` decides what a filter means (`functions` has the functions that it may call), `amounts` blends by tokens
instead of samples, `buckets` makes each global batch of one group of samples, such as one size of images.
"""
