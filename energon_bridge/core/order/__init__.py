"""Order as arithmetic: which sample comes next is a pure function of seed, lane and position. No I/O, no torch."""
