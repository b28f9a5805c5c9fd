"""Task encoders: turn raw samples into batches.

`base` has the hooks, `hooks` their table and what they can ask the engine, `cooking` the cookers of crude datasets.
`decoder`, `images` and `deferred` turn bytes into values; `collate` turns samples into batches, and `joining` batches
into one. `packing` and `grouping` are ready-made choices of which samples share a pack or a batch, and `costs` computes
what a batch costs. The `multimodal` encoder turns images and texts into tokens, labels and pixel values: `conversation`
and `sample_encoders` read the conversation of a sample, `layout` renders it as text, `sequences` and `packed_sequences`
build the model's input. `families` has encoders for models of Hugging Face.

The names are those of `__init__.pyi`, imported on first use: the base needs no model.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
