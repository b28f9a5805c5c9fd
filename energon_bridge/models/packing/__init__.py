"""Which samples share a pack or a batch, and how they are joined.

It imports the core and `conversations/sequences.py`. Begin with `packing`: `Packer` decides which samples of a buffer
form packs. `grouping` puts samples of similar length into one batch, `packed_sequences` joins samples to a row with the
arguments of variable-length attention, `joining` joins whole batches, `pack_limits` finds the lengths from which a
model's samples would no longer be independent of each other in a pack.
"""
