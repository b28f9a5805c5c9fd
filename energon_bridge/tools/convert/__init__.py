"""Data as people have it: tables and lists row by row, folders of files; written into shards, or read as they are.

`conversion` writes shards by a `shard_plan` and its `options` (`shards`, `shard_writer`), `finish` makes a dataset of
them, `sources` finds what a folder or file holds. `rows` has the rows of tables (`arrow`, `lists`), `conversations`
those that are dialogues; `table_dataset` and `megatron_index` train on tables and on Megatron's indexes as they are.
`hub` fetches, `left_out` says what was not taken.
"""
