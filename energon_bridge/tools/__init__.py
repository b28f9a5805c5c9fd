"""What one does with data beside training on it: convert, check, forecast, look at it, and the `energon` command.

It imports every product but the drop-in and the training application, which run on it.

Begin with `cli/`, one file for each command; the work is done in the folders beside it. `convert/` makes datasets of
tables, lists and folders, and trains on tables as they are; `columns/` stores numbers and texts of samples, and makes
filters, amounts and buckets of them; `check/` has lint and media metadata; `forecast/` says what a run will deliver;
`preview/` shows samples and batches, `report/` a run that has ended; `verify.py` tests that a user's own pipeline
resumes exactly, `testing.py` makes small datasets.
"""
