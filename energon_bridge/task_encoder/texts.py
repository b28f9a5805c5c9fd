"""From texts to tokens, by any tokenizer of the transformers interface.

Behind a fast tokenizer stands an engine that takes many texts at a time. It is asked directly, with the settings that
transformers itself would ask it with: what stands in front of it costs as much as a short text does. A tokenizer whose
class changes how texts are encoded is asked itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_ENCODE = ("__call__", "encode", "_encode_plus", "_batch_encode_plus")
_PLAIN = frozenset(f"transformers.tokenization_utils_{name}" for name in ("base", "fast", "tokenizers"))


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text, without special tokens around it."""
    if not is_fast(tokenizer):
        return [list(tokenizer.encode(text, add_special_tokens=False)) if text else [] for text in texts]
    engine = _fast_engine(tokenizer)
    if engine is not None:
        return [encoding.ids for encoding in engine.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(encoded["input_ids"])


def tokens_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text, and where in it each of them begins and ends; the tokenizer must be a fast one."""
    engine = _fast_engine(tokenizer)
    if engine is not None:
        encoding = engine.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def is_fast(tokenizer: Any) -> bool:
    """Return whether a tokenizer takes many texts at a time and gives the offsets of their tokens."""
    return bool(getattr(tokenizer, "is_fast", False))


def _fast_engine(tokenizer: Any) -> Any | None:
    """Return what encodes the texts of a fast tokenizer, or None if only the tokenizer itself knows how."""
    if not _is_plain(tokenizer.__class__):
        return None
    engine = tokenizer.backend_tokenizer
    # Whoever encoded last may have left these; transformers sets them for each call, too.
    if engine.padding is not None:
        engine.no_padding()
    if engine.truncation is not None:
        engine.no_truncation()
    split = bool(tokenizer.split_special_tokens)
    if engine.encode_special_tokens != split:
        engine.encode_special_tokens = split
    return engine


@lru_cache(maxsize=64)
def _is_plain(kind: type) -> bool:
    """Return whether all that a class of tokenizers encodes with is that of transformers' base classes."""
    owners = [next((base for base in kind.__mro__ if name in vars(base)), None) for name in _ENCODE]
    plain = all(owner.__module__ in _PLAIN for owner in owners if owner is not None)
    return plain and hasattr(kind, "backend_tokenizer")
