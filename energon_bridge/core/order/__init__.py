"""Which sample comes next: pure integers, no I/O, no torch. It imports errors only.

`choose` picks the next samples of a lane; it asks `blend` which leaf, and `leaf_order` which sample of that leaf.
`changes` has what holds from a draw on (weights, bans), `topology` says which rank and worker makes which lane, `rng`
has the keyed permutations and draws.
"""
