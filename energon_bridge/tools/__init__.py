"""What one does with data beside training on it: convert, check, forecast, look at it, and the `energon` command.

It imports every product but the drop-in and the training application, which run on it.

Begin with `cli/`, one file for each command. `convert/` makes datasets of what people have, and reads tables as they
are; `columns/` has numbers and texts of samples, and the filters, amounts and buckets made of them; `check/` has lint
and media metadata; `forecast/` says what a run will deliver; `preview/` and `report/` show it; `verify.py` tries a
user's own pipeline, `testing.py` makes small datasets.
"""
