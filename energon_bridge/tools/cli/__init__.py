"""The `energon` command (also installed as `energon-bridge`): `main`, and a file for each verb.

`output` prints tables and JSON; `run_options` and `prepare_options` are options that several verbs have. The command
starts without torch; only `lint` needs it.
"""
