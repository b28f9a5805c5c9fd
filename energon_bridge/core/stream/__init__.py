"""One lane's pipeline: references become bytes, values, encoded samples and microbatches.

`lane` is an endless stream, `finite` a pass; `draws` loads what the order chooses, by `reader` (bytes), `values`
(parts) and `leaf` (one dataset). `steps` runs every hook of the user's, `user_code` checks what hooks return, `policy`
decides on failures and `failures` names them. `pack_buffer` (with `dealt_packs`, where lanes share a buffer) packs,
`grouping` groups. `pipeline` holds what lanes of a process share, `settings` is the record of a run, `state` that of a
lane.
"""
