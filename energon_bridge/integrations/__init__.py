"""Trainers other than Lightning: what their loops ask of the data, in their own names."""
