"""What loads a prepared dataset in one order on any number of ranks, and prepares it: everything else is built on this.

It imports no other product, and runs without them. What they add (a store for a scheme of URLs, a format of datasets,
workers of another kind, decoders) is a line of `registry.toml`, asked for by its kind and name when it is first needed.

Begin with `datasets.py`, which opens a run, and `loader/delivery.py`, which delivers it. From the ground up: `order/`
says which sample comes next, by arithmetic; `samples/`, `storage/` and `format/` know what samples are, where bytes lie
and what is on disk; `stores/` have files by key; `mix/` blends datasets; `encoder/` has the hooks of task encoders;
`stream/` makes one lane's batches; `loader/` has workers and states; `prepare/` makes a folder of shards a dataset.
"""

__version__ = "0.1.0"
