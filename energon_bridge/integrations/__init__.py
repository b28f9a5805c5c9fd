"""Trainers: what their loops ask of the data, in their own names; for Lightning, what is seen of it."""
