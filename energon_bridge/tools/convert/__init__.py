"""Data as people have it: tables and lists row by row, folders of files; written into shards, or read as they are.

It imports the core, models and `check/`. Begin with `sources`, which decides what a path holds, and `rows`, the form of
sources and how a row becomes a sample. Sources: `lists` (JSON, CSV, COCO), `arrow` (parquet; `row_groups`,
`table_values`), `media_folders`, `tars`, `speech`, `hub`. `splits` reads splits from names, `conversations` takes media
out of dialogues, `left_out` says which files were not taken. Writing: `conversion` runs `shard_plan` by `options`,
`shards` and `shard_writer` write, `finish` makes a dataset of them. `table_dataset` and `megatron_index` train on
tables and on Megatron's .bin and .idx as they are.
"""
