"""Task encoders: turn raw samples into batches.

`task_encoder` has the hooks, `hooks` their table and what they can ask the engine, `checks` what is refused before a
run; `cooking` has the cookers of crude datasets. `decoder` and `deferred` turn bytes into values, `collate` samples
into batches. Encoders that know models, and ready-made packing and grouping, are in `models/`.

The names are those of `__init__.pyi`, imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
