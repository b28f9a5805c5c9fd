"""Workers that are actors of a Ray cluster, and go on elsewhere when a node is lost.

`ray_engine` is what the loader of the training process holds, `ray_relay` the process beside it that talks to the
cluster, `ray_actor` what runs on the nodes. Only these modules import Ray.
"""
