"""The `energon` command (also installed as `energon-bridge`): `main`, and a file for each verb.

A verb checks its options, calls the folder of `tools/` (or `core/prepare/`) that does the work, and prints. Begin with
`main`. `output` prints tables and JSON; `run_options` and `prepare_options` are options that several verbs have,
`assistant` asks the questions of `energon prepare`. The command and its help start without torch: verbs that need it
import it when they run.
"""
