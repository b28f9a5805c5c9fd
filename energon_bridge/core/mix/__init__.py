"""Mixes: from a metadataset file, a dict or a `Blender` to a tree of leaves with weights.

`load` turns any source (a path, a dict, a `Blender`) into leaves; `metadataset` reads files; `tree` has the nodes,
`flatten` their effective weights, `schedule` weights that change, `weights` those of a run. All of this reads nothing
but YAML files. `opener` opens the datasets, helped by an index of an earlier start; `leaves` and `joins` hold what is
open.

The names are those of `__init__.pyi`, imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
