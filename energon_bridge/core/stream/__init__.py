"""One lane's pipeline: references become bytes, values, encoded samples and microbatches.

`lane` is an endless stream, `finite` a pass. The stages of a lane: `draws` (of buckets `bucket_draws`), `pack_buffer`
(with `dealt_packs`, where lanes share a buffer), `grouping`; `rows` is what waits between them, and `again` encodes it
again, after a restore too. `loading` loads draws, by `reader` (bytes), `values` (parts) and `leaf` (one dataset).
`user_code` runs every hook of the user's, `returned` checks what they return, `policy` decides on failures and
`failures` names them. `pipeline` holds what lanes of a process share, `settings` is the record of a run, `lane_state`
that of a lane, with the keys that name what was delivered.
"""
