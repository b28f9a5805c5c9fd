"""Building prepared datasets: the functions behind `energon prepare`.

`indexing` reads shards and writes `.nv-meta`, `split` says which shard is in which part, `staging` moves files into
place so that a kill leaves nothing half done. The names are those of `__init__.pyi`.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
