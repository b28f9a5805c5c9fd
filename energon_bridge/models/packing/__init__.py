"""Which samples share a pack or a batch, and how they are joined.

`packing` fills packs, `grouping` puts samples of similar length together, `packed_sequences` joins samples to a row
with the arguments of variable-length attention, `joining` joins batches.
"""
