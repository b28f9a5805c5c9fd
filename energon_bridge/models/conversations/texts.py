"""From texts to tokens, by any tokenizer of the transformers interface.

Behind a fast tokenizer stands an engine that takes many texts at a time. It is asked directly, with the settings that
transformers itself would ask it with: what stands in front of it costs as much as a short text does. A tokenizer whose
class changes how texts are encoded is asked itself.

Where tokens lie in a text costs the engine half as much again. If tokens are bytes and the text is ASCII, their lengths
say it, provided that together they are as long as the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_ENCODE = ("__call__", "encode", "_encode_plus", "_batch_encode_plus")
_PLAIN = frozenset(f"transformers.tokenization_utils_{name}" for name in ("base", "fast", "tokenizers"))
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")  # which leave ASCII as it is
_lengths: WeakKeyDictionary[Any, np.ndarray | None] = WeakKeyDictionary()


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text, without special tokens around it."""
    if not is_fast(tokenizer):
        return [list(tokenizer.encode(text, add_special_tokens=False)) if text else [] for text in texts]
    engine = _fast_engine(tokenizer)
    if engine is not None:
        return [encoding.ids for encoding in engine.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(encoded["input_ids"])


def tokens_with_places(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of a text, and where in it each begins and where it ends; the tokenizer must be a fast one."""
    engine = _fast_engine(tokenizer)
    if engine is None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        offsets = encoded["offset_mapping"]
    else:
        lengths = _token_lengths(tokenizer, engine) if text.isascii() else None
        if lengths is not None:
            tokens = as_array(engine.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            with suppress(IndexError):  # of no tokens, or of those that were added since
                widths = lengths[tokens]
                ends = widths.cumsum()
                if ends[-1] == len(text):
                    return tokens, ends - widths, ends
        encoding = engine.encode(text, add_special_tokens=False)
        ids = encoding.ids
        offsets = encoding.offsets
    places = np.array(offsets, np.int64).reshape(-1, 2)
    return as_array(ids), places[:, 0], places[:, 1]


def as_array(tokens: Sequence[int]) -> np.ndarray:
    """Return a list of tokens as int64: at a third of what `np.array` takes."""
    return np.fromiter(tokens, np.int64, len(tokens))


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


def _token_lengths(tokenizer: Any, engine: Any) -> np.ndarray | None:
    """Return how many bytes each token has, None if tokens are more than bytes or leave white space out."""
    if tokenizer not in _lengths:
        lengths = None
        if _is_byte_level(engine):
            vocabulary = engine.get_vocab(with_added_tokens=True)
            lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
            for token, number in vocabulary.items():
                lengths[number] = len(token)
        _lengths[tokenizer] = lengths
    return _lengths[tokenizer]


def _is_byte_level(engine: Any) -> bool:
    """Return whether each character of a token is one byte of the text."""
    model = engine.model
    splits = _steps(engine.pre_tokenizer)
    adds = ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        type(model).__name__ == "BPE"
        and not any(getattr(model, name) for name in adds)
        and all(step["type"] in _NORMAL_FORMS for step in _steps(engine.normalizer))
        and [step["add_prefix_space"] for step in splits if step["type"] == "ByteLevel"] == [False]
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in splits)
        and not any(step.get("behavior") == "Removed" for step in splits)
        and all(
            step["type"] == "TemplateProcessing" or (step["type"] == "ByteLevel" and not step["trim_offsets"])
            for step in _steps(engine.post_processor)
        )
    )


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a part of an engine, step by step."""
    whole = [] if part is None else [json.loads(part.__getstate__())]
    inner = ("normalizers", "pretokenizers", "processors")
    while sequences := [step for step in whole if step["type"] == "Sequence"]:
        whole = [step for step in whole if step["type"] != "Sequence"]
        whole += [step for one in sequences for name in inner for step in one.get(name, ())]
    return whole
