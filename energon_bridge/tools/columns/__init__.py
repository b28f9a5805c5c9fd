"""Columns: a number or short text of each sample, and what mixes make of them.

`stored` has their format on disk, `making` computes them, `expression` is the language of filters, `functions`
its functions, `amounts` blends by tokens instead of samples, and `buckets` makes global batches of one group of samples
each.
"""
