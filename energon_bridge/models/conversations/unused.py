"""What conversations do not take of an entry: columns beside turns or a pair, and keys of pairs.

`energon convert` says it of the first rows. Direct reading says it once for each column of a dataset, but for ids and
short texts that are known to say something of a sample (`source`, `language`), and for what turns say, too.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from energon_bridge.core.errors import SampleError
from energon_bridge.core.samples.sample_place import pass_on
from energon_bridge.models.conversations.parts import MEDIA, medium_by_name
from energon_bridge.models.conversations.questions import (
    CHOICES,
    CONTEXTS,
    columns_of,
    is_silent,
    options_of,
    template_columns,
    texts_in,
)
from energon_bridge.models.conversations.segments import is_used_option, may_be_box, may_change
from energon_bridge.models.conversations.turns import (
    BESIDE_PAIRS,
    CONVERSATIONS,
    KNOWN_BESIDE,
    SAYING,
    SEVERAL,
    SYSTEMS,
    find_pair,
    has_pairs,
    role_name,
)
from energon_bridge.models.conversations.withheld import learned_if, may_reject, split_columns

_logger = logging.getLogger(__name__)
_NEVER_USED = {"label", "objects"}
_OF_TEMPLATES = (*SAYING, "role", "from", "content", "value", "name", "id", "tool_call_id", "function_call", "type")
"""Keys of turns that are read, or that most templates write."""


def is_filled(value: Any) -> bool:
    """Return whether a value is something: no null, empty text, list or object."""
    return value is not None and not (isinstance(value, str | list | tuple | Mapping) and not value)


def unused_columns(entry: Mapping[str, Any], *, has_media: bool, question: str | None = None) -> list[str]:
    """Return the filled columns that a conversation does not take; of an entry that is none, none.

    `question` is the template of the question, if it is not composed. Raises SampleError for what is not understood.
    """
    has_turns = any(name in entry for name in CONVERSATIONS)
    pair = find_pair(entry)
    taken: list[str] = [*CONVERSATIONS, *(KNOWN_BESIDE - _NEVER_USED)]
    if has_turns:
        pass
    elif has_pairs(entry):
        taken += [*SEVERAL, "answer", *CONTEXTS, *CHOICES]
    elif pair is not None:
        taken += [*pair, *(template_columns(question) if question else columns_of(entry))]
    else:
        return []
    systems = [name for name in SYSTEMS if entry.get(name)][1:]  # the first is taken
    return [
        name
        for name, value in entry.items()
        if is_filled(value) and (name not in taken or name in systems) and not (has_media and is_used_option(name))
    ]


def unused_keys(entry: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the keys of pairs in a list that no turn takes, and those of turns that only chat templates may use."""
    of_pairs: dict[str, None] = {}
    of_turns: dict[str, None] = {}
    for name in (*CONVERSATIONS, *SEVERAL):
        for turn in entry[name] if isinstance(entry.get(name), list) else ():
            if role_name(turn) is not None:
                of_turns |= dict.fromkeys(_keys(turn, _OF_TEMPLATES))
            elif isinstance(turn, Mapping) and (pair := find_pair(turn)) is not None:
                taken = (*pair, *BESIDE_PAIRS, *SYSTEMS, *columns_of(turn), *(["i"] if name == "QA" else []))
                of_pairs |= dict.fromkeys(_keys(turn, taken))
    return list(of_pairs), list(of_turns)


def _keys(turn: Mapping[str, Any], taken: Sequence[str]) -> Iterator[str]:
    return (name for name, value in turn.items() if is_filled(value) and name not in taken and learned_if(name) is None)


def name_unused(sample: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Warn, once for a dataset, of filled columns of a cooked conversation that may matter and are not taken."""
    path = _path_of(sample)
    seen = _seen[path]
    new = [name for name, value in (*entry.items(), *_of_pairs(entry)) if name not in seen and is_filled(value)]
    if not new:
        return
    seen.update(new)
    has_media = any(medium_by_name(name) for name in sample) or any(entry.get(f"{kind}s") for kind in MEDIA)
    unused = unused_columns(entry, has_media=has_media)
    said = "\n".join(text for name, value in entry.items() if name not in unused for text in texts_in(value))
    names = [name for name in unused if name in new and not _is_known(name, entry[name], said)]
    names = [name for name in names if not (has_media and may_be_box(name, entry[name]))]  # named as such
    names = [name for name in names if name not in _composed(entry, said)] if names else []
    keys = [name for name in unused_keys(entry)[0] if not is_silent(name, None)]
    names += [name for name in map(_OF_PAIRS.format, keys) if name in new]
    if names:
        _warn(
            f"{path}: conversations do not use {', '.join(names)}. To have a text seen or learned, write it into a "
            "turn, the question or `system`; the others can stay, or be left out (energon convert with --ignore)"
        )


def _composed(entry: Mapping[str, Any], said: str) -> list[str]:
    """Return the columns of a question, its choices and its answer if its turns say them, as convert writes them."""
    with suppress(SampleError):
        options = options_of(entry)
        if options is not None and options.lines in said:
            return [*(find_pair(entry) or ()), *columns_of(entry)]
    return []


_OF_PAIRS = "{} (of pairs)"


def _of_pairs(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of pairs in lists, as they are named, with their values."""
    for form in (*CONVERSATIONS, *SEVERAL):
        for pair in entry[form] if isinstance(entry.get(form), list) else ():
            if isinstance(pair, Mapping) and role_name(pair) is None:
                yield from ((_OF_PAIRS.format(name), value) for name, value in pair.items())


def name_unused_fields(path: str, sample_type: str, unused: Mapping[str, Any]) -> None:
    """Warn, once for a dataset, of columns that its type has no fields for, with a value of each."""
    names = [name for name, value in unused.items() if name not in _seen[path] and not _is_known(name, value, "")]
    _seen[path].update(unused)
    if names:
        _warn(
            f"{path}: a {sample_type} does not use {', '.join(names)}: for other fields, name the columns in the field "
            "map of .nv-meta/dataset.yaml"
        )


_seen: defaultdict[str, set[str]] = defaultdict(set)


def _warn(text: str) -> None:
    pass_on((_logger.name, text, text))  # also of several workers, once


def name_order(sample: Mapping[str, Any], kind: str, names: Sequence[str]) -> None:
    """Warn, once for a dataset, of the order in which media of columns with different names are shown."""
    path = _path_of(sample)
    order = f"the {kind}s of {', '.join(names)}"
    if has_order(names) and order not in _seen[path]:
        _seen[path].add(order)
        _warn(
            f"{path}: a question has {order}, shown in this order: for another, list them as {kind}s: [PART, …] in its "
            "json"
        )


def has_order(names: Sequence[str]) -> bool:
    """Return whether several parts or columns of media are called by more than numbers, so that their order matters."""
    stems = {re.sub(r"[\W_\d]+", "", name.rpartition(".")[0] or name) for name in names}
    return len(stems) > 1


def _path_of(sample: Mapping[str, Any]) -> str:
    sources = sample.get("__sources__") or ()
    return sources[0].dataset_path if sources else "a sample"


def _is_known(name: str, value: Any, said: str) -> bool:
    """Return whether it need not be said that a column is not used: metadata, verdicts, what is said elsewhere."""
    texts = texts_in(value)
    is_said = bool(texts) and all(text in said for text in texts)
    is_verdict = may_reject(name) and name.lower() != "answer"
    return is_said or is_silent(name, value) or may_change(name) or is_verdict or bool(split_columns((name,)))
