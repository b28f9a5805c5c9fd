"""Data and workers that are not on this machine: web servers, buckets, caches on the node's disk, Ray.

It imports the core only, which asks for it by the registry: for a store by the scheme of its URL, for workers by the
`worker_engine` of a WorkerConfig.

Begin with `remote.py`, the store of URLs: `http.py` and `answers.py` talk to servers, `buckets.py` signs for S3, Google
Cloud Storage and Azure, `fsspec_store.py` has every other scheme. `node_cache.py` keeps blocks of shards on the node's
disk, `file_cache.py` files for cookers (`kept_values.py`, within one quota). `ray/` has workers that are actors of a
cluster.
"""
