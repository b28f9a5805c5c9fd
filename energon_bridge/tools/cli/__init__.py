"""The `energon` command (also installed as `energon-bridge`). It starts without torch; only `lint` needs it."""
