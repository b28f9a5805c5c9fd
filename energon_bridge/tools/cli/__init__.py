"""The `energon` command (also installed as `energon-bridge`): `main`, and a file for each verb.

A verb checks its options, calls the folder of `tools/` (or `core/prepare/`) that does the work, and prints. Begin with
`main`. `output` prints tables and JSON; `run_options` and `prepare_options` are options that several verbs have,
`assistant` asks questions. The command starts without torch; only `lint` needs it.
"""
