"""The formats on disk. Training reads by index and never walks a tar.

`dataset` opens a prepared folder (`nvmeta` has its files, `dataset_config` what its `dataset.yaml` says, `field_map`
which part is which field); `tar` and `tar_index` have shards, `jsonl` lines, `foreign` what other products read as
datasets. `key_index` finds samples by key, `join` pairs those of several datasets. `checksums` and `marks` tell whether
content has changed, `media` knows kinds of files by name and first bytes, `documents` reads YAML and JSON with file and
field for errors, `parallel` works on many shards at once. The formats are those of Megatron Energon 7.4, so both
packages can share a dataset.
"""
